"""A larger vocabulary for a model: `python -m converters.tokenizer grow MODEL OUT --corpus FILE_OR_GLOB --num_pieces N`."""

import argparse
from collections.abc import Sequence


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{number} must be positive")
    return number


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; exits with code 2 if it is wrong."""
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
        "--kind", choices=("text", "jsonl", "parquet"), default="text", help="of the corpus files (default: text)"
    )
    grow.add_argument(
        "--text_key", metavar="KEY", default="text", help="jsonl, parquet: the field or column with the text (default: text)"
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


def main() -> None:
    """Reads the command line, grows the tokenizer, and ends the process."""
    arguments = parse_args()
    # Only now: --help and mistakes do not wait for what is heavy to import.
    from converters import grow
    from llamajax.parallel.exit import end_with

    end_with(lambda: grow.main(arguments))


if __name__ == "__main__":
    main()
