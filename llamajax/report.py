"""Write a page about a run, or print its figures: `python -m llamajax.report RUN`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from llamajax.disk import keep_from_others
from llamajax.errors import UserError, importing, show_any_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page or prints the figures; returns the exit code."""
    show_any_text()
    parser = argparse.ArgumentParser(prog="python -m llamajax.report", description="Write one HTML page about a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run_dir of a run, finished or not")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the page; default: RUN/report.html")
    parser.add_argument("--json", action="store_true", help="print the run's figures as JSON, and write no page")
    options = parser.parse_args(arguments)
    with importing():
        from llamajax.watch import run_log, run_page  # these import numpy, which --help need not wait for

    keep_from_others()
    try:
        run_dir = Path(os.path.expanduser(options.run))
        summary = run_log.summarize(log := run_log.read_run(run_dir))
        if options.json:
            print(run_log.encode(summary.figures()))
        else:
            print(run_page.write_report(run_dir, options.output, log))
            print(f"goodput {summary.goodput or 'is unknown: the run has no record of a start'}")
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
