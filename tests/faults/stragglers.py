"""R12: one process becomes slower than the others; it is named, and no other."""

import json
import re
import statistics

from tests.faults import results
from tests.faults.broken_run import ENDS_S, STARTS_S, BrokenRun, broken
from tests.faults.results import Figures, Result, Try
from tests.faults.scene import Scene

SLOWER = 0.2
"""Share of a step that the slow process takes more."""
STEPS = 50
"""Within which it must be named; none may be in as many that follow, or before."""
KINDS = {
    "batches that come late": ("loader", "slow down", 0.1, 1 + SLOWER, 4),
    "a slow host": ("reported", "slow down", 0.1, 1 + SLOWER, 0),
    "a slow device": ("device", "slow down the device", 0.3, SLOWER, 0),
}
"""Where it loses time, and how; seconds that a step takes at least: enough to time the devices in some; what it takes there
every time, and at first, as shares of what a step took: what is less than a step is done while the devices compute the one
before, and batches loaded ahead have to be used up first."""


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """Slows down one of four processes, `count` times."""
    # A save would hide how late a batch is: it is loaded meanwhile.
    settings = {"train.num_steps": 400, "checkpoint.save_every": 400, "train.eval_every": 400}

    def one(a_try: Try) -> Figures:
        point, do, step_s, share, at_first = KINDS[a_try.kind]
        with broken(where, 4, settings, step_s=step_s) as slowed:
            rank, steps = a_try.rng.randrange(4), a_try.rng.randint(60, 100)
            slowed.wait(lambda: slowed.step > steps, STARTS_S + ENDS_S, f"step {steps}")
            assert not named(slowed.output), f"process {named(slowed.output)} is named before one is slow"
            took_s = step_time_s(slowed)
            slowed.lay(point, rank, do, by_s=share * took_s, first_s=at_first * took_s, by=share)
            slowed.wait_for_fault(point, rank)
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


def step_time_s(slowed: BrokenRun) -> float:
    """Seconds of the newest steps."""
    records = [json.loads(line) for line in (slowed.run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["perf/step_time_s"] for record in records[-30:] if "perf/step_time_s" in record)
