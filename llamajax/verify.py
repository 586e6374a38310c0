"""Certify a run's mesh and forms on this machine: `python -m llamajax.verify --config configs/x.yaml`."""

import os
import sys

from llamajax.config.command import parse_args
from llamajax.config.run import Config
from llamajax.errors import importing

OPTIONS = {
    "--devices N": "Emulate at most this many devices, 2 to 64; by default 8, or as many as keep what matters of the mesh.",
    "--json FILE": "Write all figures; the docstring of llamajax/verification/figures.py describes them.",
    "--page FILE.html": "Write a page with every tensor's difference.",
}


def main() -> int:
    """Reads the command line and verifies; returns the exit code."""
    # Without `Config.file_problems`: the data are not read, and need not be on the machine that verifies.
    arguments = parse_args(prog="python -m llamajax.verify", root=Config, options=OPTIONS)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's warnings, which are of no use here
    # Only now: --help and mistakes in the configuration do not wait for the seconds that importing jax takes.
    with importing():
        from llamajax.verification.run import main as verify

    return verify(arguments.config, arguments.options)


if __name__ == "__main__":
    sys.exit(main())
