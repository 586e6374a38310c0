"""R16: every minute something else breaks in one long run, which goes on by itself and ends as if nothing had been."""

import contextlib
import json
import random
import resource
import signal
import statistics
import time
from collections.abc import Callable

from tests.faults import scene
from tests.faults.broken_run import ENDS_S, STARTS_S, BrokenRun, broken, golden
from tests.faults.hangs import limits
from tests.faults.results import Failure, Result, tell
from tests.faults.scene import Scene

EVERY_S = 60.0
"""Between faults."""
STEP_S = 0.25
SAVE_EVERY = 20
"""Steps, so 5 s."""
LIMIT_S = 8.0
"""Of every phase."""
RECOVERS_S = 120.0
"""In which the run must have done new steps."""
SHARE = 0.97
"""Of the faults that it must recover from without a hand."""
FULL_S = 10.0
"""For which the disk takes nothing."""


def kill_one(run: BrokenRun, rng: random.Random) -> None:
    run.signal(rng.choice(run.pids()), signal.SIGKILL)


def kill_all(run: BrokenRun, rng: random.Random) -> None:
    for pid in run.pids():
        run.signal(pid, signal.SIGKILL)


def stop_one(run: BrokenRun, rng: random.Random) -> None:
    run.signal(rng.choice(run.pids()), signal.SIGSTOP)


def fail_to_read(run: BrokenRun, rng: random.Random) -> None:
    at(run, rng, "loader", "fail to read")


def hold_gil(run: BrokenRun, rng: random.Random) -> None:
    at(run, rng, "step", "hold the GIL")


def flip_bit(run: BrokenRun, rng: random.Random) -> None:
    at(run, rng, "after step", "flip bits")


def at(run: BrokenRun, rng: random.Random, point: str, do: str) -> None:
    """Lays the fault for some rank, and waits until it has happened."""
    rank = rng.randrange(run.num_processes)
    fired = run.folder / "fired" / f"{point}.{rank}"
    fired.unlink(missing_ok=True)
    run.lay(point, rank, do)
    run.wait_for_fault(point, rank)


def preempt(run: BrokenRun, rng: random.Random) -> None:
    """And starts it again, as a scheduler would."""
    process = run.processes[-1]
    run.signal(process.pid, signal.SIGTERM)
    run.wait(lambda: not run.running, 30, "end after a preemption", or_ended=True)
    assert process.returncode == 0, f"preempted, it ended with {process.returncode}"
    run.start()


def fill_disk(run: BrokenRun, rng: random.Random) -> None:
    """No file grows for a while: as a full disk, but for this run alone."""
    pids = run.pids()
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, before[pid][1]))
    time.sleep(FULL_S)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before[pid])


def damage_newest(run: BrokenRun, rng: random.Random) -> None:
    """A bit of the newest checkpoint flips, and the run has to restore."""
    newest = run.run_dir / "checkpoints" / str(scene.newest_whole(run.run_dir))
    with contextlib.suppress(FileNotFoundError):  # retention was faster
        path = rng.choice(sorted(path for path in (newest / "state").rglob("d/*") if path.is_file()))
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1
        path.write_bytes(content)
    kill_all(run, rng)


FAULTS: dict[str, Callable[[BrokenRun, random.Random], None]] = {
    "a process killed": kill_one,
    "all processes killed": kill_all,
    "SIGSTOP": stop_one,
    "a read that fails": fail_to_read,
    "the GIL held": hold_gil,
    "a preemption": preempt,
    "a bit flipped in memory": flip_bit,
    "a full disk": fill_disk,
    "the newest checkpoint damaged, then a kill": damage_newest,
}


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """One run of two processes under the launcher, `count` faults; then compares its end with that of an unbroken one."""
    result, started, rng = Result("R16", tries=count), time.monotonic(), random.Random(seed)
    num_steps = int(0.85 * count * EVERY_S / STEP_S)
    settings = {
        "train.num_steps": num_steps, "train.eval_every": 10 * SAVE_EVERY, "mesh.data": 2, "mesh.fsdp": 1,
        "checkpoint.save_every": SAVE_EVERY, "checkpoint.keep_last": 3, "recovery.checksum_every": SAVE_EVERY,
        **limits(LIMIT_S * where.slowness),
    }  # fmt: skip
    golden(where, 2, settings)
    hands = 0
    began = time.monotonic()
    with broken(where, 2, settings, step_s=STEP_S) as tried:
        tried.wait(lambda: tried.step > SAVE_EVERY, STARTS_S + ENDS_S, "the first checkpoint")
        for number in range(count):
            kind = list(FAULTS)[number % len(FAULTS)] if number < len(FAULTS) else rng.choice(list(FAULTS))
            due = began + (number + 1) * EVERY_S
            if not tried.wait_or_end(due - time.monotonic()):
                result.tries = number  # it was faster than the faults
                break
            step, result.kinds[kind] = tried.step, result.kinds.get(kind, 0) + 1
            try:
                FAULTS[kind](tried, rng)
                tried.wait(lambda: tried.step > step + 1 or done(tried, num_steps), RECOVERS_S, f"recovery from {kind}")  # noqa: B023
                result.passed += 1
            except AssertionError as error:
                hands += 1
                result.failures.append(Failure(seed, kind, str(error)))
                tried.end()
                tried.start()
                with contextlib.suppress(AssertionError):
                    tried.wait(lambda: bool(tried.starts) and tried.running, STARTS_S, "start by hand")
            tell(f"R16 {number + 1} of {count}: {kind}; step {tried.step} of {num_steps}, {hands} hands")
        codes = tried.finish(num_steps * STEP_S + STARTS_S + ENDS_S)
        took = time.monotonic() - began
        try:
            assert codes[-1] == 0, f"ended with {codes[-1]}: {tried.last_line}"
            tried.must_equal_golden()
        except AssertionError as error:
            result.failures.append(Failure(seed, "the end of the run", str(error)))
            result.passed = 0
        ideal, num_starts = ideal_s(tried, num_steps), len(tried.starts)
    result.least_passed = SHARE
    result.figures = {
        "recovered without a hand": f"{result.passed} of {result.tries}",
        "goodput": f"{ideal / took:.1%} ({ideal:.0f} s without faults, {took:.0f} s with one every {EVERY_S:.0f} s)",
        "starts": str(num_starts),
    }
    result.seconds = time.monotonic() - started
    return result


def done(run: BrokenRun, num_steps: int) -> bool:
    return run.step >= num_steps


def ideal_s(run: BrokenRun, num_steps: int) -> float:
    """What the run would take without faults: its first start, and all steps as long as the median one takes."""
    records = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [record["perf/step_time_s"] for record in records if "perf/step_time_s" in record]
    first_start = next(event["time"] for event in run.events if event["event"] == "start")
    return first_start - run.started_at + num_steps * statistics.median(times)
