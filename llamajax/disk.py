"""Files and directories that are there whole, or not at all; and locks on them."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


@contextlib.contextmanager
def locked(entry: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the entry's lock while the block runs; the kernel releases it when a process dies.

    Where the file system has no locks nobody waits: several processes may then make the same files, each of them whole.

    Yields:
        Whether the block may write; False only without `wait`, when another process has the lock.
    """
    entry.mkdir(parents=True, exist_ok=True)
    with (entry / "lock").open("ab") as lock:
        try:
            is_locked = _flock(lock.fileno(), fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        for leftover in entry.glob("*.tmp") if is_locked else ():  # of a process that was killed while it held the lock
            leftover.unlink()
        yield True


def has_locks(folder: Path) -> bool:
    """Whether files in the folder, which is made if it is not there, can be locked."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        return _flock(lock.fileno(), fcntl.LOCK_SH)


def _flock(descriptor: int, operation: int) -> bool:
    """Locks the file; False if its file system has no locks."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def write_atomically(path: Path, *chunks: bytes | memoryview) -> None:
    """Writes a file that is, whatever happens, either whole or not there. The entry's lock must be held."""
    # A name of its own, for file systems without locks.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk shall not be kept full
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def keep(path: Path, content: bytes) -> None:
    """Makes sure that a file, alone in its folder, holds `content`; takes the folder's lock."""
    with locked(path.parent):
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content)


def sync(path: Path) -> None:
    """Waits until the file or directory `path` is on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """A directory to fill, which gets the name `out` at the end, or is removed if something goes wrong."""
    unfinished = out.absolute().with_name(f".{out.name}.{os.getpid()}.writing")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in unfinished.rglob("*"):
            sync(path)
        unfinished.rename(out)
        sync(unfinished.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
