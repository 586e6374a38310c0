"""R12: one process becomes slower than the others; it is named, and no other."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator

from tests.faults import results
from tests.faults.broken_run import ENDS_S, STARTS_S, BrokenRun, broken
from tests.faults.results import Figures, Result, Try
from tests.faults.scene import Scene

SLOWER = 0.2
"""Share of a step that the slow process takes more."""
STEPS = 50
"""Within which it must be named; none may be in as many that follow, or before."""
KINDS = {
    "batches that come late": ("loader", 0.1, 1 + SLOWER, 4),
    "a slow host": ("reported", 0.1, 1 + SLOWER, 0),
    "a core that another program has first": ("", 0.3, 0, 0),
}
"""Where it loses time; seconds that a step takes at least; what it takes there every time, and at first, as shares of what a
step took: what is less than a step is done while the devices compute the one before, and batches that were loaded ahead have
to be used up first."""


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """Slows down one of four processes, or one of two, `count` times."""

    def one(a_try: Try) -> Figures:
        point, step_s, share, at_first = KINDS[a_try.kind]
        size = 4 if point else 2
        with broken(where, size, {"train.num_steps": 400}, step_s=step_s) as slowed, contextlib.ExitStack() as stack:
            rank, steps = a_try.rng.randrange(size), a_try.rng.randint(60, 100)
            slowed.wait(lambda: slowed.step > 5, STARTS_S + ENDS_S, "step 5")
            if not point:
                give_each_a_core(slowed)
            slowed.wait(lambda: slowed.step > steps, STARTS_S + ENDS_S, f"step {steps}")
            assert not named(slowed.output), f"process {named(slowed.output)} is named before one is slow"
            if point:
                took_s = step_time_s(slowed)
                slowed.lay(point, rank, "slow down", by_s=share * took_s, first_s=at_first * took_s)
                slowed.wait_for_fault(point, rank)
            else:
                stack.enter_context(computing_before(slowed, rank))
            since = slowed.step
            slowed.wait(lambda: bool(named(slowed.output)), STARTS_S + ENDS_S, f"naming process {rank}")
            took = slowed.step - since
            slowed.wait(lambda: slowed.step >= since + took + STEPS, STARTS_S + ENDS_S, "as many steps", or_ended=True)
            assert named(slowed.output) == {rank}, f"processes {named(slowed.output)} are named, not {rank}"
            assert took <= STEPS, f"named after {took} steps"
        return {"steps until it is named": took}

    return results.attempt("R12", list(KINDS), count, seed, one, jobs=jobs)


def named(output: str) -> set[int]:
    """Processes that a line calls slow."""
    lines = re.findall(r"^(?:\[\d+\] )?slow +process (\d+) \(\S+\) (?!is as fast)", output, flags=re.MULTILINE)
    return {int(rank) for rank in lines}


def give_each_a_core(slowed: BrokenRun) -> None:
    """So that what slows down one does not slow down the others."""
    for core, pid in zip(itertools.cycle(sorted(os.sched_getaffinity(0))), slowed.pids(), strict=False):
        for thread in pathlib.Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {core})


def step_time_s(slowed: BrokenRun) -> float:
    """What the newest steps took."""
    records = [json.loads(line) for line in (slowed.run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["perf/step_time_s"] for record in records[-30:] if "perf/step_time_s" in record)


@contextlib.contextmanager
def computing_before(slowed: BrokenRun, rank: int) -> Iterator[None]:
    """Meanwhile, another program computes on the core of one process without end, and has ten times its share of it."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in pathlib.Path(f"/proc/{slowed.pids()[rank]}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 10)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        os.sched_setaffinity(busy.pid, {cores[rank % len(cores)]})
        try:
            yield
        finally:
            busy.kill()
