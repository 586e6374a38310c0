"""Grow a model's vocabulary: `python -m converters.tokenizer grow MODEL OUT --corpus FILE_OR_GLOB --num_pieces N`."""

from converters.arguments import tokenizer_arguments
from llamajax.errors import importing


def main() -> None:
    """Parses the command line, grows the tokenizer and exits."""
    arguments = tokenizer_arguments()
    # Imported late: --help and mistakes do not wait for heavy imports.
    with importing():
        from converters import grow
        from llamajax.processes.exit import end_with

    end_with(lambda: grow.main(arguments))


if __name__ == "__main__":
    main()
