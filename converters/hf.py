"""Hugging Face models in and out: `python -m converters.hf [import] HF_DIR OUT`, `... export RUN_OR_CHECKPOINT OUT`."""

import os
from functools import partial

from converters.hf_cli import parse_args


def main() -> None:
    """Reads the command line, converts, and ends the process."""
    arguments = parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # devices are left to training
    # Only now: --help and mistakes do not wait for the seconds that importing jax takes.
    from converters import convert
    from llamajax.parallel.exit import end_with

    end_with(partial(convert.main, arguments))


if __name__ == "__main__":
    main()
