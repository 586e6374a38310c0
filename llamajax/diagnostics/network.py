"""Checks the name of this host, the address where the processes of a run meet, and fast network ports."""

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from llamajax.diagnostics.findings import Finding
from llamajax.errors import EnvironmentMismatchError
from llamajax.launching.hosts import find_hosts
from llamajax.processes import addresses

_LIMIT_S = 5.0


def check_name(host: str | None = None) -> Iterator[Finding]:
    """Checks that this host's name, or another, has an address that others can reach."""
    name = host or socket.gethostname()
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        yield Finding(
            "host name",
            "warn",
            f"{name}: {error.strerror}",
            "add it to /etc/hosts or the name server, with the address of its network",
        )
        return
    reachable = sorted(address for address in found if not addresses.is_loopback(address))
    if reachable:
        yield Finding("host name", "ok", f"{name} is {', '.join(reachable)}")
    else:
        remedy = "for several hosts, correct /etc/hosts, or name the interface: llamajax launch --interface"
        yield Finding("host name", "warn", f"{name} is {', '.join(sorted(found))}, which other hosts cannot reach", remedy)


def check_meeting_place(told: str | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the coordinator's port: free if it is on this host, else reachable.

    Args:
        told: `distributed.coordinator_address` of the run; None: the launcher's.
        environment: variables of the launcher.
    """
    try:
        hosts = find_hosts(environment)
        address = told or environment.get("JAX_COORDINATOR_ADDRESS") or hosts.coordinator
        if not address:
            port = addresses.free_port()
            yield Finding("ports", "ok", f"processes of one host meet on a free port of loopback, such as {port}")
            return
        host, port = addresses.host_and_port(address)
    except EnvironmentMismatchError as error:
        problem, _, remedy = str(error).partition("; ")
        yield Finding("ports", "fail", problem, remedy or "correct the launcher's variables")
        return
    is_here = addresses.is_loopback(host) or bool(addresses.own_addresses(host))
    yield _port_here(host, port) if is_here else _port_there(host, port)


def _port_here(host: str, port: int) -> Finding:
    try:
        with socket.create_server(("", port)):
            pass
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Finding(
                "ports",
                "fail",
                f"port {port}, where processes meet, is taken",
                f"end the program on it (ss -ltnp 'sport = :{port}'), or choose another",
            )
        return Finding("ports", "fail", f"port {port}: {os.strerror(error.errno or 0)}", "choose a port above 1023")
    return Finding("ports", "ok", f"{addresses.join(host, port)} is here, and free")


def _port_there(host: str, port: int) -> Finding:
    where = addresses.join(host, port)
    try:
        with socket.create_connection((host, port), timeout=_LIMIT_S):
            return Finding("ports", "ok", f"{where} answers")
    except ConnectionRefusedError:
        return Finding("ports", "ok", f"{where} can be reached; no process listens there yet")
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return Finding(
            "ports", "fail", f"{where}: {reason}", "open the port in the firewall between the hosts, or correct the address"
        )


def check_fast_ports(root: Path = Path("/")) -> Iterator[Finding]:
    """Checks the ports of InfiniBand and RoCE adapters.

    Args:
        root: root of the file system.
    """
    up, down = [], []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        name = f"{port.parents[1].name}:{port.name}"
        state, rate = ((port / file).read_text().strip() for file in ("state", "rate"))
        (up if state.endswith("ACTIVE") else down).append(
            f"{name} {rate.partition(' (')[0]}" if state.endswith("ACTIVE") else name
        )
    if up:
        yield Finding("fast network", "ok", ", ".join(up))
    if down:
        remedy = "check the cable and the subnet manager, or leave the port out: NCCL_IB_HCA=^NAME"
        yield Finding("fast network", "warn", f"not active: {', '.join(down)}", remedy)
    if not up and not down:
        yield Finding("fast network", "ok", "no InfiniBand or RoCE adapter here: hosts would exchange data by TCP")


def has_fast_ports(root: Path = Path("/")) -> bool:
    """Returns whether the host has an InfiniBand or RoCE adapter."""
    return any((root / "sys/class/infiniband").glob("*"))
