"""The heartbeat of every process: other processes on its host read it, even when the process can no longer respond.

The launcher names a private directory in `LLAMAJAX_HEARTBEAT`. Rank N (`LLAMAJAX_PROCESS_ID`) writes the file `N` there, in
place, with one write of a fixed size: whenever something changes, and every half second from a thread. If that thread cannot
run, the time of the last `beat` shows it.
"""

import contextlib
import functools
import json
import os
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

VARIABLE = "LLAMAJAX_HEARTBEAT"
"""Environment variable with the directory. If it is unset, nothing is written, because nobody reads."""
WAITING = "waiting for the devices"
"""Value of `doing` while a process waits for a result of the devices, and so perhaps for another process."""
EVERY_S = 0.5
"""Maximum number of seconds between beats."""
COMMIT_S = 60.0
"""Maximum number of seconds for which a process that commits a save does not end because of another one."""

_SIZE = 1024  # bytes
_LONGEST = 80  # characters of a text, of four bytes at most


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The state that a process reports. Times are `time.monotonic()`, one clock for all processes of a Linux host."""

    pid: int
    phase: str = "start"
    """Phase of the run: start, compile, load, step, save, evaluate."""
    doing: str = ""
    """Current activity in more detail, for people; `WAITING` if it may be waiting for another process."""
    step: int = 0
    """Number of finished optimizer steps."""
    deadline: float | None = None
    """When the process counts as stuck unless it has reported something else by then; None: never."""
    beat: float = 0.0
    """When this was written."""
    ended_by: int | None = None
    """Rank of the process because of which this process ends, or None."""
    commits: bool = False
    """Whether the process commits a save, and so does not end because of another."""


class Heartbeat:
    """Writes the beats of this process; without a directory, does nothing."""

    def __init__(self, directory: str | None, rank: int) -> None:
        """Starts to beat if `directory` is given."""
        self._beat = Beat(pid=os.getpid())
        self._changing = threading.Lock()
        self._file = None
        if directory is not None:
            with contextlib.suppress(OSError):  # the launcher has ended, so nobody reads
                self._file = os.open(f"{directory}/{rank}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._file is not None:
            self.tell()
            threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True).start()

    def tell(self, **changes: Any) -> None:
        """Reports changes of `phase`, `doing`, `step`, `deadline`, `ended_by` or `commits` of `Beat`; from any thread."""
        with self._changing:
            self._beat = replace(self._beat, **changes, beat=time.monotonic())
            if self._file is None:
                return
            short = {"phase": self._beat.phase[:_LONGEST], "doing": self._beat.doing[:_LONGEST]}
            text = json.dumps(asdict(self._beat) | short, ensure_ascii=False)
            with contextlib.suppress(OSError):  # a full disk does not end the run
                os.pwrite(self._file, text.encode(errors="replace").ljust(_SIZE), 0)

    def _keep_beating(self) -> None:
        while True:
            time.sleep(EVERY_S)
            self.tell()


def prepare(directory: Path, rank: int) -> None:
    """Allocates the disk space that the beats of a rank need.

    Raises:
        OSError: there is not enough space.
    """
    path = directory / str(rank)
    try:
        path.touch(0o600)
        path.write_bytes(b" " * _SIZE)
    except OSError as error:  # which does not always name the file
        raise OSError(error.errno, error.strerror, str(path)) from error


@functools.cache
def of_this_process() -> Heartbeat:
    """Returns the heartbeat of this process, which starts with the first call."""
    directory = os.environ.get(VARIABLE)
    return Heartbeat(directory, 0 if directory is None else int(os.environ["LLAMAJAX_PROCESS_ID"]))


def read(directory: str | Path, rank: int) -> Beat | None:
    """Returns the last beat of a rank; None if there is none, or it is being written right now."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        path = Path(directory, str(rank))
        if (content := path.read_bytes()) == path.read_bytes():
            return Beat(**json.loads(content))
    return None
