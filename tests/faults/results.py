"""Results of a group of faults: counted, timed, and printed so that each failure can be repeated."""

import random
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import Any

_TELL_EVERY_S = 10.0

Figures = Mapping[str, float]
"""Measurements of one try by name; the name ends in its unit."""


@dataclass(frozen=True)
class Failure:
    """A try that did not end as it should."""

    seed: int
    """Makes the same try again: `python -m tests.faults --only GROUP --count 1 --seed SEED`."""
    kind: str
    """Kind of fault."""
    what: str


@dataclass
class Result:
    """Result of one group."""

    name: str
    tries: int = 0
    """Faults that were made."""
    passed: int = 0
    figures: dict[str, str] = field(default_factory=dict)
    """Measurements over all tries, ready to be read."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Faults made, by kind."""
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    least_passed: float = 1.0
    """Share of the tries that must pass; failures of the others are told all the same."""

    @property
    def good(self) -> bool:
        """Whether the group has shown what it is to show; one that tried nothing has not."""
        return self.tries > 0 and self.passed >= self.least_passed * self.tries

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"good": self.good}


@dataclass(frozen=True)
class Try:
    """One try of a group."""

    seed: int
    kind: str
    rng: random.Random
    """Draws whatever the try leaves to chance."""


def attempt(
    name: str,
    kinds: Sequence[str],
    count: int,
    seed: int,
    one: Callable[[Try], Figures],
    *,
    weight: int = 1,
    jobs: int = 1,
) -> Result:
    """Tries `count` faults, `weight` of them with every call of `one`, taking the kinds in turn.

    Args:
        name: of the group.
        kinds: what `one` can do; the seed of a try chooses.
        count: faults in all.
        seed: of the first try; each further one has the next number.
        one: makes one try; raises whatever it finds wrong.
        weight: faults that `one` makes.
        jobs: tries at once.
    """
    result, started = Result(name), time.monotonic()
    told_at = started
    seeds = range(seed, seed + max(1, round(count / weight)))
    figures: dict[str, list[float]] = defaultdict(list)

    def made(number: int) -> tuple[Try, Figures | None, str]:
        a_try = Try(number, kinds[number % len(kinds)], random.Random(f"{name} {number}"))
        try:
            return a_try, one(a_try), ""
        except Exception as error:  # whatever it is, the campaign goes on and tells
            place = traceback.extract_tb(error.__traceback__)[-1]
            return a_try, None, f"{error or type(error).__name__} ({type(error).__name__}, {place.name}:{place.lineno})"

    with ThreadPoolExecutor(jobs) as pool:
        for done, future in enumerate(as_completed([pool.submit(made, number) for number in seeds]), 1):
            a_try, measured, what = future.result()
            result.tries += weight
            result.kinds[a_try.kind] = result.kinds.get(a_try.kind, 0) + weight
            if measured is None:
                result.failures.append(Failure(a_try.seed, a_try.kind, what))
                tell(f"{name} seed {a_try.seed}, {a_try.kind}: FAILED: {what}")
            else:
                result.passed += weight
                for key, value in measured.items():
                    figures[key].append(value)
            if (now := time.monotonic()) - told_at > _TELL_EVERY_S or done == len(seeds):
                told_at, took = now, now - started
                left = took / done * (len(seeds) - done)
                tell(f"{name} {result.passed} of {result.tries} passed, {took:.0f} s, ETA {left:.0f} s")
    result.figures = {key: _told(values) for key, values in sorted(figures.items())}
    result.seconds = time.monotonic() - started
    return result


def _told(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3g}"
    return f"median {statistics.median(values):.3g}, at most {max(values):.3g}"


def tell(line: str) -> None:
    """Prints a line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
