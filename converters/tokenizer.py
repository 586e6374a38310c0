"""A larger vocabulary for a model: `python -m converters.tokenizer grow MODEL OUT --corpus FILE_OR_GLOB --num_pieces N`."""

from functools import partial

from converters.tokenizer_cli import parse_args


def main() -> None:
    """Reads the command line, grows the tokenizer, and ends the process."""
    arguments = parse_args()
    # Only now: --help and mistakes do not wait for what is heavy to import.
    from converters import grow
    from llamajax.parallel.exit import end_with

    end_with(partial(grow.main, arguments))


if __name__ == "__main__":
    main()
