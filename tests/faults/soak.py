"""R15: a long run takes no more memory, files and threads at its end than near its beginning."""

import contextlib
import os
import pathlib
import re
import time

import numpy as np

from tests.faults.broken_run import BrokenRun, broken
from tests.faults.results import Failure, Result, tell
from tests.faults.scene import Scene

EVERY = 100
"""Steps between saves, and between evaluations."""
MOST_MB = 1.0
"""Growth of resident memory per 1,000 steps, in the second half: by the hundredth save or so, what malloc keeps for each of
the many threads of a save has come to its size. 0.2 are TensorStore's, which does not give back what Orbax
asks it for at a save: 630 bytes for each of two dozen metrics, 70 for each of a hundred parts of its specifications."""
MOST_THREADS = 0.5
"""Growth of their number per 1,000 steps, of ten saves: between saves TensorStore keeps now more, now fewer."""
STEP_S = 0.5
"""Seconds of a step, with its share of saves and evaluations, before the run counts as stuck."""


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """One run of `count` steps, sampled while it trains."""
    result, started = Result("R15", tries=1), time.monotonic()
    settings = {"train.num_steps": count, "train.eval_every": EVERY, "checkpoint.save_every": EVERY, "seed": seed}
    with broken(where, 1, settings, by_hand=True, step_s=0) as soaked:
        samples = watch(soaked, count)
        codes = soaked.finish()
        assert codes == [0], f"ended with {codes}: {soaked.last_line}"
        assert soaked.step == count, f"{soaked.step} steps are on record"
    # Those after the last step are of a process that reads its log, and closes what it has.
    steps, rss, files, threads = np.array([sample for sample in samples if sample[0] < count], np.float64).T
    warm, late = steps > count / 4, steps > count / 2
    assert late.sum() >= 8, f"{late.sum()} samples are too few"
    result.figures = {
        "steps": f"{count:,}",
        "MB at the end": f"{rss[-1] / 1e6:.0f}",
        "threads at the end": f"{np.median(threads[late]):.0f}",
    }
    for name, values, most in (("MB", rss / 1e6, MOST_MB), ("threads", threads, MOST_THREADS)):
        slope = float(np.polyfit(steps[late] / 1000, values[late], 1)[0])
        result.figures[f"{name} per 1,000 steps"] = f"{slope:.3f}"
        if slope > most:
            result.failures.append(Failure(seed, name, f"grow by {slope:.2f} per 1,000 steps"))
    # The fewest, which a save or an evaluation under way does not raise, but a leak does.
    before, after = files[warm & ~late].min(), files[steps > 0.75 * count].min()
    result.figures["open files"] = f"{before:.0f}, then {after:.0f}"
    if after > before:
        result.failures.append(Failure(seed, "open files", f"grow from {before:.0f} to {after:.0f}"))
    result.passed = 0 if result.failures else 1
    result.seconds = time.monotonic() - started
    result.figures["ms per step"] = f"{1000 * result.seconds / count:.1f}"
    return result


def watch(soaked: BrokenRun, count: int) -> list[tuple[int, int, int, int]]:
    """Step, resident bytes, open files and threads of the process, some 400 times."""
    samples: list[tuple[int, int, int, int]] = []
    deadline = time.monotonic() + (60 + count * STEP_S) * soaked.scene.slowness
    told_at = time.monotonic()
    while soaked.running:
        assert time.monotonic() < deadline, f"only {soaked.step} of {count} steps were done in time"
        with contextlib.suppress(OSError, IndexError):  # it has not begun, or has just ended
            process = pathlib.Path("/proc") / str(soaked.pids()[0])
            status = (process / "status").read_text()
            rss, threads = (re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE) for name in ("VmRSS", "Threads"))
            if rss is not None and threads is not None:
                files = len(os.listdir(process / "fd"))
                samples.append((soaked.step, 1024 * int(rss[1]), files, int(threads[1])))
        if time.monotonic() - told_at > 30:
            told_at = time.monotonic()
            tell(f"R15 step {soaked.step} of {count}, {samples[-1][1] / 1e6:.0f} MB" if samples else "R15 starts")
        time.sleep(min(1.0, count / 20_000))
    return samples
