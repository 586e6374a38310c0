"""Connects the processes of a run: determines their number and addresses and makes the first connections."""

import os
import resource
import selectors
import socket
import sys
import time
from collections.abc import Sequence

from jax._src.clusters import ClusterEnv  # used by jax.distributed itself; there is no public equivalent

from llamajax.config.parallel import DistributedConfig
from llamajax.errors import EnvironmentMismatchError
from llamajax.processes.addresses import host_and_port
from llamajax.processes.link import LONGEST, Link, who_am_i

_HELLO_S = 2.0  # time limit for a new connection to identify itself
_REFUSING_S = 30.0  # time for another process to connect and learn why there is no run
_WAITING_S = 10.0  # time after which a process reports what it waits for
_FILES_FOR_ELSE = 256  # open files that process 0 may need besides connections


def receive_all(address: str, bind_address: str, num_processes: int, own_rank: int, timeout_s: float) -> list[Link]:
    """Returns connections to all other processes, on process 0, once all have connected.

    Raises:
        EnvironmentMismatchError: they do not connect in time, or process 0 cannot listen there or open enough files.
    """
    deadline = time.monotonic() + timeout_s
    says_at = time.monotonic() + _WAITING_S
    links: dict[int, Link] = {}
    try:
        listener = _listen_on(*host_and_port(bind_address))
    except OSError as error:
        raise EnvironmentMismatchError(
            f"distributed.coordinator_address: process 0 cannot listen on {bind_address}: {_reason(error)};"
            " choose another port, or give the address of the machine of process 0"
        ) from error
    # One connection of ours and one of jax's to every process: more than the default limit of 1,024 files on most systems.
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], 2 * num_processes + _FILES_FOR_ELSE
    if most != resource.RLIM_INFINITY and most < needed:
        line = f"distributed: process 0 of {num_processes} needs {needed} open files and may have {most}; raise the limit"
        line += " (ulimit -Hn)"
        _refuse(listener, num_processes, line)
        raise EnvironmentMismatchError(line)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(links) < num_processes - 1:
            missing = sorted(set(range(1, num_processes)) - links.keys())
            those = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {num_processes}"
            now = time.monotonic()
            if now > deadline:
                it = "them" if len(missing) > 1 else "it"
                remedy = f"start {it} with this address, or correct num_processes"
                line = f"distributed: {those} did not connect to {address} within {timeout_s} s; {remedy}"
                for link in links.values():
                    link.send({"failed": line})
                    link.close()
                raise EnvironmentMismatchError(line)
            if now > says_at:
                print(f"waiting    for {those} to connect to {address}", file=sys.stderr, flush=True)
                says_at = deadline + 1
            for key, _ in selector.select(min(says_at, deadline) - now + 0.01):
                if key.fileobj is listener:
                    link = _greet(listener, links, num_processes)
                    if link is not None:
                        links[link.rank] = link
                        selector.register(link, selectors.EVENT_READ, link)
                else:  # it has nothing to send, so it has ended
                    selector.unregister(key.fileobj)
                    key.data.close()
                    links = {rank: link for rank, link in links.items() if link is not key.data}
    for link in links.values():
        link.send({"go": who_am_i()})
    return list(links.values())


def _refuse(listener: socket.socket, num_processes: int, line: str) -> None:
    """Tells the others, one after the other, why there is no run; until all know, or no more connect for a while."""
    print(f"refused    {line}", file=sys.stderr, flush=True)  # now, because this process ends later
    told: dict[int, Link] = {}
    with listener:
        listener.settimeout(_REFUSING_S)
        while len(told) < num_processes - 1:
            try:
                link = _greet(listener, told, num_processes)
            except TimeoutError:
                return
            if link is not None:
                link.send({"failed": line})
                link.close()
                told[link.rank] = link


