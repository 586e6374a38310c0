"""Addresses, ports and network interfaces of this machine at which the processes of a run meet."""

import contextlib
import fcntl
import ipaddress
import random
import socket
import struct
import sys

from llamajax.errors import EnvironmentMismatchError

LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_PORTS = range(20_000, 32_768)  # below the ports that the system assigns to outgoing connections


def host_and_port(address: str) -> tuple[str, int]:
    """Splits `host:port`.

    Raises:
        EnvironmentMismatchError: the text has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise EnvironmentMismatchError(f"distributed.coordinator_address: {address!r} must be host:port; correct it")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """Joins `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether only processes on the same machine can reach the host."""
    # Without resolving the machine's name, which may be loopback here and an address elsewhere.
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def bind_address_for(host: str, port: int) -> str:
    """Returns the only address at which process 0 must listen to be reachable at `host`.

    This is loopback if `host` is loopback, otherwise the address of `host` that this machine has. If it has none, as behind
    NAT, or resolves itself to loopback only, the result is every address, with a warning on stderr.
    """
    if is_loopback(host):
        return join(host.replace("localhost", LOOPBACK), port)
    if found := own_addresses(host):
        return join(found[0], port)
    print(
        f"warning    {host} does not resolve to an address of this machine that others can reach: process 0 listens on every"
        f" address, port {port}; name one with --interface of python -m llamajax.launch or JAX_COORDINATOR_BIND_ADDRESS",
        file=sys.stderr,
        flush=True,
    )
    return f"[::]:{port}"


def own_addresses(host: str) -> list[str]:
    """Returns the addresses of `host` that this machine has and others can reach, IPv4 first."""
    return [address for address in _resolved(host) if not is_loopback(address) and _is_own(address)]


def _resolved(host: str) -> list[str]:
    """Returns the addresses of a host, IPv4 first; none if its name is unknown."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [str(address[0]) for family, *_, address in sorted(found, key=lambda entry: entry[0])]
    return []


def _is_own(address: str) -> bool:
    """Returns whether this machine has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def interface_address(name: str) -> str:
    """Returns the address of a network interface, IPv4 if it has one.

    Raises:
        EnvironmentMismatchError: there is no such interface, or it has no address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            address, _, _, scope, _, of_interface = line.split()
            if of_interface == name and scope != "20":  # link-local addresses need their interface to be reachable
                return str(ipaddress.IPv6Address(int(address, 16)))
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise EnvironmentMismatchError(f"interface: {name!r} has no address here; choose one of {names}")


def own_address(host: str, port: int) -> str:
    """Returns the address of this machine from which it reaches a host."""
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    raise EnvironmentMismatchError(f"distributed.coordinator_address: {host} cannot be reached; check its network")


def free_port(host: str = LOOPBACK) -> int:
    """Returns a port of one of this machine's addresses on which no process listens."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise EnvironmentMismatchError(f"{host}: no port from {_PORTS.start} on is free; check what listens there")
