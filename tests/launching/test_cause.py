"""Tests of llamajax.launching.cause: whom the launcher names when all have ended."""

import os
import subprocess
import time
import types
import typing

import pytest

from llamajax.launching.cause import find_cause
from llamajax.launching.child import Child
from llamajax.processes.heartbeat import WAITING, Beat


def child(rank: int, place: int, code: int, *, by: int | None = None, doing: str = "", **more: typing.Any) -> Child:
    """A process that ended `place`th."""
    process = typing.cast("subprocess.Popen[bytes]", types.SimpleNamespace(pid=100 + rank))
    last = Beat(pid=100 + rank, phase="step", doing=doing, ended_by=by)
    return Child(
        rank=rank, process=process, heartbeats=more.pop("heartbeats", None), place=place, code=code, last=last, **more
    )


@pytest.mark.parametrize(
    ("children", "rank", "exit_code", "lines"),
    [
        (
            [child(0, 1, 70, by=1), child(1, 0, 70), child(2, 2, -9, is_ended=True)], 1, 70,
            [
                "process 1 (pid 101) ended with exit code 70, a defect in llamajax", "process 0 ended because of process 1",
                "process 2 was ended by the launcher, because of process 1",
            ],
        ),
        (  # those that come to the same error by themselves
            [child(0, 1, 3), child(1, 0, 3)], 1, 3,
            ["process 1 (pid 101) ended with exit code 3, data", "process 0 also ended with exit code 3, data"],
        ),
        (  # the end of one may be seen later than what follows from it
            [child(0, 0, 75, by=1), child(1, 1, -11)], 1, 75,
            ["process 1 (pid 101) was ended by SIGSEGV", "process 0 ended because of process 1"],
        ),
        (  # who waited for the stuck one has its own limit
            [child(0, 0, 75, doing=WAITING), child(1, 1, -6, doing="loading", stuck="loading")], 1, 75,
            ["process 1 (pid 101) was stuck: loading", "process 0 waited for process 1 until its own limit"],
        ),
        (  # nobody but those that wait: the devices themselves are stuck
            [child(0, 1, 75, doing=WAITING), child(1, 0, 75, doing=WAITING)], 1, 75,
            [
                f"process 1 (pid 101) was stuck, and ended itself: {WAITING}, in phase step after step 0",
                "process 0 waited for process 1 until its own limit",
            ],
        ),
        (
            [child(0, 0, 75, by=5), child(1, 1, 75, by=5)], 5, 75,
            [
                "process 5 on another host failed or was lost; see its log (exit code 75)",
                "process 0 ended because of process 5", "process 1 ended because of process 5",
            ],
        ),
        ([child(0, 1, 0), child(1, 0, 2)], 1, 2, ["process 1 (pid 101) ended with exit code 2, configuration"]),
    ],
)  # fmt: skip
def test_the_first_cause_comes_first_and_the_others_with_their_reason(children, rank, exit_code, lines):
    cause = find_cause(children, None)
    assert cause is not None
    assert (cause.rank, cause.exit_code, list(cause.lines)) == (rank, exit_code, lines)


def test_the_stacks_are_those_of_the_life_that_ended(tmp_path):
    (tmp_path / "stacks").mkdir()
    old, other, new = (tmp_path / "stacks" / f"{name}.txt" for name in ("1.1", "2.0", "2.1"))
    for path in (old, other, new):
        path.write_text("Thread ...")
    os.utime(old, (0, 0))
    cause = find_cause([child(1, 0, 75, doing="loading", started=time.monotonic() - 10)], tmp_path)
    assert cause is not None
    expected = f"process 1 (pid 101) was stuck, and ended itself: loading, in phase step after step 0; stacks: {new}"
    assert cause.lines == (expected,)


def test_nothing_is_the_cause_of_a_good_end():
    assert find_cause([child(0, 1, 0), child(1, 0, 0)], None) is None
