"""Write and check Megatron-LM's token files: `python -m converters.megatron export OUT_PREFIX --config RUN.yaml`."""

import os

from converters.arguments import megatron_arguments
from llamajax.errors import importing


def main() -> None:
    """Parses the command line, runs the command and exits."""
    arguments = megatron_arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"  # leave the accelerators to training
    # Imported late: --help and mistakes do not wait the seconds that importing jax takes.
    with importing():
        from converters import megatron_export
        from llamajax.processes.exit import end_with

    end_with(lambda: megatron_export.main(arguments))


if __name__ == "__main__":
    main()
