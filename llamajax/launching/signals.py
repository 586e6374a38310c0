"""Handles signals to the launcher: requests to stop, and children that ended."""

import select
import signal
import socket
import time
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_SAME_S = 2.0  # signals within this time count as one, as in llamajax.training.stop


class Signals:
    """Receives `SIGNALS`: the first asks to stop, a second one to end at once. Signals ignored at the start stay ignored."""

    def __init__(self) -> None:
        """Creates the handler; no signal has come."""
        self.stop: signal.Signals | None = None
        """The signal that asked to stop."""
        self.kill = False
        """Whether another signal came."""
        self._stopped_at = 0.0

    def __enter__(self) -> Self:
        self._hears, self._wakes = socket.socketpair()
        for end in (self._hears, self._wakes):
            end.setblocking(False)
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        for number in (*heard, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the launcher is ending, with the exit code of its processes
        signal.set_wakeup_fd(-1)
        self._hears.close()
        self._wakes.close()

    def ask(self, number: signal.Signals) -> None:
        """Asks to stop, as if the signal had come."""
        self.stop, self._stopped_at = number, time.monotonic()

    def wait(self, timeout_s: float) -> None:
        """Waits until a signal comes, including one for the end of a child, or the time is over."""
        if not select.select([self._hears], [], [], timeout_s)[0]:
            return
        for number in self._hears.recv(4096):
            if number not in SIGNALS:
                continue
            if self.stop is None:
                self.ask(signal.Signals(number))
            elif time.monotonic() - self._stopped_at > _SAME_S:
                self.kill = True
