"""The cache on disk. Entries are addressed by what they are made from; killed processes leave no partial files, and flipped
bits are always noticed.

An entry is a directory named by a hash of everything that its files depend on. Every file is written under a temporary name,
flushed to the disk and renamed, so an existing file is complete. Arrays carry checksums that are verified whenever a part of
them is read. A lock per entry lets one process write it while other processes, of this run or another, wait and then read.
"""

import contextlib
import functools
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llamajax.data.file_array import close, read_part
from llamajax.disk import may_pass, read_again, write_atomically
from llamajax.errors import DataError

ALIGNMENT = 64
"""Alignment of the arrays in a file, in bytes."""
CHECKSUM_BYTES = 2**13
"""Number of bytes of an array per checksum: small enough to verify in microseconds when few of them are needed."""

T = TypeVar("T")

_HEAD_AT = 8 + hashlib.sha256().digest_size
_HEAD_BYTES = 2**16
"""Number of bytes read first, more than most heads have."""


class DamagedError(DataError):
    """A file of the cache is missing or is not what was written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}; run again to rebuild it")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type["DamagedError"], tuple[Path, str]]:
        """Pickles the arguments, because the error may be raised and caught in different processes."""
        return type(self), (self.path, self.reason)


def key_of(*parts: object) -> str:
    """Returns the SHA-256 of the parts, which must be JSON values, in order."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def hashes_to_array(hashes: Iterable[str]) -> np.ndarray:
    """Returns hexadecimal SHA-256 hashes as concatenated bytes, uint8 [32 * hashes], for `write_arrays`."""
    return np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8)


def hashes_of_array(array: np.ndarray) -> list[str]:
    """Returns the hashes in an array of `hashes_to_array`."""
    return [hashed.tobytes().hex() for hashed in array.reshape(-1, hashlib.sha256().digest_size)]


class CheckedArray:
    """A one-dimensional array in a file; slices are read on access: `array[start:end]`.

    Every block that a slice touches is verified by its checksum on every read, because a disk may return other data than
    before.
    """

    def __init__(self, path: Path, at: int, length: int, dtype: np.dtype, checksums: bytes) -> None:
        """Stores where the array is.

        Args:
            path: the file.
            at: byte of the file where the array begins.
            length: number of elements.
            dtype: dtype of the elements.
            checksums: CRC-32 of each block of `CHECKSUM_BYTES`.
        """
        self.dtype = dtype
        self._path, self._at, self._length = path, at, length
        self._checksums = np.frombuffer(checksums, "<u4")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        """Returns the elements, read-only.

        Raises:
            DamagedError: they are not what was written.
            OSError: the disk fails, after several attempts.
        """
        first, end, step = part.indices(len(self))
        assert step == 1
        start, stop = first * self.dtype.itemsize, max(first, end) * self.dtype.itemsize
        blocks = range(start // CHECKSUM_BYTES, -(-stop // CHECKSUM_BYTES))
        begin = blocks.start * CHECKSUM_BYTES
        end_of_blocks = min(blocks.stop * CHECKSUM_BYTES, self._length * self.dtype.itemsize)
        with _unless_gone(self._path):
            content = memoryview(read_part(self._path, self._at + begin, max(0, end_of_blocks - begin)))
        for at, block in enumerate(blocks):
            if zlib.crc32(content[at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES]) != self._checksums[block]:
                raise DamagedError(self._path, "is damaged")
        return np.frombuffer(content[start - begin : stop - begin], self.dtype)


@dataclass(frozen=True)
class ArrayFile:
    """A file of `write_arrays`."""

    arrays: dict[str, CheckedArray]
    info: dict[str, Any]
    sha256: str
    """Hash of the head's array layout and checksums, which identifies the arrays' contents without reading them."""


def write_arrays(path: Path, arrays: dict[str, np.ndarray], info: dict[str, Any], *, keep: bool = False) -> None:
    """Writes one-dimensional arrays and a few JSON values to one file, atomically; equal arrays give equal bytes.

    `keep` is for a file that did not exist when the work began: see `write_atomically`.

    File format: the length of the head in 8 bytes, little-endian; the SHA-256 of the head; the head in JSON, with each
    array's dtype, length and offset and the CRC-32 of its blocks; the arrays, each at a multiple of `ALIGNMENT`.
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
    """Opens a file of `write_arrays`: its arrays, which are read on access, and its JSON values.

    Only the head is read and verified.

    Raises:
        DamagedError: the file is missing, or its head is not what was written.
        OSError: the disk fails, after several attempts.
    """
    close(path)  # it may have been rebuilt
    with _unless_gone(path):
        begin = read_part(path, 0, _HEAD_BYTES)
        arrays_at = _HEAD_AT + int.from_bytes(begin[:8], "little")
        size = read_again(path.stat).st_size
        if arrays_at > size:
            raise DamagedError(path, "is damaged")
        head = (begin + read_part(path, len(begin), max(0, arrays_at - len(begin))))[:arrays_at]
    if hashlib.sha256(head[_HEAD_AT:]).digest() != head[8:_HEAD_AT]:
        raise DamagedError(path, "is damaged")
    fields = json.loads(head[_HEAD_AT:])
    if size != arrays_at + fields["size"]:
        raise DamagedError(path, "is damaged")
    arrays = {}
    for name, (dtype_name, length, offset, checksums) in fields["arrays"].items():
        arrays[name] = CheckedArray(path, arrays_at + offset, length, np.dtype(dtype_name), bytes.fromhex(checksums))
    return ArrayFile(arrays, fields["info"], hashlib.sha256(json.dumps(fields["arrays"]).encode()).hexdigest())


@contextlib.contextmanager
def _unless_gone(path: Path) -> Iterator[None]:
    """Turns an error of a file that must be rebuilt, unlike one of the disk, into `DamagedError`."""
    try:
        yield
    except OSError as error:
        if may_pass(error):
            raise
        raise DamagedError(path, error.strerror or str(error)) from error


def repaired(read: Callable[[], T], remake: Callable[[Path], None], remade: set[Path] | None = None) -> T:
    """Returns the result of `read`, after `remake` has rebuilt every damaged file that either of them found.

    Raises:
        DamagedError: a file was damaged again, also one of `remade`.
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
    """Writes a file that other modules read, and its hash beside it. The entry's lock must be held."""
    write_atomically(path, content)
    write_arrays(_hash_beside(path), {}, {"sha256": hashlib.sha256(content).hexdigest()})


def is_whole(path: Path) -> bool:
    """Returns whether a file of `write_hashed` exists and is what was written."""
    try:
        return read_arrays(_hash_beside(path)).info["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    except (DamagedError, FileNotFoundError):
        return False


def _hash_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.hash")


def check_arrays(path: Path) -> None:
    """Reads the whole file of `write_arrays`; raises `DamagedError` if it is not what was written."""
    for array in read_arrays(path).arrays.values():
        for start in range(0, len(array), CHECKSUM_BYTES):  # counts elements, so reads the file in parts
            array[start : start + CHECKSUM_BYTES]


def is_intact(path: Path) -> bool:
    """Returns whether the whole file of `write_arrays` exists and is what was written."""
    try:
        check_arrays(path)
    except DamagedError:
        return False
    return True
