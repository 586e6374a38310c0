"""Process of a row: its arguments, the steps it times, and its answer of one line of JSON."""

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
"""Texts that report a full device in errors of jax and torch, of whatever class."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Measurement of one process."""

    row: str
    case: Case
    weights: str
    """Directory of the initial weights, in Hugging Face's form."""
    memory_bytes: float
    """Memory of the GPU, or of a machine without GPUs."""
    choice: Choice | None = None
    """Choice of an earlier round; None: the row searches."""
    attention: str | None = None
    """Fastest form of attention in torch, for `torch_ideal`."""

    def encode(self) -> str:
        """Returns the task as text for the command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Reads a task that `encode` wrote."""
        values = json.loads(text)
        choice = values["choice"] and Choice(**values["choice"])
        return cls(**values | {"case": Case(**values["case"]), "choice": choice})

    @property
    def choices(self) -> list[Choice]:
        """Returns the choices to try in turn."""
        return [self.choice] if self.choice else self.case.candidates(self.row, self.memory_bytes)


def answer(rows: Mapping[str, Callable[[Task], Mapping[str, Any]]]) -> None:
    """Runs the measurement of the command line. Prints one line of JSON on stdout; output of libraries goes to stderr."""
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
        gc.collect()  # frees the attempt's memory on the device
    raise MemoryError(f"out of memory with each of: {'; '.join(tried)}")


def timed_steps(
    step: Callable[[int], None], wait: Callable[[], object], after_first: Callable[[], dict[str, float]]
) -> dict[str, Any]:
    """Runs the steps of a round.

    Args:
        step: starts a step, given its number.
        wait: waits for all started steps.
        after_first: returns the gradient norms of the first step, called directly after it.

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
    """Returns the seconds of one call: the least mean of five windows, because it serves as a ceiling. `wait` waits for a
    call's result."""
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
    """Returns the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
