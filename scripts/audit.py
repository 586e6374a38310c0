"""Checks the versions in requirements.lock and requirements.cuda13.lock for known vulnerabilities, with pip-audit.

    python scripts/audit.py [--required]

Installs pip-audit into its own environment and queries PyPI's database. Exits with 1 if a version has a known vulnerability.
If the database does not answer, the command reports that nothing was audited and exits with 0, or with 1 under `--required`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements.lock", "requirements.cuda13.lock")
TOOL = "pip-audit==2.10.1"
LIMIT_S = 120
"""Time limit of an installation or an audit, in seconds."""


def ask_database() -> None:
    """Raises OSError if PyPI's database does not answer. This fails sooner than a query for all packages."""
    urllib.request.urlopen("https://pypi.org/pypi/pip/25.0/json", timeout=10).close()


def audit(lock: Path, tool: Path) -> list[dict[str, Any]]:
    """Returns pip-audit's findings for each package of a lock; raises OSError if it could not query the database."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--no-deps", "--disable-pip", "--progress-spinner=off", "--format=json", f"--output={report}"]
        process = subprocess.run(
            [tool, *options, "--requirement", lock], check=False, capture_output=True, text=True, timeout=LIMIT_S
        )
        if not report.exists():
            raise OSError(process.stderr.strip().rpartition("\n")[2])
        return json.loads(report.read_text())["dependencies"]


def verdict(lock: str, packages: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Returns a line for each vulnerability, and the number of audited packages."""
    audited = [package for package in packages if "skip_reason" not in package]
    found = [
        f"{lock}: {package['name']} {package['version']}: {bug['id']};"
        f" fixed in {', '.join(bug['fix_versions']) or 'no version'}"
        for package in audited
        for bug in package["vulns"]
    ]
    return found, len(audited)


def main() -> int:
    """Audits both locks. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Look for known vulnerabilities in the locked versions.")
    parser.add_argument("--required", action="store_true", help="fail if not all packages could be audited")
    required = parser.parse_args().required
    problems, num_packages, num_audited = [], 0, 0
    try:
        ask_database()
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            install = [f"{folder}/bin/pip", "install", "--quiet", "--retries=1", "--timeout=15", TOOL]
            subprocess.run(install, check=True, capture_output=True, timeout=LIMIT_S)
            for lock in LOCKS:
                packages = audit(ROOT / lock, Path(folder, "bin", "pip-audit"))
                found, num = verdict(lock, packages)
                problems += found
                num_packages, num_audited = num_packages + len(packages), num_audited + num
    except (OSError, subprocess.SubprocessError) as error:
        print(f"audit: {error}", file=sys.stderr)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    if num_audited and num_audited == num_packages:
        print(f"audit: no known vulnerability in {num_audited} packages")
        return 0
    told = f"{num_audited} of {num_packages} packages were audited" if num_audited else "NOTHING WAS AUDITED"
    print(f"audit: {told}: the database does not answer, or does not have them; try again with a network", file=sys.stderr)
    return 1 if required else 0


if __name__ == "__main__":
    sys.exit(main())
