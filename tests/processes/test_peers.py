"""peers.py, rendezvous.py, link.py and stop.py: two real processes that fail, get lost and are stopped, in every role."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from llamajax.errors import EnvironmentMismatchError
from llamajax.processes import addresses, rendezvous
from llamajax.processes.link import Link, line_of
from llamajax.processes.peers import Peers
from tests import runs

PROGRAM = """
import hashlib, sys, threading, time
from llamajax.parallel import startup; from llamajax.processes import peers; from llamajax.training import stop
from llamajax.config.parallel import DistributedConfig
from llamajax.errors import DataError
from llamajax.processes.exit import end_process, exit_code

def work():
    with stop.StopSignal() as signals:
        startup.join_run(DistributedConfig(
            enabled=True, coordinator_address=sys.argv[1], num_processes=int(sys.argv[4]), process_id=rank,
            heartbeat_timeout_s=int(sys.argv[3]), initialization_timeout_s=int(sys.argv[5]),
        ))
        print("joined", peers.everyones(peers.rank()), flush=True)
        {body}

rank = int(sys.argv[2])
end_process(exit_code(work, memory_remedy="", disk="", disk_remedy=""), distributed=True)
"""
WAIT = "threading.Event().wait()"
NATIVE = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test():
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


def start(
    rank: int, address: str, body: str, *, heartbeat_timeout_s: int = 60, num_processes: int = 2, join_within_s: int = 60
) -> subprocess.Popen[str]:
    options = map(str, (rank, heartbeat_timeout_s, num_processes, join_within_s))
    command = [sys.executable, "-c", PROGRAM.replace("{body}", body), address, *options]
    STARTED.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return STARTED[-1]


def start_joined(body: str, **options: int) -> list[subprocess.Popen[str]]:
    address = runs.free_address()
    processes = [start(rank, address, body, **options) for rank in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined [0, 1]\n", process.communicate()
    return processes


def end(process: subprocess.Popen[str], code: int) -> list[str]:
    """What the process says on stdout and stderr until it ends, with the code it should end with."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    return [*output.splitlines(), *errors.splitlines()]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_with_its_name(victim):
    processes = start_joined(WAIT)
    processes[victim].kill()
    (line,) = end(processes[1 - victim], 75)
    who = rf"process {victim} \(pid {processes[victim].pid} on .*\)"
    assert re.fullmatch(f"{who} ended without a word: killed, or with its machine; see there, and start all again", line)
    end(processes[victim], -signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stuck_process_ends_the_other_with_its_name(victim):
    processes = start_joined(WAIT, heartbeat_timeout_s=2)
    processes[victim].send_signal(signal.SIGSTOP)
    (line,) = end(processes[1 - victim], 75)
    assert line.startswith(f"process {victim} (pid {processes[victim].pid} on ")
    assert "gave no sign of life for 2 s (distributed.heartbeat_timeout_s); end what is left" in line
    processes[victim].send_signal(signal.SIGCONT)
    (line,) = end(processes[victim], 75)
    assert line.startswith(f"process {1 - victim} (pid ")


@pytest.mark.parametrize("victim", [0, 1])
def test_what_ends_one_process_is_told_by_the_others(victim):
    processes = start_joined(f"if rank == {victim}: raise DataError('x.jsonl:2: bad; correct it')\n        {WAIT}")
    assert end(processes[victim], 3) == ["x.jsonl:2: bad; correct it"]
    (line,) = end(processes[1 - victim], 3)
    assert re.fullmatch(rf"process {victim} \(pid .*\) failed: x.jsonl:2: bad; correct it; start all again .*", line)


@pytest.mark.parametrize("victim", [0, 1])
def test_what_nobody_catches_is_told_by_the_others(victim, monkeypatch):
    """As in a program of the user's own, whose last line is not ours."""
    program = PROGRAM.replace(PROGRAM.splitlines()[-1], "work()")
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", program)
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


def test_who_does_not_come_is_named():
    """On either side, and to a process that came."""
    addresses = runs.free_addresses(2)
    first = start(0, addresses[0], WAIT, num_processes=3, join_within_s=2)
    alone = start(1, addresses[1], WAIT, join_within_s=1)
    expected = (
        f"distributed: process 1 of 3 did not come to {addresses[0]} within 2 s; start it with this address, or correct"
        " num_processes"
    )
    with pytest.raises(EnvironmentMismatchError, match=re.escape(expected)):
        rendezvous.call_on_first(addresses[0], "", 3, 2, 60)
    assert end(first, 4) == [expected]
    (line,) = end(alone, 4)
    assert f"process 1 cannot reach process 0 at {addresses[1]}: Connection refused, for 1 s; start process 0 there" in line


def test_addresses_that_cannot_be_are_named():
    with pytest.raises(EnvironmentMismatchError, match=r"process 1 cannot reach process 0 at nowhere\.invalid:1: \w"):
        rendezvous.call_on_first("nowhere.invalid:1", "", 2, 1, 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        in_use = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EnvironmentMismatchError, match=f"cannot listen on {in_use}: Address already in use; choose"):
            rendezvous.receive_all(in_use, in_use, 2, 0, 0)
    with pytest.raises(EnvironmentMismatchError, match="'node1' must be host:port"):
        addresses.host_and_port("node1")


def test_process_ids_and_numbers_that_cannot_be_are_refused():
    """A process that does not belong is told, as is process 0, and the others go on waiting for the one that does."""
    address = runs.free_address()
    first = start(0, address, "")
    (line,) = end(start(1, address, WAIT, num_processes=3), 4)
    assert "process 1 of 3 (pid " in line
    assert "but process 0 is of 2; start all alike" in line
    second = start(1, address, "")
    assert end(second, 0) == ["joined [0, 1]"]
    assert end(first, 0) == ["joined [0, 1]", line.replace("distributed:", "refused   ")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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


@pytest.mark.parametrize("signalled", [0, 1])
def test_before_the_first_step_all_end_at_once(signalled):
    """Although every main thread is in a native call, as while XLA compiles or SentencePiece trains."""
    processes = start_joined(NATIVE)
    processes[signalled].terminate()
    assert end(processes[0], 0) == ["stopped    by SIGTERM before the first step; nothing was lost"]
    assert end(processes[1], 0) == []


def test_the_coordinator_of_one_machine_cannot_be_reached_from_others():
    """A socket of all interfaces would answer at any address of this machine."""
    address = runs.free_address()
    host, port = address.split(":")
    process = start(0, address, WAIT, num_processes=1)
    assert process.stdout is not None
    assert process.stdout.readline() == "joined [0]\n"
    socket.create_connection((host, int(port))).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)))


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


