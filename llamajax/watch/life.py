"""When this process began, and what its time went into before the first step of its run."""

import os
import time
from itertools import pairwise
from pathlib import Path

PHASES = ("start", "compile", "load")
"""In their order."""

_phases: list[tuple[str, float]] = []
_is_first = True


def begin(phase: str) -> None:
    """From now on a run is in `phase`, one of `PHASES`; `start` begins it, and after its first step there are no others.

    The first run of a process began with the process.
    """
    global _is_first
    now = time.monotonic()
    if phase == "start":
        _phases.clear()
    elif not _phases:  # it loads again, to go back
        return
    _phases.append((phase, now - _age_s() if _is_first else now))
    _is_first = False


def first_step() -> dict[str, float]:
    """Ends the last phase: `began`, in seconds since 1970, and the seconds of every phase, `compile_s`; once for a run."""
    if not _phases:
        return {}
    now = time.monotonic()
    facts = {"began": time.time() - (now - _phases[0][1])}
    for (phase, began), (_, ended) in pairwise([*_phases, ("", now)]):
        facts[f"{phase}_s"] = facts.get(f"{phase}_s", 0.0) + ended - began
    _phases.clear()
    return {name: round(value, 3) for name, value in facts.items()}


def _age_s() -> float:
    """Seconds since this process was made, to a hundredth: Linux counts its start from that of the machine."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
