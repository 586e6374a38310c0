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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from llamajax.errors import DataError

ALIGNMENT = 64
"""Bytes that the arrays of a file start at multiples of."""


def digest(*parts: object) -> str:
    """SHA-256 of the parts, which must be JSON values, in order."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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
        DataError: the file cannot be read, or is not what was written.
    """
    try:
        # Not NumPy's memory map: that one keeps a file descriptor, of which a process may have only some hundreds.
        with pyarrow.memory_map(str(path)) as file:
            whole = np.frombuffer(file.read_buffer(), np.uint8)
        header_end = 8 + int.from_bytes(whole[:8].tobytes(), "little")
        header = json.loads(whole[8:header_end].tobytes())
        if len(whole) != header_end + header["size"]:
            raise ValueError("truncated")
    except OSError as error:
        raise DataError(f"data.cache_dir: {error}; run again, which makes again what is missing") from error
    except (ValueError, KeyError) as error:
        raise DataError(f"{path}: is damaged; delete {path.parent}, which will then be made again") from error
    arrays = {}
    for name, (dtype, shape, offset) in header["arrays"].items():
        start = header_end + offset
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = whole[start : start + count * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
    return arrays, header["info"]
