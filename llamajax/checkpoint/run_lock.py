"""The run's directory is one: one process at a time writes it, and all processes of the run see the same."""

import errno
import fcntl
import os
import secrets
import socket
import time
from pathlib import Path
from typing import IO

import jax

from llamajax.checkpoint.steps import steps_in
from llamajax.errors import CheckpointError, EnvironmentMismatchError
from llamajax.parallel import meeting
from llamajax.parallel.processes import everyones
from llamajax.watch.console import say

# Seconds in which what one process writes must be seen by the others.
_SEEN_S = 5

# How file systems say that they have no locks; ENOTSUPP is what Linux's own ones let through for EOPNOTSUPP.
_ENOTSUPP = 524
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, _ENOTSUPP}


def lock_run(run_dir: Path) -> IO[str]:
    """The open, locked lock file of `run_dir`; the lock ends when it is closed, also by the end of the process.

    Raises:
        CheckpointError: another process has it.
        OSError: `run_dir` cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise CheckpointError(f"{run_dir} is being written by {holder}; stop that, or choose another run_dir") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            lock.close()
            raise
        say(f"{run_dir}: this file system has no locks; see to it that nothing else writes this run")
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def check_seen_by_all(directory: Path) -> None:
    """Compares what the processes of the run see in the directory of its checkpoints; all call this together.

    Raises:
        EnvironmentMismatchError: one does not see what process 0 does there.
    """
    if jax.process_count() == 1:
        return
    token = directory / f"{secrets.token_hex(8)}.seen"
    if jax.process_index() == 0:
        token.touch()
    name, steps, first = everyones((token.name, steps_in(directory), str(directory)))[0]
    deadline = time.monotonic() + _SEEN_S
    while not (seen := (directory / name).exists() and steps_in(directory) == steps):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    others = everyones(None if seen else f"{directory} ({meeting.who_am_i()})")
    if jax.process_index() == 0:
        token.unlink()
    for rank, other in enumerate(others):
        if other is not None:
            raise EnvironmentMismatchError(
                f"run_dir: process {rank} sees something else in {other} than process 0 in {first}; put it on"
                " a file system that all share, and give its absolute path"
            )
