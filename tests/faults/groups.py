"""The groups of faults: what each is to show, how often it is tried, and how long that takes."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults import corruption, kills
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
    """That a fault takes on two quiet cores."""


GROUPS = (
    Group("R1", "kills", "no committed step lost, no hand, every loss and array bit-equal", kills.run, 200, 4, 4),
    Group("R5", "damaged checkpoints", "all found, the bad file named, newest good step taken", corruption.run, 1000, 100, 0.2),
)
