"""A page about a run: `python -m llamajax.report RUN [--output FILE]`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llamajax.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m llamajax.report", description="Write one HTML page about a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run_dir of a run, finished or not")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the page; default: RUN/report.html")
    options = parser.parse_args(arguments)
    from llamajax.watch.page import write_report  # with numpy, for which --help need not wait

    try:
        print(write_report(options.run.expanduser(), options.output))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
