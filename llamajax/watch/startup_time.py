"""When a run began, and what its time went into before the first step of its run."""

import time
from itertools import pairwise

import llamajax

PHASES = ("start", "compile", "load")
"""In their order."""

_phases: list[tuple[str, float]] = []
_is_first = True


def begin(phase: str) -> None:
    """From now on a run is in `phase`, one of `PHASES`; `start` begins it, and after its first step there are no others.

    The first run of a process began when this package was imported: the process itself may be a shell's, and older.
    """
    global _is_first
    now = time.monotonic()
    if phase == "start":
        _phases.clear()
    elif not _phases:  # it loads again, to go back
        return
    _phases.append((phase, llamajax.BEGAN if _is_first else now))
    _is_first = False


def begins_now() -> None:
    """The next run begins when its first phase does: the process has done other things since it imported this package."""
    global _is_first
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
