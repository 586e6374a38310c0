"""Files and directories that are there whole, or not at all; and locks on them."""

import contextlib
import errno
import fcntl
import fnmatch
import glob
import os
import re
import secrets
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from llamajax.errors import DataError, DiskError, UserError

# How file systems say that they have no locks; ENOTSUPP is what Linux's own ones let through for EOPNOTSUPP.
_ENOTSUPP = 524
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, _ENOTSUPP}

# What a disk or its server may get over: a read that failed with one of these is tried again after each of the pauses.
_PASSING = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EAGAIN,
    errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN,  # Lustre's, of a client that its server has shut out for a while
}  # fmt: skip
_PAUSES_S = (0.5, 2, 5)
FULL = {errno.ENOSPC, errno.EDQUOT}
"""How a disk says that nothing more fits on it."""

# Seconds after which an unfinished file of another host has no writer.
_ABANDONED_S = 24 * 3600

T = TypeVar("T")


def _boot() -> str:
    """Tells this host from all others, and from itself before it was started anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


BOOT = _boot()
"""Of this host: alike in all processes that share its kernel, whose locks hold among them on every file system."""
_HOST = f"{zlib.crc32(BOOT.encode()):08x}"


def keep_from_others() -> None:
    """From here on, files and directories that this process makes are closed to users outside its group (0640, 0750)."""
    os.umask(os.umask(0o077) | 0o027)


def make_folder(folder: Path, mode: int = 0o750) -> None:
    """Makes a directory if it is not there, and those above it that are missing, all with this mode less the umask.

    Raises:
        OSError: it cannot be made.
    """
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent, mode)
        folder.mkdir(mode, exist_ok=True)


def names_in(folder: Path) -> list[str]:
    """What the directory holds now, on its server; nothing where it is not there.

    To open a directory is to ask the server, on NFS too. To look a name up is not: that it is missing is remembered there
    for up to a minute, also of the directory's own name, which is why those above it are opened.
    """
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        if folder.parent != folder:
            names_in(folder.parent)
        return []


def files_below(folder: Path, *, follow_links: bool = False) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Every directory from `folder` on, with the names of directories, which may be taken out, and of files in it.

    `follow_links` also goes into directories that symbolic links name.

    Raises:
        OSError: one cannot be listed, which `os.walk` would leave out without a word; one that is not there has no names.
    """

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for parent, folders, names in os.walk(folder, onerror=failed, followlinks=follow_links):
        yield Path(parent), folders, names


def status(path: str | Path) -> os.stat_result | None:
    """What the system knows of the file or directory at `path`; None where there is none, or none that may be looked at.

    Raises:
        OSError: the disk fails, which `os.path.exists` would take for nothing there.
    """
    try:
        return os.stat(path)
    except ValueError:  # a path with a NUL in it
        return None
    except OSError as error:
        if may_pass(error):
            raise
        return None


def is_missing(path: str | Path, kind: Callable[[int], bool]) -> bool:
    """Whether nothing of this kind, such as `stat.S_ISREG`, is there. False where the disk fails: reading
    reports that, and it may pass."""
    try:
        return (found := status(path)) is None or not kind(found.st_mode)
    except OSError:
        return False


def matching(pattern: str) -> Iterator[str]:
    """What is at `pattern` taken for a path, or else the paths that match it, as `glob.glob` with `recursive` finds them.

    Raises:
        OSError: the disk fails, so that there may be more; `glob` would leave it out without a word.
    """
    return iter([pattern]) if status(pattern) is not None else _matching("", Path(pattern).parts)


def _matching(folder: str, parts: tuple[str, ...]) -> Iterator[str]:
    if not parts:
        yield from [folder] if folder else []
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        found = _all_below(folder, with_files=not rest)
    elif glob.has_magic(part):
        names = [name for name in _names(folder) if part.startswith(".") or not name.startswith(".")]
        found = (os.path.join(folder, name) for name in fnmatch.filter(names, part))
    else:
        path = os.path.join(folder, part)
        found = iter([path] if status(path) is not None or os.path.islink(path) else [])
    for path in found:
        yield from _matching(path, rest)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder or os.curdir)
    except OSError as error:
        _raise_if_it_may_pass(error)
        return []


