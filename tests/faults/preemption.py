"""R7: a scheduler wants the machine back; the run saves the step in progress and ends with exit code 0, then goes on."""

import itertools
import signal
import time

from tests.faults import results, scene
from tests.faults.broken_run import ENDS_S, STARTS_S, BrokenRun, broken, golden
from tests.faults.results import Figures, Result, Try
from tests.faults.scene import Scene

GRACE_S = 30.0
"""Seconds that most schedulers grant."""
MOMENTS = {"a step": "step", "a save": "hash", "an evaluation": "evaluate", "compiling": "compile", "the start": "join"}
"""When the signal comes, and the point where a process is then held up."""
WHOM = ("one rank", "all ranks", "the launcher")
KINDS = [f"{whom}, in {moment}" for moment, whom in itertools.product(MOMENTS, WHOM)]


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """Stops `count` runs of one, two or four processes, half of them by two signals at once, which are one request."""

    def one(a_try: Try) -> Figures:
        num_processes = a_try.rng.choice([1, 2, 2, 4])
        golden(where, num_processes, {})
        with broken(where, num_processes) as stopped:
            took = stop(stopped, a_try)
            steps, newest = stopped.step, scene.newest_whole(stopped.run_dir)
            assert steps < scene.NUM_STEPS, "did all its steps, whatever the signal"
            assert newest == steps, f"stopped after step {steps}, but step {newest} is the newest checkpoint"
            stopped.must_leave_none()
            stopped.start()
            assert stopped.finish()[-1] == 0, stopped.last_line
            assert stopped.starts[-1] == newest
            stopped.must_equal_golden()
        return {"s from signal to exit 0": took}

    return results.attempt("R7", KINDS, count, seed, one, jobs=jobs)


def stop(stopped: BrokenRun, a_try: Try) -> float:
    """Sends the signal in the moment that is wanted; seconds until all has ended, which must be with exit code 0."""
    whom, _, moment = a_try.kind.partition(", in ")
    point = MOMENTS[moment]
    rank = a_try.rng.randrange(stopped.num_processes)
    if moment == "a step":
        steps = a_try.rng.randint(1, 30)
        stopped.wait(lambda: stopped.step > steps, ENDS_S, f"step {steps}")
    stopped.lay(point, rank, "hold")
    stopped.wait_for_fault(point, rank, STARTS_S + ENDS_S)
    stopped.wait(lambda: bool(stopped.pids()), STARTS_S, "start of all processes")
    pids = {"one rank": [a_try.rng.choice(stopped.pids())], "all ranks": stopped.pids()}.get(whom, [])
    pids = pids or [process.pid for process in stopped.processes]
    started = time.monotonic()
    for number in range(a_try.rng.choice([1, 2])):
        came = [stopped.signal(pid, signal.SIGTERM) for pid in pids]
        assert number or all(came), "had ended before it could be stopped"
        time.sleep(0.2)
    stopped.release()
    codes = stopped.finish(GRACE_S + 5)
    took = time.monotonic() - started
    assert not any(codes), f"ended with {codes}: {stopped.last_line}"
    assert took < GRACE_S * stopped.scene.slowness, f"took {took:.0f} s"
    return took
