"""Check this machine, with a remedy for each problem: `python -m llamajax.doctor --config configs/x.yaml`."""

import argparse
import sys
from collections.abc import Sequence

from llamajax.errors import importing, show_any_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line and checks the machine; returns the exit code."""
    show_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m llamajax.doctor",
        description="Check the driver, GPUs, packages, network, disks and memory of this machine.",
        epilog="With --config, any setting of the run may follow: --KEY VALUE. Exits with 4 if a check fails.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="also check what this run needs: a file, or a shipped name")
    parser.add_argument("--json", action="store_true", help="print all findings as JSON")
    options, settings = parser.parse_known_args(arguments)
    if settings and options.config is None:
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    config = None
    if options.config is not None:
        from llamajax.config.command import parse_args  # takes a while, and only a run has settings
        from llamajax.config.run import Config

        config = parse_args([f"--config={options.config}", *settings], prog=parser.prog, root=Config).config
    with importing():
        from llamajax.diagnostics import run

    try:
        return run.main(config, as_json=options.json)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
