"""R1: processes are killed, at random moments and between any two operations of a save; nothing is lost."""

import random
import signal
import time

from tests.faults import results, scene
from tests.faults.broken_run import ENDS_S, STARTS_S, BrokenRun, broken, golden
from tests.faults.results import Figures, Result, Try
from tests.faults.scene import Scene

KILLS = 4
"""Kills of one run."""
KINDS = ("2 processes", "1 process by hand", "4 processes", "1 process")
AT_A_START = ("start", "join", "compile", "prepare", "load", "loaded")
IN_A_SAVE = ("save", "write", "finalize", "hash", "manifest", "rename", "committed", "delete", "deleting")
FIRST_ONLY = ("finalize", "manifest", "rename", "committed", "delete", "deleting")
"""Points to which process 0 alone comes."""


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """Kills `count` times: at points of a start, at points of a save, and at random moments, in turn."""

    def one(a_try: Try) -> Figures:
        num_processes = int(a_try.kind[0])
        golden(where, num_processes, {})
        with broken(where, num_processes, by_hand=a_try.kind.endswith("by hand")) as killed:
            redone = [kill(killed, a_try.rng, a_try.seed * KILLS + number) for number in range(KILLS)]
            codes = killed.finish()
            assert codes[-1] == 0, f"ended with {codes}: {killed.last_line}"
            killed.must_leave_none()
            killed.must_equal_golden()
        return {"steps computed again": max(redone)}

    return results.attempt("R1", KINDS, count, seed, one, weight=KILLS, jobs=jobs)


def kill(killed: BrokenRun, rng: random.Random, number: int) -> int:
    """Kills a process, or all, and waits until the run trains again; the number of steps that it computes again."""
    ranks = [rng.randrange(killed.num_processes)]
    if number % 3 == 0:
        point = AT_A_START[number // 3 % len(AT_A_START)]
        await_steps(killed, rng)
        killed.lay(point, ranks[0], "kill", **({"after_s": rng.uniform(0, 0.5)} if point == "compile" else {}))
        kill_now(killed, ranks)  # so that there is another start
        start_by_hand(killed)
        killed.wait_for_fault(point, ranks[0])
    elif number % 3 == 1:
        point = IN_A_SAVE[number // 3 % len(IN_A_SAVE)]
        ranks = [0] if point in FIRST_ONLY else ranks
        await_steps(killed, rng)
        killed.lay(point, ranks[0], "kill")
        killed.wait_for_fault(point, ranks[0])
    else:
        await_steps(killed, rng)
        if rng.random() < 0.5:
            ranks = list(range(killed.num_processes))
        time.sleep(rng.uniform(0, 0.1))
        kill_now(killed, ranks)
    num_starts, newest, step = len(killed.starts), scene.newest_whole(killed.run_dir), killed.step
    start_by_hand(killed)
    killed.wait(lambda: len(killed.starts) > num_starts, STARTS_S, "next start")
    went_on_from = killed.starts[num_starts]
    assert went_on_from >= newest, f"went on from step {went_on_from} although {newest} was committed"
    redone = max(0, step - went_on_from)
    assert redone <= 2 * scene.SAVE_EVERY + 1, f"{redone} steps were computed again"  # a save may have been under way
    return redone


def await_steps(killed: BrokenRun, rng: random.Random) -> None:
    """Waits until the run has done some more steps."""
    wanted = max(killed.starts, default=0) + rng.randint(1, 9)
    killed.wait(lambda: bool(killed.starts) and killed.step >= wanted, ENDS_S, f"step {wanted}")


def kill_now(killed: BrokenRun, ranks: list[int]) -> None:
    """Kills these processes at once."""
    pids = killed.pids()
    were_there = [killed.signal(pids[rank], signal.SIGKILL) for rank in ranks]
    assert all(were_there), "had ended before it could be killed"


def start_by_hand(killed: BrokenRun) -> None:
    """Where no launcher does it."""
    if killed.by_hand:
        killed.wait(lambda: not killed.running, STARTS_S, "end of what was killed", or_ended=True)
        killed.start()
