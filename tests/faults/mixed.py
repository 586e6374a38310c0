"""R16: every minute something else breaks in one long run, which goes on by itself and ends as if nothing had been."""

import contextlib
import json
import pathlib
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable

from tests import runs
from tests.faults import scene
from tests.faults.bad_disk import WELL, Disk, FaultyDisk
from tests.faults.bad_numbers import POISON, POISON_TOKEN
from tests.faults.broken_run import ENDS_S, STARTS_S, BrokenRun, broken, passing_over
from tests.faults.hangs import limits
from tests.faults.results import Failure, Result, tell
from tests.faults.scene import End, Scene

EVERY_S = 60.0
"""Between faults."""
STEP_S = 0.25
SAVE_EVERY = 20
"""Steps, so 5 s."""
LIMIT_S = 8.0
"""Limit of every other phase."""
COMPILES_S = 40.0
"""Limit of compiling, which nobody has done before this run."""
UNDER_WAY = SAVE_EVERY + 4
"""Steps that may come on record although the run is broken: those that were under way, and those before replicas are
compared the next time."""
RECOVERS_S = 120.0
"""In which the run must have done new steps."""
SHARE = 0.97
"""Share of the faults from which it must recover without intervention."""
BAD_DISK_S = 10.0
"""For which the disk takes nothing, or takes long."""


def kill_one(run: BrokenRun, rng: random.Random) -> None:
    assert run.signal(rng.choice(run.pids()), signal.SIGKILL), "had ended before it could be killed"


def kill_all(run: BrokenRun, rng: random.Random) -> None:
    run.kill_all()


def stop_one(run: BrokenRun, rng: random.Random) -> None:
    assert run.signal(rng.choice(run.pids()), signal.SIGSTOP), "had ended before it could be stopped"


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
    run.lay(point, rank, do, seed=rng.getrandbits(32))
    run.wait_for_fault(point, rank)


def preempt(run: BrokenRun, rng: random.Random) -> None:
    """And starts it again, as a scheduler would."""
    process = run.processes[-1]
    assert run.signal(process.pid, signal.SIGTERM), "had ended before it could be stopped"
    run.wait(lambda: not run.running, 30, "end after a preemption", or_ended=True)
    assert process.returncode == 0, f"preempted, it ended with {process.returncode}"
    run.start()


def damage_newest(run: BrokenRun, rng: random.Random) -> None:
    """The run has to restore, and a bit of the newest checkpoint has flipped; there must be an older one."""
    run.wait(lambda: len(runs.committed_steps(run.run_dir)) > 1, ENDS_S, "the second checkpoint")
    run.kill_all()
    newest = run.run_dir / "checkpoints" / str(max(runs.committed_steps(run.run_dir)))
    path = rng.choice(sorted(path for path in (newest / "state").rglob("d/*") if path.is_file()))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1
    path.write_bytes(content)
    run.wait(lambda: f"{newest} is damaged: " in run.output, STARTS_S, "finding the damage")


