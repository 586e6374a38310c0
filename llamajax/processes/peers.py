"""Runs several processes as one: they connect, learn at once when one fails or is lost, and agree on when to stop.

jax.distributed alone ends a process that misses another from C++, on its own clock, with a stack trace and SIGABRT. So every
process also keeps a connection to process 0, opened on the coordinator's port before jax listens there. This connection
carries the reason for a failure, periodic signs of life and the request to stop; when it closes, the process at its other
end has ended. jax itself talks to the coordinator through a relay in its own process, so that it does not notice first.
"""

import atexit
import contextlib
import math
import os
import selectors
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from llamajax.errors import TRY_AGAIN, EnvironmentMismatchError, without_passwords
from llamajax.processes import heartbeat
from llamajax.processes.link import Link, line_of, who_am_i

NOW = 0
"""Argument of `Stoppable.stop_after` that ends the process at once."""

_GRACE_S = 1.0  # time for a process to reach the same error itself before another's error ends it
_TELL_S = 5.0  # time limit for others to read a message
_STOPPED_S = 2.0  # a check that is later than this means that this process was suspended

_committing = threading.Lock()
_peers: "Peers | None" = None
_stoppable: "Stoppable | None" = None
_before_end: "BeforeEnd | None" = None


class Stoppable(Protocol):
    """Interface for stopping at an agreed moment: counts the moments at which it can stop, equally in every process."""

    def freeze(self) -> float:
        """Returns the number of such moments so far and holds it until `stop_after`; -1 if none will come soon."""
        ...

    def stop_after(self, count: float, why: str) -> None:
        """Stops at the moment of this number; with `NOW`, ends the process."""
        ...


class BeforeEnd(Protocol):
    """Work to do in this process before it ends because of another."""

    def __call__(self, reason: str, *, is_stuck: bool) -> object:
        """Takes the line with the reason, and whether the other process is stuck rather than dead."""
        ...


def current() -> "Peers | None":
    """Returns the other processes of this run, or None."""
    return _peers


def rank() -> int:
    """Returns the number of this process without initializing jax, which may take long."""
    return 0 if _peers is None else _peers.rank


def everyones(value: Any, about: str = "") -> list[Any]:
    """Returns the JSON `value` of every process, by rank. All call this together, however late, and get the same result.

    This is not a collective of the devices: the first time, those wait for each other for only half a minute. A thread other
    than the main one describes its values with `about`, so that they are not mixed with the main thread's.
    """
    return [value] if _peers is None else _peers.everyones(value, about)


def of_first(value: Any) -> Any:
    """Returns the JSON `value` of process 0 in every process. All call this together, however late; other values are
    ignored."""
    return everyones(value if rank() == 0 else None)[0]


def check_same_everywhere(own: Mapping[str, Any]) -> None:
    """Checks that all processes of the run have the same settings or data; all call this together.

    Raises:
        EnvironmentMismatchError: some differ; the message names them and the difference from process 0.
    """
    first = of_first(dict(own))
    differing_here = [key for key in {**first, **own} if key not in own or key not in first or own[key] != first[key]]
    for number, differing in enumerate(everyones(differing_here)):
        if differing:
            raise EnvironmentMismatchError(
                f"process {number} differs from process 0 in {', '.join(differing)}; give all processes the same"
                " configuration, code and data"
            )


def can_stop(stoppable: Stoppable | None) -> None:
    """Sets `stoppable` as the target of requests to stop, which stop every process at the same moment."""
    global _stoppable
    _stoppable = stoppable


def before_end(work: BeforeEnd | None) -> None:
    """Sets the work to do before this process ends because another one was lost or stuck."""
    global _before_end
    _before_end = work


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Keeps this process from ending because of another one inside the context; at most for a minute."""
    with _committing:
        heartbeat.of_this_process().tell(commits=True)
        try:
            yield
        finally:
            heartbeat.of_this_process().tell(commits=False)


def await_commit() -> bool:
    """Waits, before this process ends without cleanup, for `uninterrupted` work: at most a minute, and no more work can
    start.

    Returns whether the work is finished.
    """
    return _committing.acquire(timeout=heartbeat.COMMIT_S)


def meet(rank: int, links: Sequence[Link], timeout_s: float) -> None:
    """Registers the processes at the other ends of `links` as the processes of this run; see `Peers`."""
    global _peers
    _peers = Peers(rank, links, timeout_s)
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Tells the others that this process ends, with the reason if an exception was not caught: without this, jax's own
    shutdown would wait for them."""
    assert _peers is not None
    if (error := getattr(sys, "last_value", None)) is None:
        _peers.leave()
        return
    _peers.tell_failure(without_passwords(f"{type(error).__name__}: {error}"), 1)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(1)


