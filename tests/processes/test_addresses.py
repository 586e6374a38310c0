"""Tests of llamajax.processes.addresses: where process 0 listens, and nowhere else."""

import socket

import pytest

from llamajax.errors import EnvironmentMismatchError
from llamajax.processes import addresses
from llamajax.processes.addresses import bind_address_for


@pytest.fixture
def resolves(monkeypatch):
    """Makes every name of a host resolve to these addresses."""

    def to(*found: str) -> None:
        entries = [(socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in found]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)

    return to


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "127.0.0.1:9"), ("127.0.0.7", "127.0.0.7:9"), ("localhost", "127.0.0.1:9"), ("::1", "[::1]:9")],
)
def test_one_machine_is_not_reached_from_others(host, expected, capsys):
    assert bind_address_for(host, 9) == expected
    assert capsys.readouterr().err == ""


def test_several_machines_meet_at_the_one_address_that_their_name_for_it_has(resolves, monkeypatch, capsys):
    """Among those of other machines, and of this one's loopback, which Debian gives a machine's own name."""
    monkeypatch.setattr(addresses, "_is_own", lambda address: address in ("127.0.1.1", "10.1.0.5", "fd00::5"))
    resolves("fd00::5", "10.2.0.5", "127.0.1.1", "10.1.0.5")
    assert bind_address_for("node1", 9) == "10.1.0.5:9"
    resolves("fd00::5")
    assert bind_address_for("node1", 9) == "[fd00::5]:9"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("found", [(), ("127.0.1.1",), ("192.0.2.1",)])
def test_where_the_name_has_no_address_here_every_one_is_taken_and_told(resolves, capsys, found):
    resolves(*found)
    assert bind_address_for("node1", 9) == "[::]:9"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning    node1 does not resolve to an address of this machine that others can reach: process 0 listens on every"
    )


def test_own_addresses_are_known_by_binding_to_them():
    assert addresses._is_own("127.0.0.1")
    assert not addresses._is_own("192.0.2.1")  # RFC 5737: nobody's
    assert not addresses._is_own("2001:db8::1")  # RFC 3849


def test_an_interface_has_an_address_or_is_named_with_those_that_are_there():
    assert addresses.interface_address("lo") == "127.0.0.1"
    with pytest.raises(EnvironmentMismatchError, match=r"^interface: 'eth99' has no address here; choose one of .*lo"):
        addresses.interface_address("eth99")


def test_a_free_port_can_be_listened_on_and_is_not_given_away_by_the_system():
    port = addresses.free_port()
    assert 20_000 <= port < 32_768
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("address", ["node1", ":1", "node1:x", "node1:65536"])
def test_addresses_are_host_and_port(address):
    assert addresses.host_and_port("[fd00::5]:80") == ("fd00::5", 80)
    with pytest.raises(EnvironmentMismatchError, match="must be host:port"):
        addresses.host_and_port(address)
