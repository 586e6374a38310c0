"""Version of this checkout, for the record of a measurement."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """Returns the commit of this checkout, marked `-dirty` if files have changed since; `unknown` without one."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
