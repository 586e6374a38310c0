"""Tokenize and pack a run's data ahead of it: `python -m llamajax.preprocess --config configs/x.yaml`."""

import os
import sys

from llamajax.config.command import parse_run
from llamajax.errors import importing

OPTIONS = {
    "--part I/N": "Do every N-th piece of the work only, from the I-th on (from 0), beside others that do the rest,"
    " such as the tasks of a Slurm array; the process that finishes last packs.",
    "--workers N": "Processes; by default one for each processor that this one may use.",
    "--executor NAME": "local: processes of this machine; ray: those of the Ray cluster that RAY_ADDRESS names, or of one"
    " that is started here (extra `ray`). By default local.",
}


def main() -> int:
    """Reads the command line and preprocesses; returns the exit code."""
    arguments = parse_run(prog="python -m llamajax.preprocess", options=OPTIONS)
    os.environ["JAX_PLATFORMS"] = "cpu"  # devices are left to training
    # Only now: --help and mistakes in the configuration do not wait for the seconds that importing jax takes.
    with importing():
        from llamajax.preprocessing.run import main as preprocess

    return preprocess(arguments.config, arguments.options)


if __name__ == "__main__":
    sys.exit(main())
