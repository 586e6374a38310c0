"""R9 and R18: a process is stuck; it is found in time, the stacks of all are kept, and the run is started again."""

import itertools
import time
from collections.abc import Sequence

from tests.faults import results
from tests.faults.broken_run import ENDS_S, STARTS_S, BrokenRun, broken, golden
from tests.faults.results import Figures, Result, Try
from tests.faults.scene import Scene

LIMIT_S = 4.0
"""Limit of every phase except compiling, on a quiet machine."""
COMPILES_S = 12.0
"""Limit of compiling, which four processes do at once: those behind the first find no program on the disk."""
FOUND_S = 2.0
"""In which it must be found once the limit has passed."""
PREFETCHED = 2
"""Steps whose batches may be there already when the loader gets stuck."""
HANGS = {
    "the loader sleeps": ("sleep", "loader"),
    "a thread waits for its own lock": ("deadlock", "callback"),
    "SIGSTOP": ("stop", "step"),
    "one process leaves out a collective": ("meet alone", "step"),
    "an evaluation sleeps": ("sleep", "evaluate"),
    "the thread that saves sleeps": ("sleep", "hash"),
    "compiling sleeps": ("sleep", "compile"),
}
NATIVE = {
    "the GIL is held at a step": ("hold the GIL", "step"),
    "the GIL is held by the loader": ("hold the GIL", "loader"),
    "a native loop without end": ("spin", "step"),
    "the GIL is held by the thread that saves": ("hold the GIL", "hash"),
}
"""Hangs that a watchdog in the same process cannot see, because it does not run."""


def run_hangs(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """R9: threads that wait, processes that are stopped."""
    return _run("R9", HANGS, (2, 4, 1), count, seed, where, jobs)


def run_native(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """R18: native code that holds the interpreter."""
    return _run("R18", NATIVE, (1, 2), count, seed, where, jobs)


def _run(
    name: str, hangs: dict[str, tuple[str, str]], sizes: Sequence[int], count: int, seed: int, where: Scene, jobs: int
) -> Result:
    kinds = [
        f"{what}, {size} process{'es' if size > 1 else ''}"
        for size, what in itertools.product(sizes, hangs)
        if size > 1 or hangs[what][0] != "meet alone"
    ]

    def one(a_try: Try) -> Figures:
        what, _, size = a_try.kind.rpartition(", ")
        do, point = hangs[what]
        settings = limits(LIMIT_S * where.slowness) | {"watchdog.compile_s": f"{COMPILES_S * where.slowness:g}"}
        golden(where, int(size.split()[0]), settings)
        with broken(where, int(size.split()[0]), settings) as stuck:
            rank = a_try.rng.randrange(stuck.num_processes)
            if point in ("step", "loader", "callback", "hash"):
                steps = a_try.rng.randint(2, 30)
                stuck.wait(lambda: stuck.step > steps, STARTS_S + ENDS_S, f"step {steps}")
            stuck.lay(point, rank, do)
            began = stuck.wait_for_fault(point, rank, STARTS_S + ENDS_S)["at"]
            num_stacks, old = len(stacks(stuck)), stuck.pids()
            limit_s = COMPILES_S if point == "compile" else LIMIT_S
            may_take = limit_s + FOUND_S + (PREFETCHED * 0.03 if point == "loader" else 0)
            if do == "meet alone":  # the others may wait for an answer too, which they do for longer
                may_take += LIMIT_S
            stuck.wait(lambda: len(stacks(stuck)) > num_stacks or stuck.pids() != old, 2 * may_take, "finding it")
            found = time.monotonic() - began
            assert found < may_take * where.slowness, f"found after {found:.1f} s, limit {limit_s * where.slowness:.0f} s"
            assert stuck.finish(STARTS_S + ENDS_S) == [0], stuck.last_line
            stuck.must_leave_none()
            must_have_stacks(stuck)
            stuck.must_equal_golden()
            lives = max(len((stuck.folder / f"pids.{each}").read_text().split()) for each in range(stuck.num_processes))
            assert lives == 2, f"started {lives} times, which is {lives - 2} false alarms"
        return {"s from the fault until it is found": found}

    return results.attempt(name, kinds, count, seed, one, jobs=jobs)


def limits(limit_s: float) -> dict[str, str]:
    """Settings by which every phase of a run has the same limit, but for the start, in which processes wait for others."""
    phases = ("compile", "load", "step", "save", "evaluate")
    together = {"watchdog.start_s": f"{4 * limit_s:g}", "distributed.initialization_timeout_s": f"{3 * limit_s:.0f}"}
    return {f"watchdog.{phase}_s": f"{limit_s:g}" for phase in phases} | together | {"watchdog.factor": "1.5"}


def stacks(stuck: BrokenRun) -> list[str]:
    """Names of the files with stacks that hold some."""
    return sorted(path.name for path in (stuck.run_dir / "stacks").glob("*.txt") if path.stat().st_size)


def must_have_stacks(stuck: BrokenRun) -> None:
    """Fails unless there are stacks of every process."""
    ranks = {int(name.split(".")[-2]) for name in stacks(stuck)}
    assert ranks == set(range(stuck.num_processes)), f"stacks of processes {sorted(ranks)} only"
    for path in (stuck.run_dir / "stacks").glob("*.txt"):
        if path.stat().st_size:
            assert "thread 0x" in path.read_text(errors="replace").lower(), f"{path.name} holds no stack"
