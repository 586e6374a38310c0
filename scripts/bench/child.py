"""The process of a row: what it is told, the steps it times, the one line of JSON that it answers with."""

import dataclasses
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from scripts.bench.case import NUM_WINDOWS, WARMUP_STEPS, WINDOW_STEPS, Case, Choice

_FULL = ("RESOURCE_EXHAUSTED", "out of memory")
"""Texts by which errors of jax and torch report a full device, whatever raises them."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The measurement of one process."""

    row: str
    case: Case
    weights: str
    """Directory of the initial weights, in Hugging Face's form."""
    memory_bytes: float
    """Memory of the GPU, or of the machine without one."""
    choice: Choice | None = None
    """The choice of an earlier round; None: the row searches."""
    attention: str | None = None
    """The form of attention that was the fastest in torch, for `torch_ideal`."""

    def encode(self) -> str:
        """For the command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """As `encode` wrote it."""
        values = json.loads(text)
        choice = values["choice"] and Choice(**values["choice"])
        return cls(**values | {"case": Case(**values["case"]), "choice": choice})

    @property
    def choices(self) -> list[Choice]:
        """To try in turn."""
        return [self.choice] if self.choice else self.case.candidates(self.row, self.memory_bytes)


def answer(rows: Mapping[str, Callable[[Task], Mapping[str, Any]]]) -> None:
    """Measures what the command line says. What libraries print goes to stderr: on stdout is one line of JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = Task.decode(sys.argv[1])
    print(json.dumps(rows[task.row](task)), file=out, flush=True)


def first_that_fits(choices: Iterable[Choice], attempt: Callable[[Choice], dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of `attempt` for the first choice that fits, and that choice.

    Raises:
        MemoryError: none fits.
    """
    tried = []
    for choice in choices:
        try:
            return attempt(choice) | {"choice": dataclasses.asdict(choice)}
        except Exception as error:
            if not isinstance(error, MemoryError) and not any(words in str(error) for words in _FULL):
                raise
            tried.append(str(choice))
        gc.collect()  # what the attempt held on the device
    raise MemoryError(f"out of memory with each of: {'; '.join(tried)}")


def timed_steps(
    step: Callable[[int], None], wait: Callable[[], object], after_first: Callable[[], dict[str, float]]
) -> dict[str, Any]:
    """Runs the steps of a round.

    Args:
        step: begins a step, by its number.
        wait: for all that was begun.
        after_first: gives the norms of the first step's gradients, right behind it.

    Returns:
        `first_step_s`; `gradients`; `step_s`, the mean of each window in seconds; `started` and `ended`, the time of day.
    """
    clock = time.perf_counter()
    step(0)
    wait()
    first_step_s, gradients = time.perf_counter() - clock, after_first()
    for number in range(1, WARMUP_STEPS):
        step(number)
        wait()
    started, step_s = time.time(), []
    for window in range(NUM_WINDOWS):
        clock = time.perf_counter()
        for number in range(WINDOW_STEPS):
            step(WARMUP_STEPS + window * WINDOW_STEPS + number)
        wait()
        step_s.append((time.perf_counter() - clock) / WINDOW_STEPS)
    times = {"first_step_s": first_step_s, "step_s": step_s, "started": started, "ended": time.time()}
    return times | {"gradients": gradients}


def fastest(call: Callable[[], Any], wait: Callable[[Any], Any], *, window_s: float = 0.05) -> float:
    """Seconds of one call: the least of five windows' means, as a ceiling is wanted. `wait` is given a call's result."""
    out = call()
    wait(out)
    clock = time.perf_counter()
    wait(call())
    repeats = max(1, round(window_s / (time.perf_counter() - clock)))
    windows = []
    for _ in range(5):
        clock = time.perf_counter()
        for _ in range(repeats):
            out = call()
        wait(out)
        windows.append((time.perf_counter() - clock) / repeats)
    return min(windows)


def resident_bytes() -> int:
    """The most that this process had of the machine's memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
