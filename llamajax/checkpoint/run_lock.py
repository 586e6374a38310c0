"""Ensures that one process at a time writes a run directory, and that all processes of the run see the same directory.

A lock (`.lock`) answers at once and ends with its process. But on Lustre with `localflock`, or NFS with `nolock`, it holds
only among the processes of one host, without saying so. So the writer of a run also keeps a lease, `.owner`: a file that it
changes every few seconds. Another host waits until the file has not changed for longer than that, measured by its own clock
alone. A process that was suspended or cut off meanwhile finds the other's token there before its next checkpoint, and
commits nothing.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import jax

from llamajax import disk
from llamajax.checkpoint.steps import steps_in
from llamajax.errors import CheckpointError, EnvironmentMismatchError
from llamajax.processes.link import who_am_i
from llamajax.processes.peers import everyones, of_first
from llamajax.watch.console import say, say_own

# Time in seconds within which other processes must see a write of one process (NFS may cache for 60), and after which they
# report that they wait.
_SEEN_S, _WAITING_S = 75, 5

# Seconds between changes of the lease, and seconds without a change after which another host may take over: without and with
# a lock still held. Servers keep the locks of a dead host, NFS for 90 s.
_BEAT_S, _LEASE_S, _LOCKED_LEASE_S = 3, 15, 120

# Time in seconds in which one of two processes that take over at the same moment finds the other's token.
_SETTLE_S = 1

_GIVEN_BACK = -1  # replaces the count of a lease: its process is done, and a process that lost the run to it must see that

_BYTES = 512  # constant size of the lease file


def _pid_namespace() -> str:
    """Returns an identifier of the namespace of process ids, which differs between containers."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Returns when the process with this id started, in ticks since boot; None if it does not exist or has ended."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in {"Z", "X"} else others[18]  # a zombie
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class _Lease:
    """A process as described by `.owner`."""

    token: str
    pid: int
    host: str
    boot: str
    pid_namespace: str
    started: str | None
    beat: int
    """Number of changes of the lease so far, or `_GIVEN_BACK`."""

    @property
    def who(self) -> str:
        """The process, for people."""
        return f"process {self.pid} on {self.host}"


