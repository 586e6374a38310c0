"""The command lines of the converters; imports nothing heavy."""

import argparse
import re
import sys
from collections.abc import Sequence

from llamajax.errors import show_any_text


def hf_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the arguments of `python -m converters.hf`, where `import` may be left out; exits with code 2 on mistakes."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] not in ("import", "export", "-h", "--help"):
        argv = ["import", *argv]
    show_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m converters.hf",
        description="Convert Llama, Mistral, Qwen2 and Qwen3 models from and to Hugging Face.",
        epilog="`python -m converters.hf HF_DIR OUT` imports.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "import": ("HF_DIR", "a directory with config.json and safetensors", "for training: a checkpoint, its model.yaml"),
        "export": (
            "RUN_OR_CHECKPOINT",
            "a run's directory (its newest good step) or RUN/checkpoints/STEP",
            "for transformers",
        ),
    }
    dtypes = {"import": ("float32", "bfloat16"), "export": ("float32", "bfloat16", "float16")}
    for name, (source, source_help, out_help) in texts.items():
        command = commands.add_parser(name, help=f"write {out_help}")
        command.add_argument("source", metavar=source, help=source_help)
        command.add_argument("out", metavar="OUT", help=f"the directory to make: {out_help}")
        command.add_argument("--dtype", choices=dtypes[name], help="type of the weights (default: as they are)")
        command.add_argument(
            "--verify",
            action=argparse.BooleanOptionalAction,
            help="compare the logits of both sides (default: below 2 billion parameters), which takes the whole model in"
            " memory; an export also compares the ids of texts, unless --no-verify is given",
        )
        command.set_defaults(license=None)
        if name == "export":
            license_help = "identifier for the model card, such as apache-2.0 (default: that of the imported model)"
            command.add_argument("--license", type=_license, help=license_help)
    return parser.parse_args(argv)


def _license(text: str) -> str:
    from llamajax.weights.hf_files import LICENSE  # with data's libraries, for which --help need not wait

    if not re.fullmatch(LICENSE, text):
        raise argparse.ArgumentTypeError(f"{text!r} is no identifier such as apache-2.0, mit or llama3.1")
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{number} must be positive")
    return number


def tokenizer_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the arguments of `python -m converters.tokenizer`; exits with code 2 on mistakes."""
    show_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m converters.tokenizer", description="Change the tokenizer of a Hugging Face model."
    )
    grow = parser.add_subparsers(dest="command", required=True).add_parser(
        "grow",
        help="add pieces learnt from a corpus",
        description="Learn new pieces from a corpus and add them to tokenizer and model; old tokens keep ids and rows.",
    )
    grow.add_argument("model", metavar="MODEL", help="a Hugging Face directory with config.json, safetensors and tokenizer")
    grow.add_argument("out", metavar="OUT", help="the directory to make: the same model with the larger vocabulary")
    grow.add_argument("--corpus", metavar="FILE_OR_GLOB", nargs="+", required=True, help="what to learn from")
    grow.add_argument("--num_pieces", metavar="N", type=_positive, required=True, help="pieces to add")
    grow.add_argument(
        "--kind", choices=("text", "jsonl", "parquet", "arrow"), default="text", help="of the corpus files (default: text)"
    )
    grow.add_argument(
        "--text_key",
        metavar="KEY",
        default="text",
        help="jsonl, parquet, arrow: the field or column with the text (default: text)",
    )
    grow.add_argument(
        "--train_max_bytes",
        metavar="N",
        type=_positive,
        default=10_000_000,
        help="bytes of text, spread over the corpus, to learn from and to measure on (default: 10,000,000)",
    )
    grow.add_argument(
        "--pad_vocab_multiple",
        metavar="M",
        type=_positive,
        default=64,
        help="add rows of no token until M divides the vocabulary, so that devices can share it (default: 64; 1: none)",
    )
    return parser.parse_args(argv)


def megatron_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the arguments of `python -m converters.megatron`, with the run's configuration as `config` of an export.

    Exits with code 2 if they, or the configuration, are wrong.
    """
    show_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m converters.megatron",
        description="Token files of Megatron-LM, PREFIX.bin and PREFIX.idx: written from a run's documents, and looked at.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser(
        "export",
        help="write the tokenized documents of a run's sources",
        description="Write the tokenized documents of a run's sources, in their order, also those that the run holds out."
        " Any setting of the run can be given as well: --KEY=VALUE.",
        allow_abbrev=False,
    )
    export.add_argument(
        "out", metavar="OUT_PREFIX", help="the files to make; of several sources OUT_PREFIX_0, OUT_PREFIX_1 and so on"
    )
    export.add_argument("--config", metavar="FILE", required=True, help="the YAML file of the run")
    export.add_argument(
        "--without_bos",
        action="store_true",
        help="leave out the token that begins a document: Megatron-LM's own files have one at the end only",
    )
    info = commands.add_parser("info", help="check a pair of files, and say what is in it", allow_abbrev=False)
    info.add_argument("prefix", metavar="PREFIX", help="of the two files, or either of them")
    info.add_argument("--vocab_size", metavar="N", type=_positive, help="the model's: every id must be below it")
    arguments, settings = parser.parse_known_args(argv)
    for setting in settings:
        if arguments.command == "info" or not re.match("--[^=]+=", setting):
            parser.error(f"unrecognized argument: {setting}")
    if arguments.command == "export":
        from llamajax.config.command import parse_args  # settings, which `info` has none of
        from llamajax.config.run import Config

        told = [f"--config={arguments.config}", *settings]
        arguments.config = parse_args(told, prog=export.prog, root=Config, check=Config.file_problems).config
    return arguments
