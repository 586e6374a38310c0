"""Determines why the processes of a host ended: the one that failed first, and the others because of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamajax.errors import TRY_AGAIN
from llamajax.launching.child import Child


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The reason why the processes ended."""

    rank: int
    exit_code: int
    """Exit code of the launch, unless a restart helps."""
    lines: tuple[str, ...]
    """Lines for people: the first cause, and why each of the others ended."""
    is_left: bool = False
    """Whether a process that could not be killed still exists: a new one would find its device taken."""


def find_cause(children: Sequence[Child], run_dir: Path | None) -> Cause | None:
    """Returns the first cause for the end of all `children`; None if all have done their part.

    A process that ended because of another has reported so in its heartbeat. Processes that wait for a stuck one exceed
    their limits together with it, so they are the cause only if no other process is.
    """
    failed = [child for child in sorted(children, key=lambda child: child.place or 0) if child.code or child.stuck]
    if not failed:
        return None
    own = [child for child in failed if child.stuck or (child.ended_by is None and not child.is_ended)]
    active = [child for child in own if not child.waited]
    if not own:  # a process on another host, or one that reported nothing
        rank, code, line = _elsewhere(failed)
    else:
        first = (active or own)[0]
        stacks = _stacks(run_dir, first)
        rank, code = first.rank, first.exit_code
        line = f"process {rank} (pid {first.process.pid}) {first.how()}{f'; stacks: {stacks}' if stacks else ''}"
    others = [f"process {child.rank} {_why(child, rank)}" for child in failed if child.rank != rank]
    return Cause(rank=rank, exit_code=code, lines=(line, *others), is_left=any(child.is_left for child in children))


def _elsewhere(failed: Sequence[Child]) -> tuple[int, int, str]:
    first = next((child for child in failed if child.ended_by is not None), failed[0])
    rank = first.rank if first.ended_by is None else first.ended_by
    of_here = next((child for child in failed if child.rank == rank), None)
    how = of_here.how() if of_here else f"on another host failed or was lost; see its log (exit code {first.exit_code})"
    return rank, first.exit_code, f"process {rank} {how}"


def _why(child: Child, cause: int) -> str:
    if child.is_ended and not child.stuck and not child.is_left:
        return f"was ended by the launcher, because of process {cause}"
    if child.ended_by is not None:
        return f"ended because of process {child.ended_by}"
    return f"waited for process {cause} until its own limit" if child.waited else f"also {child.how()}"


def _stacks(run_dir: Path | None, child: Child) -> Path | None:
    """Returns the file in which a stuck process has written the stacks of its threads since this start."""
    if run_dir is None or child.exit_code != TRY_AGAIN:
        return None
    began = time.time() - (time.monotonic() - child.started)
    try:
        found = {path: path.stat() for path in (run_dir / "stacks").glob(f"*.{child.rank}.txt")}
    except OSError:
        return None
    written = [path for path, file in found.items() if file.st_size and file.st_mtime >= began]
    return max(written, key=lambda path: found[path].st_mtime, default=None)
