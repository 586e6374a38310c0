"""One process writes a run: on file systems whose locks hold on one host only, too, and when it was stopped meanwhile."""

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import time

import pytest

from llamajax import disk
from llamajax.checkpoint import run_lock
from llamajax.checkpoint.run_lock import RunLock
from llamajax.checkpoint.write import Checkpointer
from llamajax.errors import CheckpointError
from tests.checkpoint.states import CONFIG, META, names_in, state_of, use_mesh


@pytest.fixture
def soon(monkeypatch):
    """Leases are short."""
    monkeypatch.setattr(run_lock, "_BEAT_S", 0.05)
    monkeypatch.setattr(run_lock, "_LEASE_S", 0.4)
    monkeypatch.setattr(run_lock, "_LOCKED_LEASE_S", 0.8)
    monkeypatch.setattr(run_lock, "_SETTLE_S", 0.1)


@pytest.fixture
def local_locks(monkeypatch):
    """A file system whose locks hold among the processes of one host only: none of this process's meet."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


def as_other_host(monkeypatch) -> None:
    """From here on, this process is on another host than it was."""
    monkeypatch.setattr(disk, "BOOT", "another boot")


def test_a_run_given_back_is_taken_at_once_by_any_host(tmp_path, monkeypatch, capfd):
    RunLock(tmp_path).release()
    as_other_host(monkeypatch)
    RunLock(tmp_path).release()
    assert capfd.readouterr().err == ""
    assert sorted(os.listdir(tmp_path)) == [".lock", ".owner"]


def test_a_stopped_process_learns_of_one_that_took_the_run_over_and_is_done(tmp_path, monkeypatch, soon, local_locks):
    monkeypatch.setattr(run_lock, "_BEAT_S", 600)
    first = RunLock(tmp_path)
    as_other_host(monkeypatch)
    RunLock(tmp_path).release()
    with pytest.raises(
        CheckpointError, match=r"process \d+ on \S+ has taken over this run while this process was suspended"
    ):
        first.check()
    first.release()


def test_a_process_of_another_host_that_lives_keeps_the_run(tmp_path, monkeypatch, soon, local_locks, capfd):
    first = RunLock(tmp_path)
    as_other_host(monkeypatch)
    with pytest.raises(CheckpointError, match=rf"{tmp_path} is being written by process {os.getpid()} on \S+; stop it"):
        RunLock(tmp_path)
    assert f"waiting    0.4 s for a sign of life of process {os.getpid()} on " in capfd.readouterr().err
    first.check()
    first.release()


def test_a_process_that_was_cut_off_commits_nothing(tmp_path, monkeypatch, soon, local_locks, capfd):
    """It is stopped while another host takes the run over, and goes on with a save of which all is written."""
    use_mesh()
    finish = Checkpointer._finish
    taken = []

    def taken_over_before(self, *args):
        monkeypatch.setattr(Checkpointer, "_finish", finish)
        taken.append(RunLock(tmp_path))
        finish(self, *args)

    told: list[str] = []
    first = Checkpointer(tmp_path, CONFIG, on_failure=told.append)
    first.save(1, state_of(1), META)
    first.wait()
    assert first._lock is not None
    first._lock._ending.set()  # its thread is stopped, and so are its signs of life
    first._lock._thread.join()
    as_other_host(monkeypatch)
    monkeypatch.setattr(Checkpointer, "_finish", taken_over_before)
    first.save(2, state_of(2), META)
    with pytest.raises(CheckpointError, match=r"has taken over this run while this process was suspended or cut off"):
        first.wait()
    assert (names_in(tmp_path), told) == (["1"], [])
    with pytest.raises(CheckpointError, match="has taken over this run"):
        first.save(3, state_of(3), META)
    first.close()
    taken[0].check()  # the newcomer's lease outlives the end of who was cut off
    taken[0].release()


def test_a_process_that_wakes_up_finds_another_in_its_place(tmp_path, monkeypatch, soon, local_locks):
    first = RunLock(tmp_path)
    content = (tmp_path / ".owner").read_bytes().replace(first.token.encode(), b"f" * 32)
    (tmp_path / ".owner").write_bytes(content)
    first._thread.join(timeout=30)
    assert not first._thread.is_alive()
    with pytest.raises(CheckpointError, match="has taken over this run"):
        first.check(anew=False)
    first.release()
    assert b"f" * 32 in (tmp_path / ".owner").read_bytes()


TAKE = """
import sys, time
from pathlib import Path
from llamajax.checkpoint import run_lock
lock = run_lock.RunLock(Path(sys.argv[1]))
print("taken", flush=True)
time.sleep(600)
"""


def test_a_killed_process_is_outwaited_by_other_hosts_only(tmp_path, monkeypatch, soon, capfd):
    for other_host in (False, True):
        with subprocess.Popen([sys.executable, "-c", TAKE, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "taken\n"
            writer.kill()
        with monkeypatch.context() as patch:
            if other_host:
                as_other_host(patch)
            RunLock(tmp_path).release()
        assert ("waiting    " in capfd.readouterr().err) == other_host


def test_a_process_that_ended_does_not_live_on_because_nobody_asked_what_became_of_it(tmp_path, soon):
    first = RunLock(tmp_path)
    first._ending.set()
    first._thread.join()
    first._file.close()
    with subprocess.Popen(["sleep", "600"]) as child:
        started = run_lock._started(child.pid)
        assert started is not None
        changed = dataclasses.replace(first._lease, pid=child.pid, started=started, token="another's")
        (tmp_path / ".owner").write_text(json.dumps(vars(changed)))
        with pytest.raises(CheckpointError, match=f"is being written by process {child.pid} on"):
            RunLock(tmp_path)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        RunLock(tmp_path).release()


def test_a_lock_that_outlives_its_host_is_outwaited(tmp_path, monkeypatch, soon):
    """As a server keeps it that does not know yet that a host is gone."""
    first = RunLock(tmp_path)
    first._ending.set()
    first._thread.join()
    as_other_host(monkeypatch)
    began = time.monotonic()
    RunLock(tmp_path).release()
    assert time.monotonic() - began >= run_lock._LOCKED_LEASE_S
    first._file.close()
