"""R8: one process fails; what failed is told first, and all processes end within seconds, none of them started again."""

import itertools
import re
import time

from llamajax.errors import INTERNAL_ERROR
from tests.faults import results
from tests.faults.broken_run import ENDS_S, STARTS_S, broken
from tests.faults.results import Figures, Result, Try
from tests.faults.scene import Scene

LIMIT_S = 5.0
POINTS = {
    "the loader": "loader", "a step": "step", "a callback": "callback", "the thread that saves": "hash",
    "an evaluation": "evaluate", "reading the data": "prepare", "restoring": "load",
    "a step while a save hangs": "step",
}  # fmt: skip
"""Failing parts, and their points."""
KINDS = [f"{what}, {count} processes" for count, what in itertools.product((2, 4), POINTS)]


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """Raises an exception on one of several processes, `count` times."""

    def one(a_try: Try) -> Figures:
        what, _, processes = a_try.kind.partition(", ")
        with broken(where, int(processes[0])) as failed:
            rank, point = a_try.rng.randrange(failed.num_processes), POINTS[what]
            if what.endswith("a save hangs"):
                failed.lay("hash", a_try.rng.randrange(failed.num_processes), "hold")
                failed.wait(lambda: bool(list((failed.folder / "fired").glob("hash.*"))), STARTS_S + ENDS_S, "a save")
            failed.lay(point, rank, "raise")
            raised_at = failed.wait_for_fault(point, rank, STARTS_S + ENDS_S)["at"]
            codes = failed.finish()
            took = time.monotonic() - raised_at
            assert codes == [INTERNAL_ERROR], f"ended with {codes}: {failed.last_line}"
            assert took < LIMIT_S * where.slowness, f"took {took:.1f} s"
            failed.must_leave_none()
            must_be_told_first(failed.output, rank)
            assert len((failed.folder / f"pids.{rank}").read_text().split()) == 1, "it was started again"
        return {"s to the end of all": took}

    return results.attempt("R8", KINDS, count, seed, one, jobs=jobs)


def must_be_told_first(output: str, rank: int) -> None:
    """Fails unless the first and only traceback is that of this process."""
    found = re.findall(r"^(?:\[(\d+)\] )?Traceback", output, flags=re.MULTILINE)
    # An exception with a cause, or one that was raised while another was handled, has several parts.
    assert found, f"no traceback: {output[-1500:]}"
    assert {int(of or 0) for of in found} == {rank}, f"tracebacks of processes {found}, not of {rank} alone"
    assert "RuntimeError: laid by the campaign" in output
