"""Ends a stuck process and writes down where it was stuck.

A thread checks the phases of the run (`llamajax.training.phases`). When a phase exceeds its limit, the stacks of all threads
go to a file, one line says what took too long, the other processes of the run are notified and write their stacks, and all
end with `TRY_AGAIN`. Processes that wait for the stuck one exceed their limits with it, so they let it report first. A
thread that waits for other processes to agree or to release a lock may take longer than its limit, by the longest limit of
what those processes may be doing, but not for ever, since each may wait for the others. While a run starts and loads, such
a wait has no limit.

A Python thread does not run while native code holds the interpreter, nor in a suspended process. In those cases the process
that reads the heartbeat from outside (`llamajax.launch`) sends SIGABRT, and the signal handler writes the stacks without the
interpreter. Nothing here ends such a process on its own clock: that would also end a process that its user has suspended and
means to continue.
"""

import contextlib
import faulthandler
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Self

from llamajax import disk
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.recovery import WatchdogConfig
from llamajax.data import progress
from llamajax.errors import TRY_AGAIN
from llamajax.processes import heartbeat, peers
from llamajax.processes.link import who_am_i
from llamajax.training.phases import SETTINGS, Phase, Phases
from llamajax.training.stop import StopSignal
from llamajax.watch import startup_time

_EVERY_S = 0.5  # between checks, at most
_GRACE_S = 1.5  # time in which a process that only waits lets another one report first
_STOPPED_S = 2.0  # a check that is later than this means that the whole process was suspended
_WRITE_S = 1.0  # time limit for writing stacks: the disk may be what is stuck
_END_S = 600.0  # time limit for ending a process: above jax's own limit of five minutes
_LAST_WORD_S = 8.0  # the process ends after this time, whatever keeps it from reporting the reason

_FOR_OTHERS = {
    inspect.unwrap(function).__code__
    for function in (peers.Peers.everyones, StopSignal.requested, disk.locked, Checkpointer._await_thread)
}  # functions in which a thread waits for something with limits of its own: other processes, or the commit thread
_TOGETHER = ("step", "save", "evaluate", "rollout")  # phases that other processes may be in during a step
_ARRAYS = "jax._src.array"  # module in which a thread waits for the value of an array
COMPILERS = ("jax._src.compiler", "jax._src.interpreters.mlir", "jax._src.interpreters.partial_eval")
"""Modules in which jax compiles, lowers and traces."""

_WORDS = {
    "start": "starting",
    "compile": "compiling",
    "load": "loading",
    "first step": "at its first step",
    "save": "saving a checkpoint",
    "evaluate": "evaluating",
    "rollout": "writing completions",
}


def process_ends(config: WatchdogConfig) -> None:
    """Marks that the process has only to end; the process that reads its heartbeat from outside enforces this."""
    if config.enabled:
        heartbeat.of_this_process().tell(phase="end", doing="", deadline=time.monotonic() + _END_S)


