"""Tokenize and pack a run's data before training: `python -m llamajax.preprocess --config configs/x.yaml`."""

import os
import sys

from llamajax.config.command import parse_run
from llamajax.errors import importing

OPTIONS = {
    "--part I/N": "Do every N-th piece of the work, starting with piece I (from 0); other processes do the rest,"
    " such as the tasks of a Slurm array. The process that finishes last packs.",
    "--workers N": "Number of processes; default: one for each processor that this process may use.",
    "--executor NAME": "local: processes of this machine; ray: processes of the Ray cluster that RAY_ADDRESS names, or of a"
    " cluster started here (extra `ray`). Default: local.",
}


def main() -> int:
    """Reads the command line and preprocesses; returns the exit code."""
    arguments = parse_run(prog="python -m llamajax.preprocess", options=OPTIONS)
    os.environ["JAX_PLATFORMS"] = "cpu"  # devices are left to training
    # Imported here: --help and mistakes in the configuration do not wait for jax, which takes seconds to import.
    with importing():
        from llamajax.preprocessing.run import main as preprocess

    return preprocess(arguments.config, arguments.options)


if __name__ == "__main__":
    sys.exit(main())
