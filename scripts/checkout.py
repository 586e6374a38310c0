"""Which version of this checkout something was measured with."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """Returns the commit of this checkout, marked `-dirty` where files have changed since; `unknown` where there is none."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
