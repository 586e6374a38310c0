"""How processes find each other: who does not come, or does not belong, is named to all who wait."""

import re
import socket
import subprocess
import sys
import threading

import pytest

from llamajax.errors import EnvironmentMismatchError
from llamajax.processes import addresses, rendezvous
from llamajax.processes.link import Link, line_of
from llamajax.processes.peers import Peers
from tests import runs
from tests.processes.joined import STARTED, WAIT, end, start


def test_who_does_not_come_is_named():
    """On either side, and to a process that came."""
    addresses = runs.free_addresses(2)
    first = start(0, addresses[0], WAIT, num_processes=3, join_within_s=2)
    alone = start(1, addresses[1], WAIT, join_within_s=1)
    expected = (
        f"distributed: process 1 of 3 did not connect to {addresses[0]} within 2 s; start it with this address, or correct"
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
    assert "but process 0 is one of 2; start all alike" in line
    second = start(1, address, "")
    assert end(second, 0) == ["joined [0, 1]"]
    assert end(first, 0) == ["joined [0, 1]", line.replace("distributed:", "refused   ")]


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


@pytest.mark.slow
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