def _greet(listener: socket.socket, links: dict[int, Link], num_processes: int) -> Link | None:
    """Returns the new connection if it is from a missing process of this run; otherwise tells it the reason and closes
    it."""
    link = Link(listener.accept()[0])
    match link.receive(_HELLO_S):
        case [{"rank": int(rank), "of": int(of), "who": str(who)}] if of != num_processes or not 0 < rank < num_processes:
            reason = f"process {rank} of {of} ({who}) was started, but process 0 is one of {num_processes}; start all alike"
        case [{"rank": int(rank), "who": str(who)}] if rank in links:
            reason = f"process {rank} is connected already ({links[rank].who}); give {who} another process_id"
        case [{"rank": int(rank), "who": str(who)}]:
            link.rank, link.who, link.longest = rank, who, LONGEST
            return link
        case _:
            link.close()
            return None
    print(f"refused    {reason}", file=sys.stderr, flush=True)
    link.send({"failed": f"distributed: {reason}"})
    link.close()
    return None


def call_on_first(address: str, bind_address: str, num_processes: int, own_rank: int, timeout_s: float) -> list[Link]:
    """Returns the connection to process 0, on every other process, once all have connected.

    Raises:
        EnvironmentMismatchError: process 0 cannot be reached, or rejects this process.
    """
    deadline = time.monotonic() + timeout_s
    says_at = time.monotonic() + _WAITING_S
    while True:
        try:
            link = Link(socket.create_connection(host_and_port(address), timeout=5))
        except OSError as error:
            reason = _reason(error)
        else:
            link.longest = LONGEST
            link.send({"rank": own_rank, "of": num_processes, "who": who_am_i()})
            # Process 0 waits for the others as long as this one does, but from its own start.
            match link.receive(2 * timeout_s):
                case [{"go": str(who)}, *early]:
                    link.who, link.early = who, early
                    return [link]
                case [{"failed": str(line)}]:
                    link.close()
                    raise EnvironmentMismatchError(line)
            link.close()
            reason = "it closed the connection"
        if time.monotonic() > deadline:
            remedy = "start process 0 there, or correct distributed.coordinator_address"
            raise EnvironmentMismatchError(
                f"distributed: process {own_rank} cannot reach process 0 at {address}: {reason}, for {timeout_s} s; {remedy}"
            )
        if time.monotonic() > says_at:
            print(f"waiting    for process 0 at {address}: {reason}", file=sys.stderr, flush=True)
            says_at = deadline + 1
        time.sleep(0.1)


def find(config: DistributedConfig) -> tuple[str, int, int, Sequence[int] | None]:
    """Returns the coordinator's address, number of processes, rank and device ids; jax finds those that are not set.

    Raises:
        EnvironmentMismatchError: a value is not set and cannot be found.
    """

    def number(value: int | None, variable: str) -> int | None:
        text = os.environ.get(variable)
        if value is not None or text is None:
            return value
        if not text.isdecimal():
            raise EnvironmentMismatchError(f"{variable}={text!r} must be a number")
        return int(text)

    device_ids = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    try:
        address, num_processes, own_rank, local_device_ids = ClusterEnv.auto_detect_unset_distributed_params(
            config.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS"),
            number(config.num_processes, "LLAMAJAX_NUM_PROCESSES"),
            number(config.process_id, "LLAMAJAX_PROCESS_ID"),
            [int(text) for text in device_ids.split(",")] if device_ids else None,
            None,
            config.initialization_timeout_s,
        )
    except (ValueError, RuntimeError, KeyError) as error:
        raise EnvironmentMismatchError(f"distributed: jax cannot read the launcher's variables: {error}; {_SET}") from error
    if address is None or num_processes is None or own_rank is None:
        found = {"coordinator_address": address, "num_processes": num_processes, "process_id": own_rank}
        unset = ", ".join(name for name, value in found.items() if value is None)
        raise EnvironmentMismatchError(f"distributed: {unset} could not be found; {_SET}")
    if own_rank >= num_processes:
        raise EnvironmentMismatchError(
            f"distributed.process_id: {own_rank} must be below the number of processes, {num_processes}; correct it"
        )
    return address, num_processes, own_rank, local_device_ids


_SET = (
    "set distributed.coordinator_address, num_processes and process_id (or LLAMAJAX_NUM_PROCESSES and LLAMAJAX_PROCESS_ID),"
    " or start through Slurm or Open MPI"
)


def _reason(error: OSError) -> str:
    # create_server adds to the system's message; errors of the resolver have numbers below 0.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def _listen_on(host: str, port: int) -> socket.socket:
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    if host == "::" and not is_dual:
        host = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=is_dual)
