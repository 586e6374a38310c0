"""Hugging Face models in and out: `python -m converters.hf [import] HF_DIR OUT`, `... export RUN_OR_CHECKPOINT OUT`."""

import argparse
import os
import re
import sys
from collections.abc import Sequence

from llamajax.weights.hf_files import LICENSE


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line, in which `import` may be left out; exits with code 2 if it is wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] not in ("import", "export", "-h", "--help"):
        argv = ["import", *argv]
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
    if not re.fullmatch(LICENSE, text):
        raise argparse.ArgumentTypeError(f"{text!r} is no identifier such as apache-2.0, mit or llama3.1")
    return text


def main() -> None:
    """Reads the command line, converts, and ends the process."""
    arguments = parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # devices are left to training
    # Only now: --help and mistakes do not wait for the seconds that importing jax takes.
    from converters import convert
    from llamajax.parallel.exit import end_with

    end_with(lambda: convert.main(arguments))


if __name__ == "__main__":
    main()
