"""One life of the processes of this host: they start together and end together."""

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

_TICK_S = 0.25  # between looks at the heartbeats
_GRACE_S = 1.75  # after the first one's end, in which others may end by themselves, in their own words
_OVERDUE_S = 1.0  # after its limit, in which a process may act on it by itself
_OTHERS_OVERDUE_S = 1.5  # after the limit of those that wait for another one, in which that one may show
_DUMP_S = 1.0  # in which a stuck process must have written its stacks
_DIES_S = 30.0  # in which a process that was killed ends
_GIVEN_UP_S = 300.0  # after which it is given up: what the system waits for may come back until then
_STOPPED_S = 2.0  # by which a look that comes later means that all stood still, and in which they may then say something


class Group:
    """The processes of this host, in sessions of their own: what the terminal sends reaches them through the launcher."""

    def __init__(self, program: Program, shown: Output, heartbeats: Path, address: str, bind_address: str | None) -> None:
        """Starts them.

        Args:
            program: what they run.
            shown: takes what they print; a single process has the launcher's own streams, and so its terminal.
            heartbeats: a directory for their heartbeats, in which nothing has a number for a name.
            address: `host:port` where they meet.
            bind_address: where process 0 listens; None: it finds out by itself.

        Raises:
            OSError: one cannot be started, or has no room for its heartbeat; those that were are killed.
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
        """Returns when all have ended: one that fails ends the others, a request to stop is passed on once."""
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
                    # Who has said nothing yet does not hear either: of SIGINT, Python would show where it was.
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
        """Waits for a process that does not die, says so, and gives it up at last."""
        assert child.killed is not None
        if not child.is_left:
            self._shown.say(f"process {child.rank} (pid {child.process.pid}) {LEFT}")
            child.is_left = True
        if now > child.killed + _GIVEN_UP_S:
            child.place, child.code = next(self._places), -signal.SIGKILL

    def _take_end(self, child: Child, signals: Signals, now: float) -> None:
        """Takes down what the end of a process means for the others."""
        child.place, child.is_left = next(self._places), False
        if self._is_training and signals.stop is None and self._end_at is None and self._was_told_to_stop(child):
            signals.ask(signal.SIGTERM)  # one that has met the others would have told them
        if self._is_training and signals.stop and child.code in (-signal.SIGTERM, -signals.stop):
            child.code = 0  # before it could hear; it had nothing to save
        if child.code and self._end_at is None:
            self._end_at = now + _GRACE_S

    def _was_told_to_stop(self, child: Child) -> bool:
        """Whether somebody has stopped a process alone, by SIGTERM before it could hear or before it had met the others.

        Where there are other hosts, what it did not hear lets all start again: nobody could tell theirs.
        """
        if child.last is None:
            return child.code == -signal.SIGTERM and self._is_alone
        return child.code == 0 and child.last.phase == "start" and child.last.deadline is not None

    def _abort_stuck(self, running: list[Child], now: float) -> None:
        """Ends those that are stuck: they are past their limit, or others ended because they waited for them."""
        if now < self._looks_at:
            return
        if self._end_at is None:
            late = [(child, child.late_s(now, self._start_s)) for child in running]
            overdue = [(child, late_s) for child, late_s in late if late_s is not None and late_s > _OVERDUE_S]
            # Those that wait for a stuck one are late at the same moment, or a little before.
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
    """Seconds that a process is left longer than others: while it makes a save count."""
    return heartbeat.COMMIT_S if not signals.kill and child.last is not None and child.last.commits else 0.0


def _passed_on(number: signal.Signals) -> signal.Signals:
    """What processes are sent: that the terminal is gone is no reason of their own."""
    return signal.SIGTERM if number == signal.SIGHUP else number
