"""Checks processors, memory, limits and the clock of this host."""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from llamajax.data.free_memory import free_memory
from llamajax.diagnostics.findings import Finding, run
from llamajax.units import format_bytes

_CPUS_PER_CARD = 4
"""Processors that a card's process needs for the loader, the launch of kernels and checkpoints."""
_LEAST_MEMORY = 2 * 2**30
_LEAST_SHARED = 2**30
_LEAST_FILES = 4096
_LIMIT_S = 5.0


def check_processors(num_cards: int, root: Path = Path("/")) -> Iterator[Finding]:
    """Checks how many processors this process may use, of those that the host has.

    Args:
        num_cards: number of cards of the host.
        root: root of the file system.
    """
    have, usable = os.cpu_count() or 1, float(len(os.sched_getaffinity(0)))
    quota = re.match(r"(\d+) (\d+)", _text(root / "sys/fs/cgroup/cpu.max"))
    if quota is not None:
        usable = min(usable, int(quota[1]) / int(quota[2]))
    text = f"{usable:g} of {have}"
    if usable < _CPUS_PER_CARD * num_cards:
        remedy = "raise srun --cpus-per-task, docker --cpus, or the pod's limits"
        yield Finding("processors", "warn", f"{text} for {num_cards} GPUs, which need {_CPUS_PER_CARD} each", remedy)
    else:
        yield Finding("processors", "ok", text)


def total_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of memory of this host."""
    found = re.search(r"^MemTotal: +(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def check_memory(root: Path = Path("/")) -> Iterator[Finding]:
    """Checks the free memory, within the limits of the container."""
    free, total = free_memory(root), total_memory(root)
    if free is None:
        yield Finding("host memory", "warn", "unknown: /proc/meminfo cannot be read", "mount /proc")
        return
    text = f"{format_bytes(free)} of {format_bytes(total)} free"
    is_low = free < _LEAST_MEMORY
    remedy = "end other programs, or raise the container's limit"
    yield Finding("host memory", "warn" if is_low else "ok", text, remedy if is_low else "")


def check_shared_memory(num_cards: int, folder: str = "/dev/shm") -> Iterator[Finding]:
    """Checks the shared memory, through which NCCL moves data between processes of a host.

    Args:
        num_cards: number of cards of the host.
        folder: where shared memory is mounted.
    """
    remedy = "start the container with --shm-size=8g, or --ipc=host"
    try:
        found = os.statvfs(folder)
    except OSError as error:
        yield Finding("shared memory", "fail" if num_cards > 1 else "warn", f"{folder}: {error.strerror}", remedy)
        return
    size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    text = f"{format_bytes(free)} of {format_bytes(size)} free in {folder}"
    is_low = num_cards > 1 and free < _LEAST_SHARED
    yield Finding("shared memory", "warn" if is_low else "ok", text, remedy if is_low else "")


def check_limits(*, locks_memory: bool, num_processes: int = 1) -> Iterator[Finding]:
    """Checks the limits of open files and locked memory.

    Args:
        locks_memory: whether InfiniBand or host memory for GPUs needs locked memory.
        num_processes: number of processes of the run, each of which process 0 has two connections to.
    """
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], max(_LEAST_FILES, 2 * num_processes + 256)
    if most != resource.RLIM_INFINITY and most < needed:
        remedy = f"ulimit -Hn {needed} as root, LimitNOFILE in the service, or docker --ulimit nofile={needed}"
        yield Finding("open files", "warn", f"at most {most:,}; {needed:,} are needed", remedy)
    else:
        yield Finding("open files", "ok", _limit(most, f"at most {most:,}"))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = _limit(locked, f"at most {format_bytes(locked)}")
    if locks_memory and locked != resource.RLIM_INFINITY:
        remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity in the service, or docker --ulimit memlock=-1"
        yield Finding("locked memory", "warn", f"{text}; InfiniBand and offloading need more", remedy)
    else:
        yield Finding("locked memory", "ok", text)


def check_clock() -> Iterator[Finding]:
    """Checks that a time server sets the clock, where the system tells."""
    outcome = run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], _LIMIT_S)
    if outcome.code == 0 and outcome.out.strip() in ("yes", "no"):
        is_set = outcome.out.strip() == "yes"
        text = f"{'' if is_set else 'not '}set by a time server"
        yield Finding("clock", "ok" if is_set else "warn", text, "" if is_set else "sudo timedatectl set-ntp true")
        return
    tracking = run(["chronyc", "-n", "tracking"], _LIMIT_S)
    if tracking.code == 0:
        yield check_tracking(tracking.out)
    else:
        yield Finding("clock", "ok", "neither timedatectl nor chronyc tells who sets it")


def check_tracking(text: str) -> Finding:
    """Returns the finding on what `chronyc tracking` prints."""
    state = re.search(r"^Leap status +: (.*)$", text, re.MULTILINE)
    offset = re.search(r"^System time +: ([0-9.]+) seconds (slow|fast)", text, re.MULTILINE)
    if state is None or state[1].strip() == "Not synchronised" or offset is None:
        return Finding("clock", "warn", "chrony has no time server", "name one in /etc/chrony.conf, then chronyc makestep")
    told = f"{float(offset[1]):.3f} s {offset[2]} of its time server"
    is_off = float(offset[1]) > 1
    return Finding("clock", "warn" if is_off else "ok", told, "sudo chronyc makestep" if is_off else "")


def _limit(value: int, text: str) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else text


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
