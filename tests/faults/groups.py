"""The groups of faults: what each is to show, how often it is tried, and how long that takes."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults import (
    bad_disk,
    bad_numbers,
    corruption,
    disagreement,
    exceptions,
    hangs,
    hostile,
    kills,
    mixed,
    preemption,
    races,
    soak,
    stragglers,
)
from tests.faults.results import Result
from tests.faults.scene import Scene


@dataclass(frozen=True)
class Group:
    """Faults of one kind."""

    name: str
    title: str
    target: str
    run: Callable[[int, int, Scene, int], Result]
    """Takes the number of faults, the first seed, what runs share, and how many tries may be made at once."""
    whole: int
    """Faults of the whole campaign."""
    short: int
    """Faults of the short one; 0: it leaves this group out."""
    seconds: float
    """Seconds that a fault takes on two quiet cores."""


GROUPS = (
    Group("R1", "kills", "nothing committed lost, bit-equal, no hand under the launcher", kills.run, 200, 8, 10),
    Group("R5", "damaged checkpoints", "found, the bad file named, newest good step taken", corruption.run, 1000, 20, 0.2),
    Group("R7", "preemptions", "exit 0 within 30 s, the step saved, resumed bit-equal", preemption.run, 50, 2, 15),
    Group("R8", "an exception on one rank", "its traceback alone, all down within 5 s", exceptions.run, 28, 1, 6),
    Group("R9", "hangs", "found within limit + 2 s, stacks of all, restarted, bit-equal", hangs.run_hangs, 40, 0, 15),
    Group("R10", "bad batches", "skipped or passed over, none saved, bit-equal", bad_numbers.run_bad_batches, 25, 0, 12),
    Group("R11", "flipped bits", "found at the next check, a bad device told, undone", bad_numbers.run_flips, 100, 0, 2),
    Group("R12", "a slow process", "named within 50 steps, no other", stragglers.run, 10, 0, 45),
    Group("R13", "shared directories", "refused by one line, the first run unharmed", races.run_races, 30, 0, 9),
    Group("R14", "odd places, SIGHUP", "works bit-equal, or one line", races.run_places, 24, 0, 9),
    Group("R15", "a soak", "memory grows < 1 MB per 1,000 steps, files and threads do not", soak.run, 20_000, 0, 0.015),
    Group("R16", "a fault a minute", "97% recovered without a hand, end state equal", mixed.run, 30, 0, 62),
    Group("R18", "native hangs", "as R9, though no thread of Python runs", hangs.run_native, 16, 1, 15),
    Group("R19", "bad disks", "told, no good step lost, ends bit-equal without a hand", bad_disk.run, 24, 0, 40),
    Group("R21", "an odd process", "refused before step 0 within 10 s, the odd one named", disagreement.run, 20, 0, 7),
    Group("S", "hostile inputs", "read or refused: no traceback, signal, hang; memory capped", hostile.run, 10_000, 0, 0.02),
)
