"""Checks a folder that a run writes to: room, rate, locks, and the clock of its file system."""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llamajax.diagnostics.findings import Finding
from llamajax.disk import FULL, flock
from llamajax.parallel.block_file import BlockFile, aligned
from llamajax.units import format_bytes

_TRIED_BYTES = 64 << 20
_LEAST_RATE = 100e6
"""Bytes per second below which a checkpoint of a small model takes minutes."""
_LEAST_ROOM = 2 * 2**30
_LEAST_INODES = 1000
_LEAST_SKEW_S = 2.0
_OF_ONE_HOST = {"nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock"}
"""Mount options with which locks hold among the processes of one host only, or not at all."""


def existing(folder: Path) -> Path:
    """Returns the folder, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def check_folder(
    name: str, folder: Path, needed_bytes: float = 0, wanted_bytes: float = 0, tried: set[int] | None = None
) -> Iterator[Finding]:
    """Checks a folder, or the nearest one above it that exists; leaves nothing in it.

    Args:
        name: setting that names it, or what it is for.
        folder: the folder.
        needed_bytes: room without which the run fails.
        wanted_bytes: room that the run takes in the end.
        tried: devices with a known rate, which is not measured again; the folder's is added.
    """
    check = f"disk {name}"
    try:
        place = existing(folder.expanduser().absolute())
    except (RuntimeError, FileNotFoundError) as error:  # this user has no home directory; the working directory is gone
        yield Finding(check, "fail", f"{folder}: {error}", "set HOME, or give absolute paths")
        return
    found = os.statvfs(place)
    free = found.f_frsize * found.f_bavail
    kind, options = mount_of(place, Path("/proc/self/mountinfo"))
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".llamajax-doctor-") as own:
            skew_s, is_locking, device = _skew_s(Path(own)), _is_locking(Path(own)), os.stat(own).st_dev
            size = 0 if tried and device in tried else min(_TRIED_BYTES, free // 2)
            written, read = _rates(Path(own), size) if size >= 1 << 20 else (0.0, 0.0)
    except OSError as error:
        remedy = "free space on it" if error.errno in FULL else "choose another folder, or change its owner or mode"
        yield Finding(check, "fail", f"{place}: {error.strerror}", remedy)
        return
    if tried is not None:
        tried.add(device)
    text = f"{format_bytes(free)} free on {kind} at {place}"
    if free < max(needed_bytes, _LEAST_ROOM):
        need = f"; a checkpoint takes {format_bytes(needed_bytes)}" if needed_bytes else ""
        status = "fail" if free < needed_bytes else "warn"
        yield Finding(check, status, text + need, "free space, or choose another disk")
    elif free < wanted_bytes:
        remedy = "free space, choose another disk, or lower checkpoint.keep_last"
        yield Finding(check, "warn", f"{text}; all checkpoints that are kept take {format_bytes(wanted_bytes)}", remedy)
    elif found.f_files > 0 and found.f_favail < _LEAST_INODES:
        yield Finding(check, "warn", f"{text}, but only {found.f_favail} more files", "remove small files")
    else:
        yield Finding(check, "ok", text)
    rate = f"writes {format_bytes(written)}/s, reads {format_bytes(read)}/s"
    if 0 < written < _LEAST_RATE:
        yield Finding(
            check, "warn", f"{rate}: checkpoints and caches will take long", "choose a local or a parallel file system"
        )
    elif written:
        yield Finding(check, "ok", rate)
    if not is_locking:
        remedy = "mount it with locks; until then, never start a run twice at the same time"
        yield Finding(check, "warn", f"{kind} has no file locks", remedy)
    elif of_one := sorted(_OF_ONE_HOST & options):
        remedy = "mount it with locks for all hosts (NFS: without nolock; Lustre: flock)"
        yield Finding(check, "warn", f"{kind} is mounted with {', '.join(of_one)}: locks hold on one host only", remedy)
    if abs(skew_s) > _LEAST_SKEW_S:
        text = f"the clock of {kind} is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this host's"
        yield Finding(check, "warn", text, "set both by the same time server: caches compare times of files")


def mount_of(place: Path, table: Path) -> tuple[str, set[str]]:
    """Returns the kind of the file system that a folder is on, such as `nfs4`, and its mount options.

    Args:
        place: the folder, absolute.
        table: mounts of this process, in the form of /proc/self/mountinfo.
    """
    best = ("", "an unknown file system", set[str]())
    for line in table.read_text().splitlines() if table.exists() else ():
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        kind, _, options = rest.split(" ", 2)
        if place.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind, {*fields.split()[5].split(","), *options.split(",")})
    return best[1], best[2]


def _rates(folder: Path, size: int) -> tuple[float, float]:
    """Returns the bytes per second of a write to the disk, and of a read from it, without the system's cache where the file
    system can do without."""
    data = aligned(size)
    data[:] = np.frombuffer(np.random.default_rng(0).bytes(1 << 20) * (size >> 20), np.uint8)[
        :size
    ]  # zeros may be compressed
    file = BlockFile(folder)
    try:
        began = time.perf_counter()
        file.write(data, 0)
        os.fsync(file.file)
        wrote = time.perf_counter()
        file.read(size, 0)
        return size / (wrote - began), size / (time.perf_counter() - wrote)
    finally:
        os.close(file.read_file)
        os.close(file.file)


def _is_locking(folder: Path) -> bool:
    with (folder / "lock").open("ab") as lock:
        return flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _skew_s(folder: Path) -> float:
    """Returns the seconds by which the file system's clock is ahead of this host's."""
    path = folder / "time"
    began = time.time()
    path.write_text("now")
    return path.stat().st_mtime - (began + time.time()) / 2
