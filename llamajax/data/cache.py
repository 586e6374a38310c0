"""The cache on disk: entries addressed by what they are made from, that no kill leaves half written and no flipped bit
changes unseen.

An entry is a directory named by a hash of everything its files depend on. Every file is written under a temporary name,
flushed to the disk and renamed, so a file that is there is whole. Arrays carry checksums that are compared whenever a
part of them is read. A lock per entry lets one process write it while the others, of this run or of another, wait and
then read.
"""

import functools
import hashlib
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow

from llamajax.disk import may_pass, read_again, write_atomically
from llamajax.errors import DataError

ALIGNMENT = 64
"""Bytes that the arrays of a file start at multiples of."""
CHECKSUM_BYTES = 2**13
"""Bytes of an array that share a checksum: compared within some microseconds where a few of them are wanted."""

T = TypeVar("T")

_HEAD_AT = 8 + hashlib.sha256().digest_size


class DamagedError(DataError):
    """A file of the cache is gone, or is not what was written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}; run again, which makes it again")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type["DamagedError"], tuple[Path, str]]:
        """Pickled by its arguments, for it may be raised in another process than it is caught in."""
        return type(self), (self.path, self.reason)


def key_of(*parts: object) -> str:
    """SHA-256 of the parts, which must be JSON values, in order."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class CheckedArray:
    """A one-dimensional array in a memory-mapped file, of which slices are read: `array[start:end]`.

    Every block that a slice touches is compared with its checksum, each time: a disk may give back today what it did not
    yesterday.
    """

    def __init__(self, path: Path, content: np.ndarray, dtype: np.dtype, checksums: bytes) -> None:
        """Takes the bytes of an array as they lie in the file, uint8, and the CRC-32 of each of their blocks."""
        self.dtype = dtype
        self._path = path
        self._content = content
        self._checksums = np.frombuffer(checksums, "<u4")

    def __len__(self) -> int:
        return len(self._content) // self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        """The elements, read-only and not copied.

        Raises:
            DamagedError: they are not what was written.
        """
        first, end, step = part.indices(len(self))
        assert step == 1
        start, stop = first * self.dtype.itemsize, max(first, end) * self.dtype.itemsize
        content = self._content.data
        for at in range(start - start % CHECKSUM_BYTES, stop, CHECKSUM_BYTES):
            if zlib.crc32(content[at : at + CHECKSUM_BYTES]) != self._checksums[at // CHECKSUM_BYTES]:
                raise DamagedError(self._path, "is damaged")
        return self._content[start:stop].view(self.dtype)


@dataclass(frozen=True)
class ArrayFile:
    """A file of `write_arrays`."""

    arrays: dict[str, CheckedArray]
    info: dict[str, Any]
    sha256: str
    """Of what the head says of the arrays, with all checksums: it tells their contents apart without reading them."""


def write_arrays(path: Path, arrays: dict[str, np.ndarray], info: dict[str, Any], *, keep: bool = False) -> None:
    """Writes one-dimensional arrays and a few JSON values to one file, atomically; the same arrays give the same bytes.

    `keep` is for a file that was not there when the work began: see `write_atomically`.

    The file: the length of the head in 8 bytes, little-endian; the SHA-256 of the head; the head in JSON, with each
    array's dtype, length and place and the CRC-32 of its blocks; the arrays, each at a multiple of `ALIGNMENT`.
    """
    layout: dict[str, tuple[str, int, int, str]] = {}
    chunks: list[bytes | memoryview] = []
    size = 0
    for name, array in arrays.items():
        assert array.ndim == 1
        content = np.ascontiguousarray(array).view(np.uint8).data
        layout[name] = (array.dtype.str, len(array), size, _checksums(content).hex())
        padding = -array.nbytes % ALIGNMENT
        chunks += [content, bytes(padding)]
        size += array.nbytes + padding
    head = json.dumps({"arrays": layout, "size": size, "info": info}).encode()
    head += b" " * (-(_HEAD_AT + len(head)) % ALIGNMENT)
    write_atomically(path, len(head).to_bytes(8, "little"), hashlib.sha256(head).digest(), head, *chunks, keep=keep)


def _checksums(content: memoryview) -> bytes:
    blocks = (content[start : start + CHECKSUM_BYTES] for start in range(0, len(content), CHECKSUM_BYTES))
    return np.array([zlib.crc32(block) for block in blocks], "<u4").tobytes()


def read_arrays(path: Path) -> ArrayFile:
    """The arrays, memory-mapped, and the JSON values of a file of `write_arrays`; only its head is read and checked.

    Raises:
        DamagedError: the file is not there, or its head is not what was written.
        OSError: the disk fails, after several attempts.
    """

    def mapped() -> np.ndarray:
        # Not NumPy's memory map: that one keeps a file descriptor, of which a process may have only some hundreds.
        with pyarrow.memory_map(str(path)) as file:
            return np.frombuffer(file.read_buffer(), np.uint8)

    try:
        whole = read_again(mapped)
    except OSError as error:
        if error.errno is not None and may_pass(error):
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise DamagedError(path, error.strerror or str(error)) from error
    arrays_at = _HEAD_AT + int.from_bytes(whole[:8].tobytes(), "little")
    head, sha256 = whole[_HEAD_AT:arrays_at].tobytes(), whole[8:_HEAD_AT].tobytes()
    if hashlib.sha256(head).digest() != sha256:
        raise DamagedError(path, "is damaged")
    fields = json.loads(head)
    if len(whole) != arrays_at + fields["size"]:
        raise DamagedError(path, "is damaged")
    arrays = {}
    for name, (dtype_name, length, offset, checksums) in fields["arrays"].items():
        dtype = np.dtype(dtype_name)
        content = whole[arrays_at + offset : arrays_at + offset + length * dtype.itemsize]
        arrays[name] = CheckedArray(path, content, dtype, bytes.fromhex(checksums))
    return ArrayFile(arrays, fields["info"], hashlib.sha256(json.dumps(fields["arrays"]).encode()).hexdigest())


def repaired(read: Callable[[], T], remake: Callable[[Path], None], remade: set[Path] | None = None) -> T:
    """What `read` gives, after `remake` has made every damaged file again that either of them came upon.

    Raises:
        DamagedError: a file was damaged again, one of those in `remade` too.
    """
    remade = set() if remade is None else remade
    while True:
        try:
            return read()
        except DamagedError as error:
            damaged = error.path
            if damaged in remade:
                raise
        remade.add(damaged)
        repaired(functools.partial(remake, damaged), remake, remade)


def write_hashed(path: Path, content: bytes) -> None:
    """Writes a file that others than this module read, and its hash beside it. The entry's lock must be held."""
    write_atomically(path, content)
    write_arrays(_hash_beside(path), {}, {"sha256": hashlib.sha256(content).hexdigest()})


def is_whole(path: Path) -> bool:
    """Whether a file of `write_hashed` is there and what was written."""
    try:
        return read_arrays(_hash_beside(path)).info["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    except (DamagedError, FileNotFoundError):
        return False


def _hash_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.hash")


def check_arrays(path: Path) -> None:
    """Reads the whole file of `write_arrays`; raises `DamagedError` if it is not what was written."""
    for array in read_arrays(path).arrays.values():
        for start in range(0, len(array), CHECKSUM_BYTES):  # elements, so a part of the file at a time
            array[start : start + CHECKSUM_BYTES]


def is_intact(path: Path) -> bool:
    """Whether the whole file of `write_arrays` is there, and is what was written."""
    try:
        check_arrays(path)
    except DamagedError:
        return False
    return True
