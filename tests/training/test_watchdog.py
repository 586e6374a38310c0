"""Processes that are stuck are found in time, leave their stacks and end; the one that is stuck is named by all."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import pytest

from llamajax import disk
from llamajax.config.recovery import WatchdogConfig
from llamajax.data import progress
from llamajax.training.watchdog import COMPILERS, Watchdog
from tests import runs

STEP_LIMIT_S = 4
FOUND_S = STEP_LIMIT_S + 2
"""Seconds after the last finished step within which a process must have found that it is stuck."""

LIMITS = [name for name in WatchdogConfig.__dataclass_fields__ if name.endswith("_s")]
LIMIT_S = 1.0

HOLDS_LOCK = """
import fcntl, sys, time
lock = open(sys.argv[1], "ab")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(2)
"""

PROGRAM = """
import ctypes, sys, threading, time
from llamajax.train import main as train
from llamajax.data.rows.loader import Loader
from llamajax.processes import peers

how, stuck_rank = sys.argv.pop(1), int(sys.argv.pop(1))

def sleeps():
    time.sleep(1_000_000)

def deadlocks():
    lock = threading.Lock()
    with lock, lock:
        pass

def holds_the_interpreter():
    ctypes.PyDLL(None).sleep(1_000_000)

load = Loader._load
def load_or_not(self, step):
    if step == 6 and peers.rank() == stuck_rank:
        globals()[how]()
    return load(self, step)
