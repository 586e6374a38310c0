"""Records when a run began, and the time of each phase before its first step."""

import time
from itertools import pairwise

import llamajax

PHASES = ("start", "compile", "load")
"""Phases before the first step, in order."""

_phases: list[tuple[str, float]] = []
_is_first = True


def begin(phase: str) -> None:
    """Starts `phase`, one of `PHASES`. `start` begins a run, and after its first step there are no further phases.

    The first run of a process began when this package was imported: the process itself may be an older shell.
    """
    global _is_first
    now = time.monotonic()
    if phase == "start":
        _phases.clear()
    elif not _phases:  # a rollback loads again
        return
    _phases.append((phase, llamajax.BEGAN if _is_first else now))
    _is_first = False


def begins_now() -> None:
    """Starts the next run with its first phase: the process has done other work since it imported this package."""
    global _is_first
    _is_first = False


def first_step() -> dict[str, float]:
    """Ends the last phase; returns `began` (seconds since 1970) and the seconds of every phase (`compile_s`), once per
    run."""
    if not _phases:
        return {}
    now = time.monotonic()
    facts = {"began": time.time() - (now - _phases[0][1])}
    for (phase, began), (_, ended) in pairwise([*_phases, ("", now)]):
        facts[f"{phase}_s"] = facts.get(f"{phase}_s", 0.0) + ended - began
    _phases.clear()
    return {name: round(value, 3) for name, value in facts.items()}