def test_garbage_at_the_door_harms_nobody():
    address = runs.free_address()
    host, port = address.split(":")
    first = start(0, address, "")
    runs.wait_until(lambda: _knock(host, int(port), b"GET / HTTP/1.1\r\n\r\n"), [first])
    assert _knock(host, int(port), b'[{"rank": 1}]\n\xff\n')
    second = start(1, address, "")
    assert [end(process, 0) for process in (first, second)] == [["joined [0, 1]"]] * 2


def _knock(host: str, port: int, data: bytes) -> bool:
    try:
        with socket.create_connection((host, port)) as connection:
            connection.sendall(data)
    except ConnectionRefusedError:
        return False
    return True


def test_the_first_process_may_have_more_connections_than_a_process_has_files():
    address = runs.free_address()
    listen = (
        "import resource; from llamajax.processes import rendezvous;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]));"
        f"print(len(rendezvous.receive_all('{address}', '{address}', 101, 0, 60)))"
    )
    first = subprocess.Popen([sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True)
    STARTED.append(first)
    host, port = address.split(":")
    runs.wait_until(lambda: _knock(host, int(port), b""), [first])
    others = [socket.create_connection((host, int(port))) for _ in range(100)]
    for rank, other in enumerate(others, start=1):
        other.sendall(f'{{"rank": {rank}, "of": 101, "who": "{rank}"}}\n'.encode())
    output, _ = first.communicate(timeout=60)
    for other in others:
        other.close()
    assert output == "100\n"


def test_more_processes_than_the_first_may_have_connections_to_are_refused():
    """All of them at once, not after the minutes in which process 0 could come."""
    address = runs.free_address()
    limited = (
        "import resource; from llamajax.processes import rendezvous; rendezvous._REFUSING_S = 2;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300));"
        f"rendezvous.receive_all('{address}', '{address}', 101, 0, 60)"
    )
    first = subprocess.Popen([sys.executable, "-c", limited], stderr=subprocess.PIPE, text=True)
    STARTED.append(first)
    line = "distributed: process 0 of 101 needs 458 open files and may have 300; raise the limit (ulimit -Hn)"
    for rank in (1, 2):
        with pytest.raises(EnvironmentMismatchError, match=f"^{re.escape(line)}$"):
            rendezvous.call_on_first(address, "", 101, rank, 60)
    _, said = first.communicate(timeout=60)
    assert said.splitlines()[0] == f"refused    {line}"
    assert said.splitlines()[-1].endswith(f"EnvironmentMismatchError: {line}")


def test_what_comes_with_the_first_message_is_heard():
    """Process 0 may speak at once to one that has not run meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        called = []
        caller = threading.Thread(target=lambda: called.extend(rendezvous.call_on_first(address, "", 2, 1, 60)))
        caller.start()
        first = Link(server.accept()[0])
    first.send_line(line_of({"go": "pid 1 on here"}) + line_of({"freeze": True}))
    caller.join()
    said = first.receive()
    second = Peers(1, called, timeout_s=60)
    try:
        assert said is not None
        assert [message["rank"] for message in said] == [1]
        assert (first.receive() or [])[:1] == [{"count": -1}]
    finally:
        first.send({"leaving": True})
        second.leave()
        first.close()


def test_output_that_cannot_be_written_at_the_end_is_told_to_the_others(tmp_path):
    """Who has printed everything would else take the first process for killed."""
    process_0 = "if rank == 0: sys.stdout = open('/dev/full', 'w'); print('all done')"
    processes = start_joined(f"{process_0}\n        if rank == 1: {WAIT}")
    assert end(processes[0], 74) == []
    (line,) = end(processes[1], 74)
    assert "failed: /dev/full cannot be written: No space left on device" in line


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
    for end in ends:
        end.heard -= heard_before_s
    both = [Peers(rank, [end], timeout_s=60) for rank, end in enumerate(ends)]
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
