"""Seeds faults into parallel code and kernels, one at a time, and tells which test notices: the table of docs/faults.md.

    python scripts/faults.py [NAME ...]

Each fault is a change of one place in a copy of the project, whose tests then run until one fails: those of the fault's own
room first, then the comparison of every form with one device. All of these must pass without a fault before one is tried.
A quarter of an hour on two cores. With names, only these are tried and nothing is written.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from llamajax.watch.console import CONSOLE

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "faults.md"
FORMS = "tests/training/test_mesh_equivalence.py"
HEAD = """# Faults that tests notice

Each row is a fault in the code by which devices share work or in a kernel, seeded on its own into a copy of the project by
`python scripts/faults.py`, and the first test that then fails. `scripts/faults.yaml` holds the changes.

Noticed: {noticed} of {tried}.

| fault | file of `llamajax/` | noticed by |
| --- | --- | --- |
"""


@dataclass(frozen=True)
class Fault:
    """One change that a tired programmer could make."""

    name: str
    file: str
    """From `llamajax`."""
    old: str
    """Stands there once."""
    new: str
    tests: str
    """The fault's own room."""


FAULTS = [Fault(**fault) for fault in yaml.safe_load((ROOT / "scripts" / "faults.yaml").read_text())]


def tried(fault: Fault, folder: Path) -> str | None:
    """The test that fails with the fault, in a copy of the project in `folder`; None if all pass."""
    path = folder / "llamajax" / fault.file
    right = path.read_text()
    assert right.count(fault.old) == 1, f"{fault.name}: {fault.file} has it {right.count(fault.old)} times"
    path.write_text(right.replace(fault.old, fault.new))
    try:
        return failing(f"tests/{fault.tests}.py", folder) or failing(FORMS, folder)
    finally:
        path.write_text(right)


def failing(tests: str, folder: Path) -> str | None:
    """The first of the tests that fails in a copy of the project."""
    quick = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile", "first-failure"]
    command = [sys.executable, "-m", "pytest", *quick, tests]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if failed := re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE):
        return failed[1].removeprefix("tests/")
    assert done.returncode == 0, done.stdout + done.stderr
    return None


def main(names: list[str]) -> None:
    """Tries the faults and writes what came of them."""
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    rows = []
    with tempfile.TemporaryDirectory(prefix="llamajax-faults-") as name:
        folder = Path(name)
        for part in ("llamajax", "tests", "configs", "pyproject.toml", "README.md"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        for tests in sorted({f"tests/{fault.tests}.py" for fault in chosen} | {FORMS}):
            if failed := failing(tests, folder):
                raise SystemExit(f"{failed} fails without any fault; mend that first")
        for number, fault in enumerate(chosen, 1):
            killer = tried(fault, folder)
            rows.append(f"| {fault.name} | `{fault.file}` | {f'`{killer}`' if killer else '**none**'} |")
            CONSOLE.print(
                f"{number} of {len(chosen)}  {fault.name}: {killer or 'no test notices'}", soft_wrap=True, markup=False
            )
    if not names:
        noticed = sum("**none**" not in row for row in rows)
        DOCUMENT.write_text(HEAD.format(noticed=noticed, tried=len(rows)) + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
