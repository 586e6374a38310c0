"""The command line of `python -m converters.hf`; imports nothing heavy."""

import argparse
from collections.abc import Sequence


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; exits with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m converters.hf", description="Convert Llamas from and to Hugging Face.")
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "import": ("HF_DIR", "a directory with config.json and safetensors", "for training: a checkpoint, its model.yaml"),
        "export": (
            "RUN_OR_CHECKPOINT",
            "a run's directory (its newest good step) or RUN/checkpoints/STEP",
            "for transformers",
        ),
    }
    for name, (source, source_help, out_help) in texts.items():
        command = commands.add_parser(name, help=f"write {out_help}")
        command.add_argument("source", metavar=source, help=source_help)
        command.add_argument("out", metavar="OUT", help=f"the directory to make: {out_help}")
        command.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of the weights (default: as they are)")
        command.add_argument(
            "--verify",
            action=argparse.BooleanOptionalAction,
            help="compare the logits of both sides (default: below 2 billion parameters); takes the whole model in memory",
        )
    return parser.parse_args(argv)
