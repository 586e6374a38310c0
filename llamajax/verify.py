"""Certify a run's mesh and forms on this machine: `python -m llamajax.verify --config configs/x.yaml`."""

import os
import sys

from llamajax.config.command import parse_args
from llamajax.config.run import Config
from llamajax.errors import importing

OPTIONS = {
    "--devices N": "Emulate at most this many devices, 2 to 64; default: 8, or as many as the features of the mesh need.",
    "--json FILE": "Write all figures as JSON; llamajax/verification/figures.py describes them.",
    "--page FILE.html": "Write a page that shows the difference of every tensor.",
}


def main() -> int:
    """Reads the command line and verifies; returns the exit code."""
    # Without `Config.file_problems`: the data are not read, and need not exist on the machine that verifies.
    arguments = parse_args(prog="python -m llamajax.verify", root=Config, options=OPTIONS)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides XLA's warnings, which do not help here
    # Imported here: --help and mistakes in the configuration do not wait for jax, which takes seconds to import.
    with importing():
        from llamajax.verification.run import main as verify

    return verify(arguments.config, arguments.options)


if __name__ == "__main__":
    sys.exit(main())
