"""Arrays in files; slices are read on access.

They are read, not memory-mapped. If a disk fails under a memory map, the kernel ends the process with SIGBUS, and nothing
reports which file it was. A read raises an error that names the file, and can be retried.
"""

import os
import resource
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np

from llamajax.disk import read_again
from llamajax.errors import DataError

MAX_OPEN = 128
"""Maximum number of files that stay open after a read, and at most an eighth of the process's limit of descriptors."""


class FileArray:
    """A one-dimensional array in a file; slices are read on access: `array[start:end]`. It holds no file descriptor."""

    def __init__(self, path: Path, dtype: np.dtype, length: int, at: int = 0) -> None:
        """Stores where the array is.

        Args:
            path: the file.
            dtype: dtype of the elements.
            length: number of elements.
            at: byte of the file where the first element begins.
        """
        self.path, self.dtype, self._length, self._at = path, dtype, length, at

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Size of the whole array in bytes."""
        return self._length * self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        """Returns the elements, read-only.

        Raises:
            DataError: the file has become shorter.
            OSError: the file cannot be read, after several attempts if the disk fails.
        """
        first, end, step = part.indices(self._length)
        assert step == 1
        size = max(0, end - first) * self.dtype.itemsize
        content = read_part(self.path, self._at + first * self.dtype.itemsize, size)
        if len(content) < size:
            raise DataError(f"{self.path}: changed while it was read; run again once it no longer changes")
        return np.frombuffer(content, self.dtype)


def read_part(path: Path, at: int, size: int) -> bytes:
    """Returns `size` bytes of the file from byte `at` on; fewer if the file ends earlier. The file may stay open.

    Raises:
        OSError: it cannot be read, after several attempts if the disk fails.
    """

    def read() -> bytes:
        try:
            descriptor = _open(path)
            pieces = [os.pread(descriptor.number, size, at)]  # at most 2 GiB at a time
            while pieces[-1] and (missing := size - sum(map(len, pieces))):
                pieces.append(os.pread(descriptor.number, missing, at + size - missing))
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        except OSError as error:
            close(path)  # reopen: a server may have replaced the file or been away
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error

    return read_again(read)


def close(path: Path) -> None:
    """Closes the file, so that the next read opens whatever file has this name then."""
    with _changing:
        _descriptors.pop(path, None)


class _Descriptor:
    """An open file, closed when nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(os.fspath(path), os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def _open(path: Path) -> _Descriptor:
    with _changing:
        if (descriptor := _descriptors.pop(path, None)) is None:
            while len(_descriptors) >= _most():
                _descriptors.popitem(last=False)
            descriptor = _Descriptor(path)
        _descriptors[path] = descriptor
        return descriptor


def _most() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_OPEN if limit == resource.RLIM_INFINITY else max(1, min(MAX_OPEN, limit // 8))


_changing = threading.Lock()
_descriptors: OrderedDict[Path, _Descriptor] = OrderedDict()
"""Open files by path, the most recently read last."""
