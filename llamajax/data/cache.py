"""The cache on disk: entries addressed by what they are made from, that no kill can leave half written.

An entry is a directory named by a hash of everything its files depend on. Every file is written under a temporary name,
flushed to the disk and renamed, so a file that is there is whole. A lock per entry lets one process write it while
the others, of this run or of another, wait and then read.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamajax.errors import DataError

ALIGNMENT = 64
"""Bytes that the arrays of a file start at multiples of."""
UNSETTLED_S = 2.0
"""Seconds after a change in which a file may change again without a new time stamp on a coarse clock."""

_HASH_BYTES = 2**20


def digest(*parts: object) -> str:
    """SHA-256 of the parts, which must be JSON values, in order."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def file_identity(path: Path) -> tuple[str, int, int, int, int]:
    """What changes when a file is changed or replaced: cheap to ask, unlike its content."""
    status = path.stat()
    return str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def content_hash(files: Sequence[Path], cache_dir: Path) -> str:
    """SHA-256 over the content of `files`; files that have not changed since the last time are not read again."""
    identities = [file_identity(path) for path in files]
    entry = cache_dir / "content" / digest(identities)
    known = entry / "sha256"
    if known.exists():
        return known.read_text()
    with locked(entry):
        if known.exists():
            return known.read_text()
        started = time.time()
        combined = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                combined.update(hashlib.file_digest(file, "sha256").digest())
        content = combined.hexdigest()
        # A file that was changed just now may be changed again within the same tick of the clock.
        newest_ns = max(max(mtime, ctime) for _, _, mtime, ctime, _ in identities)
        if newest_ns < (started - UNSETTLED_S) * 1e9:
            write_atomically(known, content.encode())
        return content


@contextlib.contextmanager
def locked(entry: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the entry's lock while the block runs; the kernel releases it when a process dies.

    Yields:
        Whether the lock is held; False only without `wait`, when another process has it.
    """
    entry.mkdir(parents=True, exist_ok=True)
    with (entry / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        for leftover in entry.glob("*.tmp"):  # of a process that was killed while it held the lock
            leftover.unlink()
        yield True


def write_atomically(path: Path, *chunks: bytes | memoryview) -> None:
    """Writes a file that is, whatever happens, either whole or not there. The entry's lock must be held."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_arrays(path: Path, arrays: dict[str, np.ndarray], info: dict[str, Any]) -> None:
    """Writes arrays and a few JSON values to one file, atomically; the same arrays give the same bytes.

    The file: the length of the header in 8 bytes, little-endian; the header in JSON, with each array's dtype, shape
    and place; the arrays, each at a multiple of `ALIGNMENT` after the header.
    """
    layout: dict[str, tuple[str, tuple[int, ...], int]] = {}
    chunks: list[bytes | memoryview] = []
    size = 0
    for name, array in arrays.items():
        layout[name] = (array.dtype.str, array.shape, size)
        padding = -array.nbytes % ALIGNMENT
        chunks += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, bytes(padding)]
        size += array.nbytes + padding
    header = json.dumps({"arrays": layout, "size": size, "info": info}).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    write_atomically(path, len(header).to_bytes(8, "little"), header, *chunks)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays, memory-mapped and read-only, and the JSON values of a file of `write_arrays`.

    Raises:
        DataError: the file is not what was written.
    """
    try:
        whole = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        header_end = 8 + int.from_bytes(whole[:8].tobytes(), "little")
        header = json.loads(whole[8:header_end].tobytes())
        if len(whole) != header_end + header["size"]:
            raise ValueError("truncated")
    except (ValueError, KeyError) as error:
        raise DataError(f"{path}: is damaged; delete {path.parent}, which will then be made again") from error
    arrays = {}
    for name, (dtype, shape, offset) in header["arrays"].items():
        start = header_end + offset
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = whole[start : start + count * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
    return arrays, header["info"]