FAULTS: dict[str, Callable[[BrokenRun, random.Random], None]] = {
    "a process killed": kill_one,
    "all processes killed": kill_all,
    "SIGSTOP": stop_one,
    "a read that fails": fail_to_read,
    "the GIL held": hold_gil,
    "a preemption": preempt,
    "a bit flipped in memory": flip_bit,
    "the newest checkpoint damaged, then a kill": damage_newest,
}


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """One run of two processes under the launcher, `count` faults beside bad batches; then compares its end with that of an
    unbroken one, which passes over the same rows."""
    result, started, rng = Result("R16", tries=count), time.monotonic(), random.Random(seed)
    folder = where.new_directory("mixed")
    disk = FaultyDisk(where, folder)
    num_steps = int(0.85 * count * EVERY_S / STEP_S)
    settings = {
        "train.num_steps": num_steps, "train.eval_every": 10 * SAVE_EVERY, "mesh.data": 2, "mesh.fsdp": 1,
        "checkpoint.save_every": SAVE_EVERY, "checkpoint.keep_last": 3, "recovery.checksum_every": SAVE_EVERY,
        **limits(LIMIT_S * where.slowness), "watchdog.compile_s": COMPILES_S * where.slowness,
        **bad_batches(where, folder, num_steps, max(2, count // 5), rng),
    }  # fmt: skip
    poison = {"LLAMAJAX_CAMPAIGN_POISON": f"nan:{POISON_TOKEN}"}
    faults = FAULTS | {
        "a full disk": lambda run, rng: make_bad(disk, Disk(room=0)),
        "a slow disk": lambda run, rng: make_bad(disk, Disk(latency_ms=100)),
    }
    hands, kinds = 0, list(faults)
    began = time.monotonic()
    with broken(
        where, 2, settings, step_s=STEP_S, environment=poison | disk.environment, run_dir=disk.root / "run"
    ) as tried:
        tried.wait(lambda: tried.step > SAVE_EVERY, STARTS_S + ENDS_S, "the first checkpoint")
        for number in range(count):
            if number % len(kinds) == 0:
                rng.shuffle(kinds)
            kind = kinds[number % len(kinds)]
            due = began + (number + 1) * EVERY_S
            if not tried.wait_or_end(due - time.monotonic()):
                result.tries = number  # it was faster than the faults
                break
            result.kinds[kind] = result.kinds.get(kind, 0) + 1
            try:
                faults[kind](tried, rng)
                recover(tried, records(tried), num_steps, kind)
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
        rollbacks = sum(event["event"] == "rollback" and event["num_rows"] > 0 for event in tried.events)
        try:
            assert codes[-1] == 0, f"ended with {codes[-1]}: {tried.last_line}"
            assert rollbacks, "no bad batch was passed over"
            End(tried.run_dir).must_equal(passing_over(tried, poison))
        except AssertionError as error:
            result.failures.append(Failure(seed, "the end of the run", str(error)))
            result.passed = 0
        ideal, num_starts = ideal_s(tried, num_steps), len(tried.starts)
    shutil.rmtree(folder, ignore_errors=True)
    result.least_passed = SHARE
    result.figures = {
        "recovered without a hand": f"{result.passed} of {result.tries}",
        "goodput": f"{ideal / took:.1%} ({ideal:.0f} s without faults, {took:.0f} s with one every {EVERY_S:.0f} s)",
        "starts": str(num_starts),
        "bad batches passed over": str(rollbacks),
    }
    result.seconds = time.monotonic() - started
    return result


def recover(run: BrokenRun, num_records: int, num_steps: int, kind: str) -> None:
    """Waits until it has done new steps."""
    run.wait(lambda: records(run) > num_records + UNDER_WAY or done(run, num_steps), RECOVERS_S, f"recovery from {kind}")


def bad_batches(
    where: Scene, folder: pathlib.Path, num_steps: int, num_bad: int, rng: random.Random
) -> dict[str, str | int]:
    """Settings of a run on a text of its own, about as long as it trains; some documents make gradients that are not finite,
    after which the run goes back and passes over rows."""
    words = [" ".join(rng.choices(runs.WORDS, k=rng.randint(10, 30))) for _ in range(num_steps * 8 * 32 // 20)]
    for number in rng.sample(range(len(words)), num_bad):
        words[number] = f"{POISON} {words[number]}"
    (folder / "text.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in words))
    scene.train_tokenizer(where.directory / "text.jsonl", folder / "tokenizer.model")
    return {
        "data.sources": json.dumps([{"kind": "jsonl", "paths": [str(folder / "text.jsonl")]}]),
        "data.tokenizer.path": str(folder / "tokenizer.model"),
        "train.max_nonfinite_steps": 1,
        "recovery.max_rollbacks": 1000,
    }


def make_bad(faulty: FaultyDisk, disk: Disk) -> None:
    """For a while, and for the run's files alone."""
    before = faulty.num_struck
    faulty.be(disk)
    time.sleep(BAD_DISK_S)
    faulty.be(WELL)
    assert faulty.num_struck > before, "no call failed or took longer"


def records(run: BrokenRun) -> int:
    """Steps that it has done in all, those that it went back behind included."""
    path = run.run_dir / "rolled_back.jsonl"
    return run.step + (path.read_bytes().count(b'"train/loss"') if path.exists() else 0)


def done(run: BrokenRun, num_steps: int) -> bool:
    return run.step >= num_steps


def ideal_s(run: BrokenRun, num_steps: int) -> float:
    """Returns the seconds of the run without faults: its first start, and all steps as long as the median one takes."""
    records = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [record["perf/step_time_s"] for record in records if "perf/step_time_s" in record]
    first_start = next(event["time"] for event in run.events if event["event"] == "start")
    return first_start - run.started_at + num_steps * statistics.median(times)
