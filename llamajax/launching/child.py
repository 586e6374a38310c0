"""A process that the launcher started: its state and how it ended."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from llamajax.errors import DEVICE_ERROR, TRY_AGAIN
from llamajax.processes import heartbeat
from llamajax.processes.heartbeat import WAITING, Beat

LEFT = "cannot be killed: the system waits for a device or a disk"
"""State of a process that does not end although it was killed."""

_STALE_S = 2.0  # without a beat for longer, a process holds Python's lock or is suspended, unless the machine is overloaded
_MEANINGS = {
    2: "configuration",
    3: "data",
    4: "machine or processes",
    5: "out of device memory",
    6: "a device computes wrong results repeatedly",
    65: "checkpoints or run directory",
    DEVICE_ERROR: "a device or the network failed",
    70: "a defect in llamajax",
    74: "disk, or the store of a source",
    TRY_AGAIN: "lost another process, or was stuck",
    93: "gave up",
}
_OF_SIGNALS = {
    "SIGKILL": ", by a user or because memory ran out",
    "SIGBUS": ", because shared memory ran out, or a disk is full or failing",
}


@dataclass(kw_only=True)
class Child:
    """A process on this host."""

    rank: int
    process: subprocess.Popen[bytes]
    heartbeats: Path
    """Directory with the heartbeats of all processes."""
    started: float = field(default_factory=time.monotonic)
    place: int | None = None
    """Position in the order in which processes ended; None: it runs."""
    code: int = 0
    """Exit code, or minus the signal that ended it."""
    is_ended: bool = False
    """Whether the launcher ended it after others had ended."""
    stuck: str = ""
    """Activity in which it was stuck; empty if it was not."""
    killed: float | None = None
    """When it was first killed, or None."""
    is_left: bool = False
    """Whether it still exists although it was killed long ago."""
    last: Beat | None = None
    """Its last report."""

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.place is None

    @property
    def ended_by(self) -> int | None:
        """Rank of the process because of which it ended, or None."""
        return None if self.last is None else self.last.ended_by

    @property
    def waited(self) -> bool:
        """Whether it ended while only waiting for another process: past its limit, waiting for the devices."""
        is_late = bool(self.stuck) or self.code == TRY_AGAIN
        return is_late and self.last is not None and self.last.doing == WAITING

    @property
    def exit_code(self) -> int:
        """Exit code for the decision to restart: a process that was stuck or killed may succeed next time."""
        return TRY_AGAIN if self.stuck or self.code < 0 else self.code

    def has_ended(self) -> bool:
        """Checks whether the process has ended, and records how."""
        pid = self.process.pid
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.last = heartbeat.read(self.heartbeats, self.rank) or self.last
        if found is None:
            return False
        if found.si_status != 0:  # ends its children too; its process id is not reused until it is waited for
            self.kill()
        self.code = self.process.wait()
        return True

    def late_s(self, now: float, start_s: float | None) -> float | None:
        """Returns the seconds since its limit, negative before; None: it has no limit.

        Args:
            now: `time.monotonic()`.
            start_s: time limit for its first report; None: it need not report.
        """
        if self.last is not None:
            return None if self.last.deadline is None else now - self.last.deadline
        return None if start_s is None else now - self.started - start_s

    def is_suspect(self, now: float) -> bool:
        """Returns whether others may have waited for it in vain: it no longer beats, is past its limit, or is suspended."""
        if self.last is None:
            return self._is_stopped()
        is_late = self.last.deadline is not None and now > self.last.deadline
        return self.last.doing != WAITING and (is_late or now - self.last.beat > _STALE_S or self._is_stopped())

    def abort(self) -> None:
        """Makes a stuck process write the stacks of its threads, without running any of them, and end."""
        self.stuck = "stopped by a signal" if self._is_stopped() else self._was_doing()
        for number in (signal.SIGABRT, signal.SIGCONT):  # the second one for a suspended process
            self.signal(number)

    def signal(self, number: int) -> None:
        """Sends a signal to this process only."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kills the process and its children."""
        self.killed = self.killed or time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def _was_doing(self) -> str:
        if self.last is None:
            return "it has not reported what it does"
        return f"{self.last.doing or 'busy'}, in phase {self.last.phase} after step {self.last.step}"

    def how(self) -> str:
        """Describes how it ended."""
        if self.is_left:
            of_what = f"was stuck ({self.stuck}), and " if self.stuck else ""
            return of_what + LEFT
        if self.stuck:
            return f"was stuck: {self.stuck}"
        if self.code == TRY_AGAIN and self.last is not None and self.ended_by is None:
            return f"was stuck, and ended itself: {self._was_doing()}"
        if self.is_ended:
            return "was ended by the launcher"
        if self.code < 0:
            name = signal.Signals(-self.code).name
            return f"was ended by {name}{_OF_SIGNALS.get(name, '')}"
        meaning = f", {_MEANINGS[self.code]}" if self.code in _MEANINGS else ""
        return f"ended with exit code {self.code}{meaning}"
