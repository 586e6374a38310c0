"""peers.py, link.py and stop.py: two real processes that fail, get lost and are stopped, in every role."""

import contextlib
import re
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from llamajax.processes.link import Link
from llamajax.processes.peers import Peers
from tests.processes import joined
from tests.processes.joined import WAIT, end, start_joined

NATIVE = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_process_ends_the_other_with_its_name(victim):
    processes = start_joined(WAIT)
    processes[victim].kill()
    (line,) = end(processes[1 - victim], 75)
    who = rf"process {victim} \(pid {processes[victim].pid} on .*\)"
    assert re.fullmatch(
        f"{who} ended without a message: killed, or its machine failed; check that machine, and start all again", line
    )
    end(processes[victim], -signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_stuck_process_ends_the_other_with_its_name(victim):
    processes = start_joined(WAIT, heartbeat_timeout_s=2)
    processes[victim].send_signal(signal.SIGSTOP)
    (line,) = end(processes[1 - victim], 75)
    assert line.startswith(f"process {victim} (pid {processes[victim].pid} on ")
    assert "gave no sign of life for 2 s (distributed.heartbeat_timeout_s); end the remaining processes" in line
    processes[victim].send_signal(signal.SIGCONT)
    (line,) = end(processes[victim], 75)
    assert line.startswith(f"process {1 - victim} (pid ")


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_what_ends_one_process_is_told_by_the_others(victim):
    processes = start_joined(f"if rank == {victim}: raise DataError('x.jsonl:2: bad; correct it')\n        {WAIT}")
    assert end(processes[victim], 3) == ["x.jsonl:2: bad; correct it"]
    (line,) = end(processes[1 - victim], 3)
    assert re.fullmatch(rf"process {victim} \(pid .*\) failed: x.jsonl:2: bad; correct it; start all again .*", line)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_what_nobody_catches_is_told_by_the_others(victim, monkeypatch):
    """As in a program of the user's own, whose last line is not ours."""
    program = joined.PROGRAM.replace(joined.PROGRAM.splitlines()[-1], "work()")
    monkeypatch.setattr(joined, "PROGRAM", program)
    processes = start_joined(f"if rank == {victim}: raise KeyError('no such column')\n        {WAIT}")
    *_, last = end(processes[victim], 1)
    assert last == "KeyError: 'no such column'"
    (line,) = end(processes[1 - victim], 1)
    assert re.fullmatch(rf"process {victim} \(pid .*\) failed: KeyError: 'no such column'; start all again .*", line)


def test_an_error_that_all_find_is_everyones_own():
    processes = start_joined("raise DataError('no text')")
    assert [end(process, 3) for process in processes] == [["no text"], ["no text"]]


def test_an_error_that_follows_from_anothers_is_not_told():
    """As a collective that breaks off: the process that fails first explains it."""
    processes = start_joined("if rank: raise DataError('no text')\n        raise RuntimeError('connection closed')")
    end(processes[1], 3)
    (line,) = end(processes[0], 3)
    assert "no text" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_all_stop_after_the_same_step(number):
    """Which step that is, they agree on: whichever process gets the signal, and however far ahead the other is."""
    steps = """
        with signals.at_end_of_step():
            step = 0
            while not signals.requested():
                step += 1
                if step % 10 == 0:  # in between, each goes at its own pace
                    peers.everyones(step)
        print(step)"""
    processes = start_joined(steps)
    processes[1].send_signal(number)
    first, second = (end(process, 0) for process in processes)
    assert first == second
    assert int(first[0]) > 0


@pytest.mark.parametrize("signalled", [0, pytest.param(1, marks=pytest.mark.long)])
def test_before_the_first_step_all_end_at_once(signalled):
    """Although every main thread is in a native call, as while XLA compiles or SentencePiece trains."""
    processes = start_joined(NATIVE)
    processes[signalled].terminate()
    assert end(processes[0], 0) == ["stopped    by SIGTERM before the first step; nothing was lost"]
    assert end(processes[1], 0) == []


@pytest.mark.slow
def test_processes_of_one_machine_listen_to_nobody_else():
    """Neither for the coordinator's clients nor for what devices send each other."""
    body = (
        "import os, jax, numpy as np; from jax.experimental import multihost_utils; from tests import runs;"
        "print(jax.devices()[0].platform, multihost_utils.process_allgather(np.ones(1)).sum(), flush=True);"
        "peers.everyones(1); print(runs.listening(os.getpid()), flush=True); peers.everyones(2)"
    )
    for process in start_joined(body):
        said = end(process, 0)
        assert "cpu 2.0" in said
        assert "{'127.0.0.1'}" in said


def test_output_that_cannot_be_written_at_the_end_is_told_to_the_others(tmp_path):
    """Who has printed everything would else take the first process for killed."""
    process_0 = "if rank == 0: sys.stdout = open('/dev/full', 'w'); print('all done')"
    processes = start_joined(f"{process_0}\n        if rank == 1: {WAIT}")
    assert end(processes[0], 74) == []
    (line,) = end(processes[1], 74)
    assert "failed: /dev/full cannot be written: No space left on device" in line


@pytest.mark.slow
def test_processes_that_are_stopped_together_go_on_together():
    """As by a scheduler that suspends a job, for longer than a process may be silent."""
    body = "time.sleep(8); print(peers.everyones(rank), flush=True)"
    processes = start_joined(body, heartbeat_timeout_s=2)
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    for process in processes:
        process.send_signal(signal.SIGCONT)
    assert [end(process, 0) for process in processes] == [["[0, 1]"]] * 2


def test_what_processes_tell_each_other_may_be_long():
    """A thousand of them tell everybody a thousand times as much as one of them says."""
    processes = start_joined("print(sum(map(len, peers.everyones('x' * 3_000_000))))")
    assert [end(process, 0) for process in processes] == [["6000000"]] * 2


@contextlib.contextmanager
def linked(heard_before_s: float = 0.0) -> Iterator[list[Peers]]:
    """Two ends that take each other for a process of the run; connected so long ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [Link(socket.create_connection(server.getsockname())), Link(server.accept()[0])]
    ends[0].rank = 1  # of the process at its other end
    for link in ends:
        link.heard -= heard_before_s
    both = [Peers(rank, [link], timeout_s=60) for rank, link in enumerate(ends)]
    try:
        yield both
    finally:
        for peers in both:
            peers.leave()


def test_who_came_long_before_the_last_one_is_not_lost():
    with linked(heard_before_s=1000) as (first, _):
        assert all(time.monotonic() - link.heard < 60 for link in first._links.values())


def test_the_newest_report_of_each_process_lies_at_the_first():
    with linked() as (first, second):
        first.report({"step": 10})
        for step in (10, 20):
            second.report({"step": step, "data": 0.25})
        deadline = time.monotonic() + 60
        while first.reports.get(1, {}).get("step") != 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert first.reports == {0: {"step": 10}, 1: {"step": 20, "data": 0.25}}
        assert second.reports == {}
