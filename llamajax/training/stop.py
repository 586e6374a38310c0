"""Ends a run on SIGTERM or Ctrl-C, in all its processes after the same step."""

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Self

from llamajax.processes import peers
from llamajax.watch import console

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_SAME_S = 2.0  # signals within this time count as one: the launcher and the terminal may both send one


class StopSignal:
    """Ends the run with a checkpoint after the current step on SIGTERM or Ctrl-C; before the first step, ends it at once.

    A separate thread receives the signals, because the main thread may be in a native call for minutes. Whichever process
    gets the signal, all processes stop together.
    """

    def __init__(self, *, ends_process: bool = True) -> None:
        """Creates the handler, which does not handle signals yet.

        Args:
            ends_process: a signal that cannot wait for the end of a step ends the process. Otherwise it has the effect that
                it had before: in a notebook, Ctrl-C raises KeyboardInterrupt.
        """
        self._ends_process = ends_process
        self._waits_since: float | None = None
        self._count: float = -1  # calls of `requested`; -1 before the first step, infinite after the last
        self._stop_after: float = math.inf
        self._frozen = threading.Lock()

    def __enter__(self) -> Self:
        peers.can_stop(self)
        self._before = {}
        # Python lets only the main thread handle signals; a run in another thread is stopped by its owner.
        if threading.current_thread() is threading.main_thread():
            self._hears, self._wakes = socket.socketpair()
            self._wakes.setblocking(False)
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
            self._wakeup_before = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._hear, name="signals", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._wakes.close()
        peers.can_stop(None)

    @contextmanager
    def at_end_of_step(self) -> Iterator[None]:
        """Makes a signal wait for `requested` inside this context instead of ending the process."""
        with self._frozen:
            self._count = 0
        yield
        with self._frozen:
            self._count = math.inf

    def requested(self) -> bool:
        """Returns whether to stop now. All processes ask equally often and get the same answers; after a yes, every answer
        is yes."""
        with self._frozen:
            self._count += 1
            return self._count >= self._stop_after

    def freeze(self) -> float:
        """Returns how often `requested` was called, and blocks its next answer until `stop_after` is called."""
        self._frozen.acquire()
        return self._count

    def stop_after(self, count: float, why: str) -> None:
        """Makes `requested` return True from this call number on; with `peers.NOW`, ends the process."""
        if count == peers.NOW and not self._ends_process:  # `_handle` does it
            self._frozen.release()
            return
        if count == peers.NOW:
            phase = "before the first step; nothing was lost" if self._count < 0 else "after the last step, which is saved"
            if peers.rank() == 0:
                console.CONSOLE.print(f"stopped    by {why} {phase}", markup=False, soft_wrap=True)
            _end(0)
        self._stop_after = count
        self._frozen.release()

    def _hear(self) -> None:
        first = None
        while heard := self._hears.recv(1):
            if heard[0] not in SIGNALS:
                continue
            if first is None:
                first = time.monotonic()
                self._request(signal.Signals(heard[0]).name)
            elif time.monotonic() - first > _SAME_S and self._ends_process:  # the second signal does not wait
                _end(128 + heard[0])
        self._hears.close()

    def _handle(self, number: int, frame: object) -> None:
        """Handles a signal in the main thread: one that does not wait has the effect that it had before."""
        now = time.monotonic()
        if self._waits_since is None and self._count not in (-1, math.inf):
            self._waits_since = now
        elif not self._ends_process and now - (self._waits_since or -math.inf) > _SAME_S:
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)

    def _request(self, why: str) -> None:
        if (others := peers.current()) is not None:
            others.request_stop(why)
        else:
            count = self.freeze()
            self.stop_after(peers.NOW if count in (-1, math.inf) else count + 1, why)


def _end(code: int) -> NoReturn:
    """Ends the process without cleanup: XLA threads may be compiling, which the interpreter's own shutdown does not
    survive."""
    console.CONSOLE.show_cursor()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
