"""A file without a name on a local disk, with direct I/O and the space in it: where `activation_files` stores its values.

A killed process leaves nothing of it, and the disk has its space back.
"""

import bisect
import contextlib
import errno
import mmap
import os
import secrets
from pathlib import Path

import numpy as np

BLOCK = 4096
"""With O_DIRECT, addresses in memory, offsets in the file, and lengths are multiples of this."""
CHUNK = 8 << 20
"""Bytes per system call."""


class BlockFile:
    """A file for one thread that writes and one that reads; a third takes space in it and gives it back."""

    def __init__(self, folder: Path):
        """Opens a new file in a folder.

        Raises:
            OSError: no file can be opened there.
        """
        self.file, self.is_direct = _open(folder)
        self.read_file = os.dup(self.file)
        """A descriptor of its own for the thread that reads; each thread closes its own."""
        self.space = Space()
        self._staging = aligned(CHUNK)
        """Memory to write from where an array's own does not do."""
        self.is_staging = False
        """Whether the disk needs memory that is aligned to blocks, which arrays are not."""

    def write(self, data: np.ndarray, offset: int) -> None:
        """Writes bytes at an offset that `Space.take` returned.

        Raises:
            OSError: the disk failed, or is full.
        """
        for start in range(0, len(data), CHUNK):
            self._write_chunk(data[start : start + CHUNK], offset + start)

    def read(self, num_bytes: int, offset: int) -> np.ndarray:
        """Returns bytes that were written at an offset, uint8 [num_bytes].

        Raises:
            OSError: the disk failed.
        """
        data = aligned(padded(num_bytes))
        for start in range(0, len(data), CHUNK):
            self._read_chunk(data[start : start + CHUNK], offset + start)
        return data[:num_bytes]

    def _write_chunk(self, data: np.ndarray, offset: int) -> None:
        if not self.is_staging and len(data) % BLOCK == 0:
            try:
                self._write_all(data, offset)
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EFAULT):
                    raise
                self.is_staging = True
        np.copyto(self._staging[: len(data)], data)
        self._write_all(self._staging[: padded(len(data))], offset)

    def _write_all(self, data: np.ndarray, offset: int) -> None:
        while len(data):
            written = os.pwrite(self.file, data.data, offset)
            data, offset = data[written:], offset + written

    def _read_chunk(self, data: np.ndarray, offset: int) -> None:
        while len(data):
            read = os.preadv(self.read_file, [data.data], offset)
            if not read:
                raise OSError(errno.EIO, "the file is too short")
            data, offset = data[read:], offset + read


class Space:
    """The space of a file, in blocks: first fit among what was given back, otherwise at the end."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []
        """Start and end of each free extent, in order; no two touch."""

    def take(self, num_bytes: int) -> int:
        """Returns the offset of free blocks for so many bytes."""
        size = padded(num_bytes)
        for place, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[place : place + 1] = [(start + size, end)] if end - start > size else []
                return start
        self.end += size
        return self.end - size

    def give_back(self, start: int, num_bytes: int) -> None:
        """Frees the blocks of so many bytes."""
        size = padded(num_bytes)
        end, place = start + size, bisect.bisect(self._free, (start, 0))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            place, start = place - 1, self._free.pop(place - 1)[0]
        if size:
            self._free.insert(place, (start, end))


def padded(num_bytes: int) -> int:
    """Returns the bytes of the blocks that so many bytes take."""
    return -(-num_bytes // BLOCK) * BLOCK


def aligned(size: int) -> np.ndarray:
    """Returns bytes that start at a block, uint8 [size]: those of anonymous memory start at a page."""
    memory = mmap.mmap(-1, max(size, BLOCK))
    with contextlib.suppress(OSError):  # not every kernel has huge pages, which are filled a few times faster
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:size]


def _open(folder: Path) -> tuple[int, bool]:
    """Opens a file without a name; returns it, and whether it has direct I/O."""
    try:
        return _unnamed(folder, os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _unnamed(folder, 0), False


def _unnamed(folder: Path, flags: int) -> int:
    with contextlib.suppress(OSError):  # not every file system has O_TMPFILE; other errors come again
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    path = folder / f".llamajax-{secrets.token_hex(8)}"
    try:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | flags, 0o600)
    finally:
        path.unlink(missing_ok=True)
