"""Runs the processes of this host once: they start together and end together."""

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path

from llamajax.errors import TRY_AGAIN
from llamajax.launching import output
from llamajax.launching.child import LEFT, Child
from llamajax.launching.output import Output
from llamajax.launching.program import Program
from llamajax.launching.signals import Signals
from llamajax.processes import heartbeat

_TICK_S = 0.25  # between checks of the heartbeats
_GRACE_S = 1.75  # after the first process ends, time for the others to end themselves with their own messages
_OVERDUE_S = 1.0  # after its limit, time for a process to act on it itself
_OTHERS_OVERDUE_S = 1.5  # after the limit of processes that wait for another one, time for that one to exceed its own
_DUMP_S = 1.0  # time limit for a stuck process to write its stacks
_DIES_S = 30.0  # time in which a killed process should end
_GIVEN_UP_S = 300.0  # time after which a killed process is given up: the device or disk it waits for may recover until then
_STOPPED_S = 2.0  # a check that is later than this means that all were suspended; they may then take as long to report


class Group:
    """The processes of this host, in their own sessions: signals from the terminal reach them through the launcher."""

    def __init__(self, program: Program, shown: Output, heartbeats: Path, address: str, bind_address: str | None) -> None:
        """Starts the processes.

        Args:
            program: the program that they run.
            shown: takes their output; a single process has the launcher's own streams, and so its terminal.
            heartbeats: directory for their heartbeats, in which no other file has a number as its name.
            address: `host:port` where they meet.
            bind_address: address on which process 0 listens; None: it determines that itself.

        Raises:
            OSError: a process cannot be started, or there is no space for its heartbeat; started ones are killed.
        """
        self._start_s = program.start_s
        self._is_training = program.run_dir is not None
        self._end_at: float | None = None
        self._abort_at: dict[int, float] = {}
        self._looks_at = 0.0
        self._shown, self._is_alone = shown, program.hosts.count == 1
        self._places = itertools.count()
        self._followers = []
        self.children: list[Child] = []
        streams = None if program.num_processes == 1 else subprocess.PIPE
        try:
            for rank in program.ranks:
                heartbeat.prepare(heartbeats, rank)
                told = program.environment(rank, address, bind_address) | {heartbeat.VARIABLE: str(heartbeats)}
                process = subprocess.Popen(
                    program.command(),
                    env=os.environ | told,
                    stdin=None if program.num_processes == 1 else subprocess.DEVNULL,
                    stdout=streams,
                    stderr=streams,
                    start_new_session=True,
                )
                self.children.append(Child(rank=rank, process=process, heartbeats=heartbeats))
                if streams is not None:
                    self._followers += shown.follow(rank, process)
        except OSError:
            for child in self.children:
                child.kill()
                child.process.wait()
            raise

    def live(self, signals: Signals) -> None:
        """Returns when all have ended. One that fails ends the others; a request to stop is forwarded once."""
        is_told, looked = False, time.monotonic()
        while running := [child for child in self.children if child.runs]:
            signals.wait(_TICK_S)
            now = time.monotonic()
            if now - looked > _TICK_S + _STOPPED_S:
                self._looks_at = now + _STOPPED_S
            looked = now
            for child in running:
                if child.has_ended():
                    self._take_end(child, signals, now)
                elif child.killed is not None and now > child.killed + _DIES_S:
                    self._bear_with(child, now)
            running = [child for child in running if child.runs]
            if signals.kill:
                self._end_at = now
            elif signals.stop is not None and not is_told:
                is_told = True
                for child in running:
                    # A process that has not reported yet does not handle signals either: on SIGINT, Python would print a
                    # traceback.
                    is_deaf = self._is_training and child.last is None
                    child.signal(signal.SIGTERM if is_deaf else _passed_on(signals.stop))
            self._abort_stuck(running, now)
            for child in running:
                if child.rank in self._abort_at and now > self._abort_at[child.rank] + _DUMP_S:
                    child.kill()
                elif self._end_at is not None and now >= self._end_at + _more_s(child, signals) and not child.stuck:
                    child.is_ended = True
                    child.kill()
        output.wait_for(self._followers, timeout_s=1.0)

    def _bear_with(self, child: Child, now: float) -> None:
        """Waits for a process that does not die, reports it, and finally gives it up."""
        assert child.killed is not None
        if not child.is_left:
            self._shown.say(f"process {child.rank} (pid {child.process.pid}) {LEFT}")
            child.is_left = True
        if now > child.killed + _GIVEN_UP_S:
            child.place, child.code = next(self._places), -signal.SIGKILL

    def _take_end(self, child: Child, signals: Signals, now: float) -> None:
        """Records the end of a process and its consequences for the others."""
        child.place, child.is_left = next(self._places), False
        if self._is_training and signals.stop is None and self._end_at is None and self._was_told_to_stop(child):
            signals.ask(signal.SIGTERM)  # a process connected to the others would have told them
        if self._is_training and signals.stop and child.code in (-signal.SIGTERM, -signals.stop):
            child.code = 0  # ended before it handled signals; it had nothing to save
        if child.code and self._end_at is None:
            self._end_at = now + _GRACE_S

    def _was_told_to_stop(self, child: Child) -> bool:
        """Returns whether a user stopped only this process, by SIGTERM before it handled signals or was connected to the
        others.

        With other hosts, an unhandled SIGTERM makes all start again: the other hosts could not be told.
        """
        if child.last is None:
            return child.code == -signal.SIGTERM and self._is_alone
        return child.code == 0 and child.last.phase == "start" and child.last.deadline is not None

    def _abort_stuck(self, running: list[Child], now: float) -> None:
        """Ends stuck processes: those past their limit, or for which others have ended after waiting."""
        if now < self._looks_at:
            return
        if self._end_at is None:
            late = [(child, child.late_s(now, self._start_s)) for child in running]
            overdue = [(child, late_s) for child, late_s in late if late_s is not None and late_s > _OVERDUE_S]
            # Processes that wait for a stuck one are late at the same moment, or a little earlier.
            stuck = [child for child, _ in overdue if child.last is None or child.last.doing != heartbeat.WAITING]
            stuck = stuck or [child for child, late_s in overdue if late_s > _OTHERS_OVERDUE_S]
        else:
            lost = [child.ended_by for child in self.children if not child.runs and child.code == TRY_AGAIN]
            suspects = [child for child in running if child.rank in lost or child.is_suspect(now)] if lost else []
            stuck = [child for child in suspects if not child.stuck]
        for child in stuck:
            child.abort()
            self._abort_at[child.rank] = now
        if stuck and self._end_at is None:
            self._end_at = now + _GRACE_S


def _more_s(child: Child, signals: Signals) -> float:
    """Returns the additional seconds that a process gets while it commits a save."""
    return heartbeat.COMMIT_S if not signals.kill and child.last is not None and child.last.commits else 0.0


def _passed_on(number: signal.Signals) -> signal.Signals:
    """Returns the signal to forward: SIGTERM for SIGHUP, because the lost terminal is not that of the processes."""
    return signal.SIGTERM if number == signal.SIGHUP else number
