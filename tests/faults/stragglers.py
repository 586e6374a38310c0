"""R12: one process becomes slower than the others; it is named, and no other."""

import re

from tests.faults import results
from tests.faults.broken_run import ENDS_S, STARTS_S, broken
from tests.faults.results import Figures, Result, Try
from tests.faults.scene import Scene

STEP_S = 0.1
SLOWER = 0.2
"""Share of a step that the slow process takes more."""
STEPS = 50
"""Within which it must be named."""
KINDS = {"batches that come late": ("loader", 1 + SLOWER, 4), "a slow host": ("reported", 1 + SLOWER, 0)}
"""Where it loses time; what it takes there every time, and at first, as shares of a step: what is less than a step is done
while the devices compute the one before, and batches that were loaded ahead have to be used up before one comes late."""


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """Slows down one of four processes, `count` times."""

    def one(a_try: Try) -> Figures:
        point, share, at_first = KINDS[a_try.kind]
        with broken(where, 4, {"train.num_steps": 400}, step_s=STEP_S) as slowed:
            rank, steps = a_try.rng.randrange(4), a_try.rng.randint(20, 60)
            slowed.wait(lambda: slowed.step > steps, STARTS_S + ENDS_S, f"step {steps}")
            slowed.lay(point, rank, "slow down", by_s=share * STEP_S, first_s=at_first * STEP_S)
            slowed.wait_for_fault(point, rank)
            since = slowed.step
            slowed.wait(lambda: bool(named(slowed.output)), STARTS_S + ENDS_S, f"naming process {rank}")
            took = slowed.step - since
            slowed.wait(lambda: slowed.step >= since + took + STEPS, STARTS_S + ENDS_S, "as many steps more", or_ended=True)
            assert named(slowed.output) == {rank}, f"processes {named(slowed.output)} are named, not {rank}"
            assert took <= STEPS, f"named after {took} steps"
        return {"steps until it is named": took}

    return results.attempt("R12", list(KINDS), count, seed, one, jobs=jobs)


def named(output: str) -> set[int]:
    """Processes that a line calls slow."""
    return {int(rank) for rank in re.findall(r"^(?:\[\d+\] )?slow +process (\d+) ", output, flags=re.MULTILINE)}