class Watchdog:
    """Watches the phases of one run; a context manager. Each thread reports its own phases."""

    def __init__(self, config: WatchdogConfig, run_dir: Path) -> None:
        """Creates the watchdog, which does not watch yet.

        Args:
            config: the limits.
            run_dir: directory of the run; its `stacks/` is created when there is something to write.
        """
        self._phases, self._own = Phases(config), threading.get_ident()
        self._stacks = run_dir.absolute() / "stacks"
        self._file: IO[str] | None = None
        self._step = 0
        self._signs = progress.signs()
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        # If something has enabled faulthandler already (pytest, python -X faulthandler), stacks are expected on stderr.
        self._has_handler = not faulthandler.is_enabled()
        if self._has_handler:
            with contextlib.suppress(ValueError, OSError):  # stderr is not a file
                faulthandler.enable()
        peers.before_end(self._leave_stacks)
        self.begin("start")
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()
        peers.before_end(None)
        if self._has_handler:
            faulthandler.disable()
        if self._file is not None:
            self._file.close()
            with contextlib.suppress(OSError):
                path = Path(self._file.name)
                if path.stat().st_size == 0:
                    path.unlink()
                self._stacks.rmdir()
        heartbeat.of_this_process().tell(phase="end", doing="", deadline=None)

    def begin(self, kind: str) -> None:
        """Starts the next phase of the run; `kind` is a key of `phases.SETTINGS`."""
        self._phases.begin(kind)
        if kind in startup_time.PHASES:
            startup_time.begin(kind)
        self._tell()

    @contextlib.contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Nests a phase in the current phase of this thread, and pauses the clock of the outer one."""
        with self._phases.within(kind):
            self._tell()
            yield
        self._tell()

    def finished(self, step: int) -> None:
        """Reports that this many steps are finished and starts the next step."""
        self._step = step
        self.begin("step")

    def other_steps(self) -> None:
        """Reports that later steps differ from earlier ones, for example in row length; the next step is the first of its
        kind."""
        self.begin("first step")
        self._phases.forget("step")

    def doing(self, what: str) -> None:
        """Notes what this thread does in its current phase; `heartbeat.WAITING` if another process may be the stuck one."""
        phase = self._phases.of(threading.get_ident())
        assert phase is not None
        phase.doing = what

    def keep_stacks(self) -> None:
        """Opens the file for stacks written on SIGABRT; called once this process owns the run directory."""
        with contextlib.suppress(OSError):  # stderr works as well
            for left_over in self._stacks.glob(f"*.{peers.rank()}.txt"):
                if left_over.stat().st_size == 0:
                    left_over.unlink()
            self._file = self._open_file()
            if self._has_handler:
                faulthandler.enable(self._file)

    def _open_file(self) -> IO[str]:
        self._stacks.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._stacks / f"{time.strftime('%Y%m%dT%H%M%S')}.{peers.rank()}.txt"
        return open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600))

    def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            pause = min(_EVERY_S, max(0.01, self._phases.deadline() - looked))
            if self._ended.wait(pause):
                return
            now = time.monotonic()
            if now - looked - pause > _STOPPED_S:
                self._phases.stand_still(now - looked - pause)
            looked = now
            self._look(now)
            self._tell()

    def _look(self, now: float) -> None:
        """Extends phases that progress, compile or wait for others, and handles those that exceed their limits."""
        if (signs := progress.signs()) != self._signs:
            self._signs = signs
            for _, phase in self._phases.running():
                if phase.kind in ("load", "save"):
                    phase.restart(now)
        for thread, phase in self._phases.running():
            if now < phase.deadline():
                continue
            frame = sys._current_frames().get(thread)
            if _is_in(_FOR_OTHERS, frame):
                self._wait_on(phase, now)
            elif _is_compiling(frame):
                phase.allow(self._phases.limit("compile"), SETTINGS["compile"])
            if now < phase.deadline():
                continue
            if peers.current() is not None and not phase.grace and _doing(phase, frame) == heartbeat.WAITING:
                phase.grace = _GRACE_S
            elif self._phases.of(thread) is phase and now >= phase.deadline():
                self._end(phase, _doing(phase, frame), now)

    def _wait_on(self, phase: Phase, now: float) -> None:
        """Extends a phase that waits for others by the time that they may take."""
        if phase.kind not in (*_TOGETHER, "first step"):
            phase.restart(now)
            return
        longest = max(_TOGETHER, key=self._phases.limit)
        phase.allow(self._phases.limit(phase.kind) + self._phases.limit(longest), SETTINGS[longest])

    def _tell(self) -> None:
        """Reports the current phase in the heartbeat while the run is watched; a save may still continue afterwards."""
        if self._ended.is_set():
            return
        phase, deadline = self._phases.of(self._own), self._phases.deadline()
        heartbeat.of_this_process().tell(
            phase="" if phase is None else phase.kind,
            doing="" if phase is None else _doing(phase, sys._current_frames().get(self._own)),
            step=self._step,
            deadline=None if deadline == math.inf else deadline,
        )

    def _end(self, phase: Phase, doing: str, now: float) -> None:
        """Ends the process because a phase takes too long."""
        threading.Thread(target=_end_after, args=(_LAST_WORD_S,), daemon=True).start()
        others = peers.current()
        if others is not None:
            others.give_way()  # an earlier reason from another process wins
        at = f"in step {self._step + 1}" if phase.kind == "step" else _WORDS[phase.kind]
        limit = f"above its limit of {phase.limit:.0f} s (watchdog.{phase.setting} raises it)"
        what = f"stuck: {at} for {phase.took(now):.0f} s{f', {doing}' if doing else ''}, {limit}"
        where = self._write_stacks(what)
        line = f"{what}; stacks of all threads: {where}"
        own = "" if others is None else f"process {peers.rank()} "
        _print(f"{own}({who_am_i()}) {line}")
        if others is not None:
            others.tell_failure(line, TRY_AGAIN, is_stuck=True)
        os._exit(TRY_AGAIN)

    def _leave_stacks(self, reason: str, *, is_stuck: bool) -> None:
        """Writes stacks before this process ends because of another that is stuck, or that died after a long wait here."""
        now = time.monotonic()
        if is_stuck or any(phase.took(now) > phase.limit / 2 for _, phase in self._phases.running()):
            self._write_stacks(reason)

    def _write_stacks(self, reason: str) -> str:
        """Writes the stacks of all threads and returns where they are."""
        names = "".join(f"Thread 0x{thread.ident:016x} is {thread.name}\n" for thread in threading.enumerate())
        written = ""

        def write() -> None:
            nonlocal written
            with contextlib.suppress(OSError):
                file = self._file or self._open_file()
                file.write(f"{reason}\n\n{names}\n")
                file.flush()
                faulthandler.dump_traceback(file)
                written = file.name

        with self._ending:
            _within(_WRITE_S, write)
            if not written:
                _within(_WRITE_S, lambda: faulthandler.dump_traceback(sys.stderr))
        return written or "above"


def _doing(phase: Phase, frame: FrameType | None) -> str:
    """Returns what a thread does: as noted, or as its stack shows."""
    if phase.doing or frame is None:
        return phase.doing
    if _is_compiling(frame):
        return "compiling"
    if frame.f_globals.get("__name__") == _ARRAYS or _is_in(_FOR_OTHERS, frame):
        return heartbeat.WAITING
    return ""


def _is_compiling(frame: FrameType | None) -> bool:
    """Returns whether jax traces or compiles on the stack, which any code with new shapes may trigger."""
    while frame is not None:
        if frame.f_globals.get("__name__") in COMPILERS:
            return True
        frame = frame.f_back
    return False


def _is_in(functions: set[object], frame: FrameType | None) -> bool:
    """Returns whether one of the functions is on the stack."""
    while frame is not None:
        if frame.f_code in functions:
            return True
        frame = frame.f_back
    return False


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Runs work that may block, and abandons it after `seconds`."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def _print(line: str) -> None:
    """Writes to stderr past Python's own buffers; a reader that does not read must not block the process."""

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())

    _within(_WRITE_S, write)


def _end_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(TRY_AGAIN)