Loader._load = load_or_not
train()
"""


class Listed(Watchdog):
    """Lists what would end the process."""

    def __init__(self, run_dir, **limits):
        self.ends = []
        super().__init__(dataclasses.replace(WatchdogConfig(), **(dict.fromkeys(LIMITS, LIMIT_S) | limits)), run_dir)

    def _end(self, phase, doing, now):
        self.ends.append((phase.kind, doing))
        phase.limit = math.inf

    def await_end(self):
        """Returns once something would have ended the process."""
        deadline = time.monotonic() + 60
        while not self.ends and time.monotonic() < deadline:
            time.sleep(0.05)


def test_what_lasts_too_long_is_found_with_what_it_did(tmp_path):
    with Listed(tmp_path) as watchdog:
        watchdog.finished(1)
        watchdog.doing("waiting for its batch")
        watchdog.await_end()
    assert watchdog.ends == [("step", "waiting for its batch")]


def test_what_another_process_holds_is_waited_for(tmp_path):
    held = subprocess.Popen([sys.executable, "-c", HOLDS_LOCK, str(tmp_path / "lock")], stdout=subprocess.PIPE)
    assert held.stdout is not None
    held.stdout.readline()
    with Listed(tmp_path) as watchdog:
        watchdog.begin("load")
        with disk.locked(tmp_path):
            pass
    held.communicate()
    assert watchdog.ends == []


def test_who_waits_for_others_at_a_step_may_take_longer_but_not_for_ever(tmp_path):
    """Two processes may each wait for an answer of the other."""
    program = HOLDS_LOCK.replace("sleep(2)", "sleep(600)")
    held = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "lock")], stdout=subprocess.PIPE)
    assert held.stdout is not None
    held.stdout.readline()
    took = []

    def let_go():
        watchdog.await_end()
        took.append(time.monotonic() - began)
        held.kill()

    with Listed(tmp_path, save_s=2 * LIMIT_S) as watchdog:
        watchdog.finished(1)
        began = time.monotonic()
        releasing = threading.Thread(target=let_go)
        releasing.start()
        with disk.locked(tmp_path):
            pass
        releasing.join()
    held.communicate()
    assert watchdog.ends == [("step", "waiting for the devices")]
    assert took[0] >= 3 * LIMIT_S


def test_the_first_of_other_steps_may_take_as_long_as_a_first_one(tmp_path):
    with Listed(tmp_path, compile_s=60.0) as watchdog:
        watchdog.finished(1)
        watchdog.other_steps()
        time.sleep(2 * LIMIT_S)
        assert watchdog.ends == []
        watchdog.finished(2)
        phase = watchdog._phases.of(threading.get_ident())
        assert phase is not None
        assert phase.limit >= 2 * LIMIT_S * watchdog._phases._config.factor


def test_what_compiles_has_the_limit_of_compiling(tmp_path):
    @jax.jit
    def slowly_traced(x):
        time.sleep(2 * LIMIT_S)
        return x

    for module in COMPILERS:
        assert importlib.util.find_spec(module) is not None
    with Listed(tmp_path, compile_s=60.0) as watchdog:
        watchdog.begin("evaluate")
        slowly_traced(1)
        assert watchdog.ends == []
        phase = watchdog._phases.of(threading.get_ident())
        assert phase is not None
        assert phase.setting == "compile_s"


def test_loading_may_last_as_long_as_it_gets_on(tmp_path):
    with Listed(tmp_path) as watchdog:
        watchdog.begin("load")
        for _ in range(20):
            time.sleep(LIMIT_S / 10)
            progress.gets_on()
        assert watchdog.ends == []
        watchdog.await_end()
    assert watchdog.ends == [("load", "")]


def test_a_save_in_the_background_is_watched(tmp_path):
    def save():
        with watchdog.phase("save"):
            watchdog.await_end()

    with Listed(tmp_path) as watchdog:
        saving = threading.Thread(target=save)
        saving.start()
        while saving.is_alive():
            watchdog.finished(1)
            time.sleep(0.01)
    assert watchdog.ends == [("save", "")]


def test_a_file_for_stacks_stays_only_if_there_are_some(tmp_path):
    left_over = tmp_path / "stacks" / "20260101T000000.0.txt"
    left_over.parent.mkdir(mode=0o700)
    left_over.touch()
    with Listed(tmp_path) as watchdog:
        watchdog.keep_stacks()
        assert not left_over.exists()
        assert stacks_of(tmp_path, 0).stat().st_size == 0
    assert not (tmp_path / "stacks").exists()
    with Listed(tmp_path) as watchdog:
        watchdog.keep_stacks()
        watchdog._leave_stacks("process 1 is stuck", is_stuck=True)
    text = stacks_of(tmp_path, 0).read_text()
    assert text.startswith("process 1 is stuck\n")
    assert "in test_a_file_for_stacks_stays_only_if_there_are_some" in text


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return runs.write_config(tmp_path_factory.mktemp("stuck"), eval_every=None, eval_batches=0)


def start(config: pathlib.Path, how: str, stuck_rank: int, run_dir: pathlib.Path, *overrides: str) -> subprocess.Popen[str]:
    told = [f"--{key}" for key in (f"run_dir={run_dir}", f"watchdog.step_s={STEP_LIMIT_S}", "checkpoint.save_every=1000")]
    command = [sys.executable, "-c", PROGRAM, how, str(stuck_rank), "--config", str(config), *told, *overrides]
    environment = runs.environment(config.parent) | {"PYTHONPATH": str(runs.ROOT)}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, cwd=config.parent
    )


def stacks_of(run_dir: pathlib.Path, rank: int) -> pathlib.Path:
    (path,) = (run_dir / "stacks").glob(f"*.{rank}.txt")
    assert path.parent.stat().st_mode & 0o077 == 0
    assert path.stat().st_mode & 0o777 == 0o600
    return path


def found_after_s(run_dir: pathlib.Path, rank: int) -> float:
    """Seconds from the last finished step to the stacks, by the clock of the processes."""
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return stacks_of(run_dir, rank).stat().st_mtime - last["time"]


@pytest.mark.slow
def test_a_deadlock_is_found_and_the_process_ends(config, tmp_path):
    process = start(config, "deadlocks", 0, tmp_path)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 75, errors
    line = errors.splitlines()[-1]
    pattern = r"\(pid \d+ on \S+\) stuck: in step \d for [4-6] s, waiting for its batch, above its limit of 4 s"
    assert re.match(pattern, line), errors
    assert f"(watchdog.step_s raises it); stacks of all threads: {stacks_of(tmp_path, 0)}" in line
    assert "in deadlocks" in stacks_of(tmp_path, 0).read_text()
    assert STEP_LIMIT_S <= found_after_s(tmp_path, 0) + 0.1 <= FOUND_S


@pytest.mark.long
def test_the_process_that_is_stuck_is_named_by_those_that_wait_for_it(config, tmp_path):
    together = ["--distributed.enabled=true", "--distributed.num_processes=2", "--mesh.num_cpu_devices=4"]
    together.append(f"--distributed.coordinator_address={runs.free_address()}")
    processes = [start(config, "sleeps", 1, tmp_path, *together, f"--distributed.process_id={rank}") for rank in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [75, 75], errors
    assert f"process 1 (pid {processes[1].pid} on " in errors[0].splitlines()[-1]
    assert "stuck: in step" in errors[0].splitlines()[-1]
    assert "waiting for its batch" in errors[0].splitlines()[-1]
    assert errors[1].splitlines()[-1].startswith(f"process 1 (pid {processes[1].pid} on ")
    assert "in sleeps" in stacks_of(tmp_path, 1).read_text()
    assert "jax/_src/array.py" in stacks_of(tmp_path, 0).read_text()
    assert found_after_s(tmp_path, 1) <= FOUND_S


@pytest.mark.slow
def test_sigabrt_leaves_the_stacks_of_a_process_that_holds_the_interpreter(config, tmp_path):
    process = start(config, "holds_the_interpreter", 0, tmp_path)
    runs.wait_until(lambda: runs.steps_on_record(tmp_path) > 0, [process])
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(3)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGABRT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGABRT, errors
    assert "in holds_the_interpreter" in stacks_of(tmp_path, 0).read_text()
