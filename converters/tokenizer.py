"""A larger vocabulary for a model: `python -m converters.tokenizer grow MODEL OUT --corpus FILE_OR_GLOB --num_pieces N`."""

from converters.arguments import tokenizer_arguments
from llamajax.errors import importing


def main() -> None:
    """Reads the command line, grows the tokenizer, and ends the process."""
    arguments = tokenizer_arguments()
    # Only now: --help and mistakes do not wait for what is heavy to import.
    with importing():
        from converters import grow
        from llamajax.processes.exit import end_with

    end_with(lambda: grow.main(arguments))


if __name__ == "__main__":
    main()