class RunLock:
    """Exclusive right of this process to write the run, until `release` or the end of the process."""

    def __init__(self, run_dir: Path) -> None:
        """Takes the run. If a process on another host had it and may have been killed, waits at most 15 s, or two minutes if
        its lock still exists.

        Raises:
            CheckpointError: another process writes the run.
            OSError: `run_dir` cannot be written.
        """
        disk.make_folder(run_dir)
        self._run_dir, self._path = run_dir, run_dir / ".owner"
        token = secrets.token_hex(16)
        here = (os.getpid(), socket.gethostname()[:64], disk.BOOT, _pid_namespace(), _started(os.getpid()))
        self._lease = _Lease(token, *here, beat=0)
        self._taken_by: str | None = None
        self._ending = threading.Event()
        self._file = (run_dir / ".lock").open("a+")
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise
        self._thread = threading.Thread(target=self._keep, name="owner", daemon=True)
        self._thread.start()

    @property
    def token(self) -> str:
        """Token of this process and this lock, unique among all."""
        return self._lease.token

    def check(self, *, anew: bool = True) -> None:
        """Verifies that the run still belongs to this process.

        Args:
            anew: reads the lease; otherwise uses the result of the last read.

        Raises:
            CheckpointError: another process has taken over the run.
            OSError: the lease cannot be read.
        """
        if anew:
            self._look()
        if self._taken_by is not None:
            raise CheckpointError(
                f"{self._run_dir}: {self._taken_by} has taken over this run while this process was suspended or cut off"
                "; nothing has been committed since; leave the run to it, or stop it and run the same command again"
            )

    def release(self) -> None:
        """Releases the run; a second call does nothing."""
        if self._file.closed:
            return
        self._ending.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._look()
            if self._taken_by is None:
                self._lease = dataclasses.replace(self._lease, beat=_GIVEN_BACK)
                self._write(is_new=not self._path.exists())
        self._file.close()

    def _take(self) -> None:
        is_free = self._lock()
        found = self._read()
        ended = self._has_ended(found, is_free)
        if ended is None:
            assert found is not None
            self._outwait(found, is_free=is_free)
        elif not ended:
            self._refuse(found)
        try:
            self._write(is_new=found is None or not self._path.exists())
        except FileExistsError:  # another process was faster, where locks do not work
            self._refuse(self._read())
        if ended is None:
            time.sleep(_SETTLE_S)
            self._look()
            if self._taken_by is not None:
                self._refuse(self._read())

    def _lock(self) -> bool | None:
        """Tries to take the lock. Returns whether this process has it now; None if the file system has no locks."""
        try:
            is_locked = disk.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not is_locked:
            say(f"{self._run_dir}: this file system has no locks; make sure that nothing else writes this run")
        return is_locked or None

    def _has_ended(self, found: _Lease | None, is_free: bool | None) -> bool | None:
        """Returns whether the process that had the run has ended; None if only time can tell."""
        if found is None or found.beat == _GIVEN_BACK:
            return is_free is not False
        if found.boot != self._lease.boot:
            return None
        is_near = found.pid_namespace == self._lease.pid_namespace
        if is_near and found.started is not None and _started(found.pid) == found.started:
            return False
        return None if is_free is None and not is_near else is_free is not False

    def _outwait(self, found: _Lease, *, is_free: bool | None) -> None:
        """Returns once the process on another host that had the run has shown no sign of life for long enough."""
        limit_s = _LOCKED_LEASE_S if is_free is False else _LEASE_S
        say(f"waiting    {limit_s} s for a sign of life of {found.who}, which wrote {self._run_dir} last")
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            time.sleep(min(1, _BEAT_S))
            now = self._read()
            is_free_now = now is None or now.beat == _GIVEN_BACK
            if now != found and not is_free_now:
                self._refuse(now)
            if is_free_now or (is_free is False and self._lock()):
                return

    def _refuse(self, holder: _Lease | None) -> None:
        who = "another process" if holder is None else holder.who
        raise CheckpointError(f"{self._run_dir} is being written by {who}; stop it, or choose another run_dir")

    def _keep(self) -> None:
        """Changes the lease, in its own thread, until it belongs to another process."""
        while not self._ending.wait(_BEAT_S):
            with contextlib.suppress(OSError):  # the next attempt may succeed
                self._look()
                if self._taken_by is not None:
                    return
                self._lease = dataclasses.replace(self._lease, beat=self._lease.beat + 1)
                self._write(is_new=not self._path.exists())

    def _look(self) -> None:
        found = self._read()
        if found is not None and found.token != self.token:
            self._taken_by = found.who

    def _read(self) -> _Lease | None:
        """Returns the lease, or None. The file is opened each time, because only that makes NFS ask the server."""
        try:
            content = self._path.read_text()
        except FileNotFoundError:
            return None
        try:
            return _Lease(**json.loads(content))
        except (ValueError, TypeError):  # being written at this moment, or by another program
            return _Lease(content, 0, "another host", "", "", None, 0)

    def _write(self, *, is_new: bool) -> None:
        """Writes the lease in place: other hosts see a new file under an old name late."""
        descriptor = os.open(self._path, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if is_new else 0), 0o640)
        try:
            os.pwrite(descriptor, json.dumps(vars(self._lease)).encode().ljust(_BYTES), 0)
        finally:
            os.close(descriptor)


def check_seen_by_all(directory: Path) -> None:
    """Compares the view that the processes of the run have of the checkpoint directory. All call this together.

    Raises:
        EnvironmentMismatchError: a process does not see the same as process 0.
    """
    if jax.process_count() == 1:
        return
    token = directory / f"{secrets.token_hex(8)}.seen"
    if jax.process_index() == 0:
        token.touch()
    name, steps, first, boot = of_first((token.name, steps_in(directory), str(directory), disk.BOOT))
    # All processes of a machine share its cache of a file system.
    limit_s = _WAITING_S if boot == disk.BOOT else _SEEN_S
    began, is_told = time.monotonic(), False
    while not (seen := name in disk.names_in(directory) and steps_in(directory) == steps):
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            break
        if waited_s > _WAITING_S and not is_told:
            say_own(f"waiting    {limit_s} s to see in {directory} what process 0 sees")
            is_told = True
        time.sleep(0.1)
    others = everyones(None if seen else f"{directory} ({who_am_i()})")
    if jax.process_index() == 0:
        token.unlink()
    for rank, other in enumerate(others):
        if other is not None:
            raise EnvironmentMismatchError(
                f"run_dir: process {rank} sees different contents in {other} than process 0 in {first}; put it on"
                " a file system that all processes share, and give its absolute path"
            )
