"""Files and directories that appear complete or not at all, locks on them, and errors of disks."""

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

# Errors of file systems without locks; Linux's own file systems return ENOTSUPP for EOPNOTSUPP.
_ENOTSUPP = 524
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, _ENOTSUPP}

# Errors that may pass: a read that failed with one of them is tried again after each of the pauses.
_PASSING = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EAGAIN,
    errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN,  # Lustre: the server has evicted the client for a while
}  # fmt: skip
_PAUSES_S = (0.5, 2, 5)
FULL = {errno.ENOSPC, errno.EDQUOT}
"""Errors of a full disk."""

# Age in seconds at which an unfinished file of another host counts as abandoned.
_ABANDONED_S = 24 * 3600

T = TypeVar("T")


def _boot() -> str:
    """Returns an identifier of this host that changes when it restarts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


BOOT = _boot()
"""Identifier of this host: equal in all processes that share its kernel. Locks work among these on every file system."""
_HOST = f"{zlib.crc32(BOOT.encode()):08x}"


def keep_from_others() -> None:
    """Closes new files and directories of this process to users outside its group (0640, 0750), from now on."""
    os.umask(os.umask(0o077) | 0o027)


def make_folder(folder: Path, mode: int = 0o750) -> None:
    """Makes a directory and its missing parents, all with this mode less the umask; an existing directory stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent, mode)
        folder.mkdir(mode, exist_ok=True)


def names_in(folder: Path) -> list[str]:
    """Returns the present contents of a directory, as its server has them; nothing if the directory does not exist.

    Opening a directory asks the server, on NFS too. Looking up a name does not: NFS remembers for up to a minute that a name
    is missing, also the name of the directory itself, so its parents are opened too.
    """
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        if folder.parent != folder:
            names_in(folder.parent)
        return []


def files_below(folder: Path, *, follow_links: bool = False) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yields `folder` and all directories below it, each with the names of its directories and of its files.

    Directories that the caller removes from their list are skipped. `follow_links` also enters directories through symbolic
    links.

    Raises:
        OSError: a directory cannot be listed, which `os.walk` would skip silently; one that does not exist has no names.
    """

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for parent, folders, names in os.walk(folder, onerror=failed, followlinks=follow_links):
        yield Path(parent), folders, names


def status(path: str | Path) -> os.stat_result | None:
    """Returns `os.stat` of a path; None if nothing exists there, or nothing that this user may look at.

    Raises:
        OSError: the disk fails, which `os.path.exists` would report as a missing file.
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
    """Returns whether nothing of this kind, such as `stat.S_ISREG`, exists at `path`. A failing disk counts as no: reading
    reports it, as an error that may pass."""
    try:
        return (found := status(path)) is None or not kind(found.st_mode)
    except OSError:
        return False


def matching(pattern: str) -> Iterator[str]:
    """Returns `pattern` if it is an existing path, or else the paths that match it, as `glob.glob` with `recursive` does.

    Raises:
        OSError: the disk fails, so that paths may be missing; `glob` would skip them silently.
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
    """Returns whether another attempt may succeed: the disk may recover without intervention, or somebody may free space."""
    return error.errno in _PASSING | FULL


def cannot_read(error: OSError, where: object, remedy: str) -> UserError:
    """Returns the error for a user's file that cannot be read: `DiskError` if the fault may pass, else `DataError`."""
    reason = error.strerror or str(error).splitlines()[0]  # some of pyarrow's errors have no number
    if may_pass(error):
        return DiskError(f"{where}: {reason}; check the disk and run the same command again")
    return DataError(f"{where}: {reason}; {remedy}")


def read_again(read: Callable[[], T]) -> T:
    """Calls `read` and returns its result; tries up to three more times if the disk fails in a way that may pass.

    Raises:
        OSError: the last attempt failed, or one failed in a way that does not pass.
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

    If the file system has no locks, or a separate lock for each host, nothing waits: several processes may then make the
    same files, each of them complete.

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
    """Removes unfinished files of processes that were killed while they held the lock.

    The lock may work only among the processes of one host (Lustre's `localflock`, NFS's `nolock`), and nothing shows that.
    Unfinished files of other hosts therefore stay for a day, by the clock of the file system.
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
    """Returns whether files in the folder can be locked; makes the folder if it does not exist."""
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
    """Writes a file as `file_made_whole` does. The caller holds the entry's lock."""
    with file_made_whole(path, keep=keep) as file:
        for chunk in chunks:
            file.write(chunk)


@contextlib.contextmanager
def file_made_whole(path: Path, *, keep: bool = False) -> Iterator[BinaryIO]:
    """Opens a file that gets the name `path` when the block ends, so that `path` is either complete or missing.

    With `keep`, a file that exists by then stays: without locks, another host may have made the same file and opened it, and
    NFS does not let it read a file that was replaced.
    """
    # A unique name, for file systems without locks.
    temporary = path.with_name(f"{path.name}.{_HOST}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not keep or not _link(temporary, path):
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # it must not keep a full disk full
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _link(temporary: Path, path: Path) -> bool:
    """Gives the file its name unless another file has it; returns False if the file system has no links."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        pass
    except OSError:
        return False
    temporary.unlink()
    return True


def keep(path: Path, content: bytes) -> None:
    """Writes `content` to a file that is alone in its folder, unless it has it already; takes the folder's lock."""
    with locked(path.parent):
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content)


def sync(path: Path) -> None:
    """Waits until the file or directory `path` is written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """Creates a directory that gets the name `out` when the block ends, or is removed if the block fails."""
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