@dataclass(frozen=True)
class _Failure:
    """A reason to end all processes, as it is sent."""

    failed: str
    """Line with the reason."""
    rank: int
    """Rank of the process that fails or is lost."""
    code: int
    """Exit code for all processes, so that their launchers decide alike on every host."""
    grace_s: float
    """Seconds in which the others may reach the same error themselves."""
    is_stuck: bool
    """Whether the process is stuck rather than dead."""


class Peers:
    """The other processes of a run: process 0 is connected to all of them, and each of them to process 0."""

    def __init__(self, rank: int, links: Sequence[Link], timeout_s: float) -> None:
        """Starts to listen to `links`; a process that sends nothing for `timeout_s` seconds is lost."""
        for link in links:  # the first to connect sent nothing until the last connected
            link.heard = time.monotonic()
        self.rank = rank
        self.reports: dict[int, Any] = {}
        """Newest report of each process by rank, on process 0."""
        self._links = {link.rank: link for link in links}
        self._timeout_s = timeout_s
        self._ending = threading.Event()
        self._last_word = threading.Lock()
        self._told: set[int] = set()
        self._all_told = threading.Event()
        self._rounds: Counter[str] = Counter()
        self._answers: dict[str, Future[list[Any]]] = {}
        self._heard: dict[str, dict[int, Any]] = {}
        self._hearing = threading.Lock()
        self._why_stop: str | None = None
        self._counts: dict[int, float] = {}
        self._counting = threading.RLock()
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    def give_way(self, within_s: float = 0.0) -> None:
        """Does not return if another process ends this one, or starts to within this many seconds."""
        if self._ending.wait(within_s):
            threading.Event().wait()

    def tell_failure(self, reason: str, code: int, *, is_stuck: bool = False) -> None:
        """Tells the others why this process is about to end, and returns when they have read it. Nothing may follow this
        message.

        The others end with its exit code, immediately if it `is_stuck`.
        """
        # Never released: from here on, the process ends with its own error, not with another's.
        self._last_word.acquire()
        if not self._ending.is_set():
            what = reason.splitlines()[0][:500]
            remedy = _remedy("; start all again when that is fixed", code)
            line = f"process {self.rank} ({who_am_i()}) failed: {what}{remedy}"
            self._to_others(asdict(_Failure(line, self.rank, code, 0 if is_stuck else _GRACE_S, is_stuck)))
            self._all_told.wait(_TELL_S)

    def everyones(self, value: Any, about: str) -> list[Any]:
        """See `everyones`."""
        self._rounds[about] += 1
        name = f"{about} {self._rounds[about]}"
        answer = self._answers[name] = Future()
        self._to_first({"value": value, "of_round": name})
        return answer.result()

    def report(self, values: Any) -> None:
        """Sends process 0 the JSON `values`, which replace the last report; waits for nothing."""
        self._to_first({"report": values})

    def leave(self) -> None:
        """Tells the others that this process will end and has done its part."""
        self._to_others({"leaving": True})

    def request_stop(self, why: str) -> None:
        """Asks all processes to agree on a moment to stop, and to stop there."""
        self._to_first({"stop": why})

    def _to_first(self, message: dict[str, Any]) -> None:
        if self.rank == 0:
            self._take(0, message)
        else:
            self._links[0].send(message)

    def _to_others(self, message: dict[str, Any], but: int | None = None) -> None:
        line = line_of(message)
        for rank, link in self._links.items():
            if rank != but:
                link.send_line(line)

    def _to_all(self, message: dict[str, Any]) -> None:
        self._to_others(message)
        self._take(self.rank, message)

    def _listen(self) -> None:
        interval = self._timeout_s / 10
        next_sign = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                selector.register(link, selectors.EVENT_READ, link)
                for message in link.early:
                    self._take(link.rank, message)
            while True:
                began = time.monotonic()
                ready = selector.select(interval)
                if (now := time.monotonic()) - began > interval + _STOPPED_S:  # all may have been suspended
                    for link in self._links.values():
                        link.heard = now
                for key, _ in ready:
                    messages = key.data.receive()
                    if messages is None:
                        selector.unregister(key.fileobj)
                        self._take(key.data.rank, {"told": True})  # or need not be
                        if not key.data.leaving:
                            how = "ended without a message: killed, or its machine failed"
                            self._lose(key.data, how, "; check that machine, and start all again", is_stuck=False)
                    for message in messages or ():
                        self._take(key.data.rank, message)
                if time.monotonic() >= next_sign:
                    next_sign = time.monotonic() + interval
                    self._to_others({"alive": True})
                    self._look_for_the_silent(time.monotonic())

    def _look_for_the_silent(self, now: float) -> None:
        for link in self._links.values():
            if not link.leaving and now - link.heard > self._timeout_s:
                how = f"gave no sign of life for {self._timeout_s} s (distributed.heartbeat_timeout_s)"
                self._lose(link, how, "; end the remaining processes, and start all again", is_stuck=True)

    def _take(self, sender: int, message: dict[str, Any]) -> None:
        match message:
            case {"failed": line, "rank": rank, "code": code, "grace_s": grace_s, "is_stuck": is_stuck}:
                self._links[sender].send({"told": True})
                self._end_with(_Failure(line, rank, code, grace_s, is_stuck), but=sender)
            case {"told": _}:
                self._told.add(sender)
                if self._told == self._links.keys():
                    self._all_told.set()
            case {"leaving": _}:
                self._links[sender].leaving = True
            case {"report": values}:
                self.reports[sender] = values
            case {"value": value, "of_round": name}:
                self._hear(name, sender, value)
            case {"values": values, "of_round": name}:
                self._answers.pop(name).set_result(values)
            case {"stop": why}:
                with self._counting:
                    if self._why_stop is None:
                        self._why_stop = why
                        self._to_all({"freeze": True})
            case {"freeze": _}:
                self._to_first({"count": -1 if _stoppable is None else _stoppable.freeze()})
            case {"count": count}:
                self._count(sender, count)
            case {"stop_after": count, "why": why}:
                if count == NOW and self.rank == 0:
                    _drain(self._links.values())
                if _stoppable is not None:  # else this process is ending already
                    _stoppable.stop_after(count, why)

    def _lose(self, link: Link, how: str, remedy: str, *, is_stuck: bool) -> None:
        if not self._ending.is_set():
            line = f"process {link.rank} ({link.who}) {how}{_remedy(remedy, TRY_AGAIN)}"
            self._end_with(_Failure(line, link.rank, TRY_AGAIN, 0, is_stuck), but=link.rank)

    def _end_with(self, failure: _Failure, *, but: int) -> None:
        """Ends this process because of another, unless it fails itself meanwhile; process 0 forwards to all others but
        one."""
        if self.rank == 0:
            self._to_others(asdict(failure), but=but)
        if not self._ending.is_set():
            self._ending.set()
            threading.Thread(target=self._end, args=(failure,), daemon=True).start()

    def _end(self, failure: _Failure) -> None:
        time.sleep(failure.grace_s)
        if failure.code == TRY_AGAIN and _before_end is not None:
            _before_end(failure.failed, is_stuck=failure.is_stuck)
        is_committed = await_commit()
        if not self._last_word.acquire(blocking=False):  # it ends with its own error, which it has reported
            if is_committed:
                _committing.release()
            return
        heartbeat.of_this_process().tell(ended_by=failure.rank)
        with contextlib.suppress(OSError):
            print(failure.failed, file=sys.stderr, flush=True)
        os._exit(failure.code)

    def _hear(self, name: str, rank: int, value: Any) -> None:
        """Takes one more value of a round of `everyones`, on process 0."""
        with self._hearing:
            values = self._heard.setdefault(name, {})
            values[rank] = value
            if len(values) <= len(self._links):
                return
            del self._heard[name]
        self._to_all({"values": [values[rank] for rank in range(len(values))], "of_round": name})

    def _count(self, rank: int, count: float) -> None:
        """Takes a count, on process 0: all stop at the first moment that none has passed; at once if none is working."""
        with self._counting:
            self._counts[rank] = count
            if len(self._counts) <= len(self._links):
                return
            fewest, most = min(self._counts.values()), max(self._counts.values())
            agreed = NOW if fewest == most and most in (-1, math.inf) else most + 1
            self._to_all({"stop_after": agreed, "why": self._why_stop})


def _drain(links: Iterable[Link]) -> None:
    """Reads until the others have ended: unread data at the end of a process may cost them their last messages."""
    deadline = time.monotonic() + _TELL_S
    for link in links:
        while link.receive(deadline - time.monotonic()) is not None:
            pass


def _remedy(text: str, code: int) -> str:
    """Returns the remedy for people; empty where a launcher, which reads heartbeats, starts all processes again."""
    return "" if code == TRY_AGAIN and heartbeat.VARIABLE in os.environ else text
