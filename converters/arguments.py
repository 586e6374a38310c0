"""Command lines of the converters. Imports nothing heavy."""

import argparse
import re
import sys
from collections.abc import Sequence

from llamajax.errors import show_any_text


def hf_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the arguments of `python -m converters.hf`; `import` is the default command. Exits with code 2 on mistakes."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] not in ("import", "export", "upcycle", "-h", "--help"):
        argv = ["import", *argv]
    show_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m converters.hf",
        description="Convert Llama, Mistral and Qwen models, and models with experts, from and to Hugging Face.",
        epilog="`python -m converters.hf HF_DIR OUT` imports.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "import": (
            "HF_DIR",
            "directory with config.json and safetensors, or hf://ORG/NAME[@REVISION]",
            "a checkpoint and its model.yaml, for training",
        ),
        "export": (
            "RUN_OR_CHECKPOINT",
            "run directory (exports its newest good step), or RUN/checkpoints/STEP; with --merge also a PEFT directory",
            "a Hugging Face directory, for transformers; of a run with adapters, a PEFT directory",
        ),
        "upcycle": (
            "HF_DIR",
            "directory of a dense model with config.json and safetensors, or hf://ORG/NAME[@REVISION]",
            "a Hugging Face directory of a model with experts that computes the same",
        ),
    }
    dtypes = {"import": ("float32", "bfloat16")}
    for name, (source, source_help, out_help) in texts.items():
        command = commands.add_parser(name, help=f"write {out_help}")
        command.add_argument("source", metavar=source, help=source_help)
        command.add_argument("out", metavar="OUT", help=f"directory to create: {out_help}")
        command.add_argument(
            "--dtype",
            choices=dtypes.get(name, ("float32", "bfloat16", "float16")),
            help="dtype of the written weights (default: unchanged)",
        )
        command.add_argument(
            "--verify",
            action=argparse.BooleanOptionalAction,
            help="compare the logits of both models, which needs the whole model in memory (default: below 2 billion"
            " parameters); an export also compares token ids, unless --no-verify is given",
        )
        command.set_defaults(license=None, merge=False, base=None)
        if name != "import":
            license_help = "licence identifier for the model card, such as apache-2.0 (default: the imported model's)"
            command.add_argument("--license", type=_license, help=license_help)
        if name == "export":
            merge_help = "merge adapters into their base and write a whole model"
            command.add_argument("--merge", action="store_true", help=merge_help)
            base_help = "name on the Hugging Face Hub, or directory, that exported adapters name as their base (default: the"
            command.add_argument("--base", metavar="BASE", help=f"{base_help} one that the run started from)")
        if name == "upcycle":
            _add_experts(command)
    return parser.parse_args(argv)


def _add_experts(command: argparse.ArgumentParser) -> None:
    command.add_argument("--experts", metavar="N", type=_positive, required=True, help="number of experts of each layer")
    command.add_argument(
        "--top_k", metavar="N", type=_positive, default=2, help="experts that each token chooses (default: 2)"
    )
    command.add_argument(
        "--mlp_dim",
        metavar="N",
        type=_positive,
        help="width of an expert (default: that of the MLP); with a half, a quarter and so on, two, four and so on experts"
        " share a copy of the MLP",
    )
    command.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="weights of a token's experts add up to one, without which the model computes something else (default: yes)",
    )
    command.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the router (default: 0)")


def _license(text: str) -> str:
    from llamajax.weights.hf_files import LICENSE  # imports the data libraries; --help does not wait for them

    if not re.fullmatch(LICENSE, text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a licence identifier; write one such as apache-2.0, mit or llama3.1"
        )
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{number} must be positive")
    return number


def tokenizer_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the arguments of `python -m converters.tokenizer`. Exits with code 2 on mistakes."""
    show_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m converters.tokenizer", description="Change the tokenizer of a Hugging Face model."
    )
    grow = parser.add_subparsers(dest="command", required=True).add_parser(
        "grow",
        help="add pieces learnt from a corpus",
        description="Learn new pieces from a corpus and add them to the tokenizer and the model. Old tokens keep their ids"
        " and rows.",
    )
    grow.add_argument("model", metavar="MODEL", help="Hugging Face directory with config.json, safetensors and a tokenizer")
    grow.add_argument("out", metavar="OUT", help="directory to create: the same model with the larger vocabulary")
    grow.add_argument("--corpus", metavar="FILE_OR_GLOB", nargs="+", required=True, help="text to learn from")
    grow.add_argument("--num_pieces", metavar="N", type=_positive, required=True, help="number of pieces to add")
    grow.add_argument(
        "--kind",
        choices=("text", "jsonl", "parquet", "arrow"),
        default="text",
        help="format of the corpus files (default: text)",
    )
    grow.add_argument(
        "--text_key",
        metavar="KEY",
        default="text",
        help="field or column with the text, for jsonl, parquet and arrow (default: text)",
    )
    grow.add_argument(
        "--train_max_bytes",
        metavar="N",
        type=_positive,
        default=10_000_000,
        help="bytes of text to learn from and measure on, sampled evenly from the corpus (default: 10,000,000)",
    )
    grow.add_argument(
        "--pad_vocab_multiple",
        metavar="M",
        type=_positive,
        default=64,
        help="pad the vocabulary to a multiple of M, so that devices can shard it (default: 64; 1: no padding)",
    )
    return parser.parse_args(argv)


def megatron_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the arguments of `python -m converters.megatron`; an export's `config` becomes the run's configuration.

    Exits with code 2 on mistakes in the arguments or the configuration.
    """
    show_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m converters.megatron",
        description="Write Megatron-LM's token files PREFIX.bin and PREFIX.idx from a run's documents, or check them.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser(
        "export",
        help="write the tokenized documents of a run's sources",
        description="Write the tokenized documents of a run's sources in file order, held-out documents included. Also"
        " accepts any setting of the run: --KEY=VALUE.",
        allow_abbrev=False,
    )
    export.add_argument(
        "out", metavar="OUT_PREFIX", help="prefix of the files; several sources write OUT_PREFIX_0, OUT_PREFIX_1 and so on"
    )
    export.add_argument("--config", metavar="FILE", required=True, help="YAML file of the run")
    export.add_argument(
        "--without_bos",
        action="store_true",
        help="leave out the bos token of each document; Megatron-LM's own files have only an end token",
    )
    info = commands.add_parser("info", help="check a pair of files and summarize its contents", allow_abbrev=False)
    info.add_argument("prefix", metavar="PREFIX", help="prefix of the two files, or the path of either")
    info.add_argument(
        "--vocab_size", metavar="N", type=_positive, help="vocabulary size of the model; every id must be below it"
    )
    arguments, settings = parser.parse_known_args(argv)
    for setting in settings:
        if arguments.command == "info" or not re.match("--[^=]+=", setting):
            parser.error(f"unrecognized argument: {setting}")
    if arguments.command == "export":
        from llamajax.config.command import parse_args  # heavy, and only an export has settings
        from llamajax.config.run import Config

        told = [f"--config={arguments.config}", *settings]
        arguments.config = parse_args(told, prog=export.prog, root=Config, check=Config.file_problems).config
    return arguments
