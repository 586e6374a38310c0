"""Token files of Megatron-LM: `python -m converters.megatron export OUT_PREFIX --config RUN.yaml` and `... info PREFIX`."""

import os

from converters.arguments import megatron_arguments
from llamajax.errors import importing


def main() -> None:
    """Reads the command line, does what it says, and ends the process."""
    arguments = megatron_arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"  # devices are left to training
    # Only now: --help and mistakes do not wait for the seconds that importing jax takes.
    with importing():
        from converters import megatron_export
        from llamajax.processes.exit import end_with

    end_with(lambda: megatron_export.main(arguments))


if __name__ == "__main__":
    main()