def _all_below(folder: str, *, with_files: bool) -> Iterator[str]:
    walk = os.walk(folder or os.curdir, onerror=_raise_if_it_may_pass, followlinks=True)
    for parent, folders, names in walk:
        folders[:] = (name for name in folders if not name.startswith("."))
        here = parent if folder else parent.removeprefix(os.curdir).removeprefix(os.sep)
        yield here
        if with_files:
            yield from (os.path.join(here, name) for name in names if not name.startswith("."))


def _raise_if_it_may_pass(error: OSError) -> None:
    if may_pass(error):
        raise error


def may_pass(error: OSError) -> bool:
    """Whether the disk may get over it without a hand, or somebody may make room: what failed is worth another attempt."""
    return error.errno in _PASSING | FULL


def cannot_read(error: OSError, where: object, remedy: str) -> UserError:
    """What to raise where a file of the user's cannot be read: it is the disk's fault, which may pass, or the file's."""
    reason = error.strerror or str(error).splitlines()[0]  # pyarrow's have no number at times
    if may_pass(error):
        return DiskError(f"{where}: {reason}; see to the disk and run the same command again")
    return DataError(f"{where}: {reason}; {remedy}")


def read_again(read: Callable[[], T]) -> T:
    """What `read` returns; where the disk fails in a way that may pass, after up to three more attempts.

    Raises:
        OSError: the last one failed too, or in another way.
    """
    for pause_s in _PAUSES_S:
        try:
            return read()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
        time.sleep(pause_s)
    return read()


@contextlib.contextmanager
def locked(entry: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the entry's lock while the block runs; the kernel releases it when a process dies.

    Where the file system has no locks, or one for each host only, nobody waits: several processes may then make the same
    files, each of them whole.

    Yields:
        Whether the block may write; False only without `wait`, when another process has the lock.
    """
    make_folder(entry, 0o700)
    with (entry / "lock").open("ab") as lock:
        try:
            is_locked = flock(lock.fileno(), fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        if is_locked:
            _remove_leftovers(entry, lock.fileno())
        yield True


def _remove_leftovers(entry: Path, lock: int) -> None:
    """Removes what a process was writing when it was killed while it held the lock.

    The lock may hold among the processes of one host only (Lustre's `localflock`, NFS's `nolock`), which nobody can see.
    What another host has begun is therefore left to it for a day, by the clock of the file system.
    """
    if not (leftovers := list(entry.glob("*.tmp"))):
        return
    os.utime(lock)
    now = os.fstat(lock).st_mtime
    for leftover in leftovers:
        host = re.search(r"[.]([0-9a-f]{8})[.][0-9a-f]{8}[.]tmp$", leftover.name)
        with contextlib.suppress(FileNotFoundError):
            if host is None or host[1] == _HOST or now - leftover.stat().st_mtime > _ABANDONED_S:
                leftover.unlink()


def has_locks(folder: Path) -> bool:
    """Whether files in the folder, which is made if it is not there, can be locked."""
    make_folder(folder, 0o700)
    with (folder / "lock").open("ab") as lock:
        return flock(lock.fileno(), fcntl.LOCK_SH)


def flock(descriptor: int, operation: int) -> bool:
    """Locks the file; False if its file system has no locks.

    Raises:
        BlockingIOError: another process has the lock, and the operation does not wait.
    """
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def write_atomically(path: Path, *chunks: bytes | memoryview, keep: bool = False) -> None:
    """Writes a file as `file_made_whole` makes it. The entry's lock must be held."""
    with file_made_whole(path, keep=keep) as file:
        for chunk in chunks:
            file.write(chunk)


@contextlib.contextmanager
def file_made_whole(path: Path, *, keep: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which is, whatever happens, either whole or not there: at the end it gets the name `path`.

    With `keep`, one that is there by then stays: where locks do not help, another host may have made the same file, and have
    opened it, which NFS does not let it read any more once it is replaced.
    """
    # A name of its own, for file systems without locks.
    temporary = path.with_name(f"{path.name}.{_HOST}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not keep or not _link(temporary, path):
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk shall not be kept full
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _link(temporary: Path, path: Path) -> bool:
    """Gives the file its name, unless another has it; False where the file system has no links."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        pass
    except OSError:
        return False
    temporary.unlink()
    return True


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
