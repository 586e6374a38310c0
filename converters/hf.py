"""Convert Hugging Face models: `python -m converters.hf [import] HF_DIR OUT`, `... export RUN_OR_CHECKPOINT OUT`."""

import os

from converters.arguments import hf_arguments
from llamajax.errors import importing


def main() -> None:
    """Parses the command line, converts and exits."""
    arguments = hf_arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"  # leave the accelerators to training
    # Imported late: --help and mistakes do not wait the seconds that importing jax takes.
    with importing():
        from converters import convert
        from llamajax.processes.exit import end_with

    end_with(lambda: convert.main(arguments))


if __name__ == "__main__":
    main()
