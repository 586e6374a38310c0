"""Several processes as one run: they meet, hear at once when one of them fails or is lost, and agree on when to stop.

jax.distributed alone ends a process that misses another from C++, by its own clock, with a stack on the screen and SIGABRT.
So every process also keeps a connection to process 0, made on the coordinator's port before jax listens there. Through it
goes why a process fails, a sign of life now and then, and the request to stop; when it ends, so has the process at its other
end. jax itself talks to the coordinator through a relay in its own process, so that it does not notice first.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from llamajax.errors import TRY_AGAIN, EnvironmentMismatchError, without_passwords
from llamajax.processes import heartbeat, rendezvous
from llamajax.processes.rendezvous import Link

NOW = 0
"""Of `Stoppable.stop_after`: the process is to end at once."""

_AWAIT_S = 2.0  # in which an error that follows from another process's is explained by it
_GRACE_S = 1.0  # in which a process may come to the same error by itself, before another's ends it
_TELL_S = 5.0  # in which others must have read what they are told
_STOPPED_S = 2.0  # by which a look that comes later means that this process stood still

_committing = threading.Lock()
_peers: "Peers | None" = None
_stoppable: "Stoppable | None" = None
_before_end: "BeforeEnd | None" = None


class Stoppable(Protocol):
    """What `Peers` stops: counts the moments at which it could, as every process does."""

    def freeze(self) -> float:
        """The number of such moments so far, which does not change before `stop_after`; -1 if none will come soon."""
        ...

    def stop_after(self, count: float, why: str) -> None:
        """Stops at the moment of this number; at `NOW`, ends the process."""
        ...


class BeforeEnd(Protocol):
    """What this process does before it ends because of another."""

    def __call__(self, reason: str, *, is_stuck: bool) -> object:
        """Takes the line that says why, and whether the other one is stuck, not dead."""
        ...


def current() -> "Peers | None":
    """The other processes of this run; None if there are none."""
    return _peers


def rank() -> int:
    """The number of this process, without asking jax, which may take long to start."""
    return 0 if _peers is None else _peers.rank


def everyones(value: Any, about: str = "") -> list[Any]:
    """The JSON `value` of every process, by rank; all call this together, however late, and return the same.

    Not a collective of the devices: those wait for each other for half a minute only, where they meet the first time.
    Another thread than the main one says what its values are about, so that they do not meet the main one's.
    """
    return [value] if _peers is None else _peers.everyones(value, about)


def of_first(value: Any) -> Any:
    """The JSON `value` of process 0, in every process; all call this together, however late, whatever their own value is."""
    return everyones(value if rank() == 0 else None)[0]


def check_same_everywhere(own: Mapping[str, Any]) -> None:
    """Refuses to go on when the processes of the run do not have the same settings, or data; all call this together.

    Raises:
        EnvironmentMismatchError: naming the processes that differ from the first, and in what.
    """
    first = of_first(dict(own))
    differing_here = [key for key in {**first, **own} if key not in own or key not in first or own[key] != first[key]]
    for number, differing in enumerate(everyones(differing_here)):
        if differing:
            raise EnvironmentMismatchError(
                f"process {number} differs from process 0 in {', '.join(differing)}; give all the same configuration,"
                " code and data"
            )


def can_stop(stoppable: Stoppable | None) -> None:
    """From here on it is `stoppable` that a request to stop stops, in every process at the same moment."""
    global _stoppable
    _stoppable = stoppable


def before_end(work: BeforeEnd | None) -> None:
    """From here on `work` is done before this process ends because another one was lost or stuck."""
    global _before_end
    _before_end = work


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, this process does not end because of another one; not for longer than a minute."""
    with _committing:
        heartbeat.of_this_process().tell(commits=True)
        try:
            yield
        finally:
            heartbeat.of_this_process().tell(commits=False)


def await_commit() -> bool:
    """Before this process ends as it is: waits for what is done `uninterrupted`, for a minute at most, and lets nothing more
    begin; whether it has come to its end."""
    return _committing.acquire(timeout=heartbeat.COMMIT_S)


def meet(rank: int, links: Sequence[Link], timeout_s: float) -> None:
    """Takes the processes at the other ends of `links` for those of this run; see `Peers`."""
    global _peers
    _peers = Peers(rank, links, timeout_s)
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Tells the others that this process ends, and why where nobody caught an exception: jax's own end would then wait for
    them."""
    assert _peers is not None
    if (error := getattr(sys, "last_value", None)) is None:
        _peers.leave()
        return
    _peers.tell_failure(without_passwords(f"{type(error).__name__}: {error}"), 1)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(1)


class Peers:
    """The other processes of a run, as process 0 knows all of them and each of them process 0."""

    def __init__(self, rank: int, links: Sequence[Link], timeout_s: float) -> None:
        """Begins to listen to `links`; who says nothing for `timeout_s` seconds is lost."""
        for link in links:  # the first ones to come had nothing to say until the last one came
            link.heard = time.monotonic()
        self.rank = rank
        self._links = {link.rank: link for link in links}
        self._timeout_s = timeout_s
        self._failure: str | None = None
        self._last_word = threading.Lock()
        self._told: set[int] = set()
        self._all_told = threading.Event()
        self._rounds: Counter[str] = Counter()
        self._heard: dict[str, dict[int, Any]] = {}
        self._answers: dict[str, list[Any]] = {}
        self._rounds_changed = threading.Condition()
        self.reports: dict[int, Any] = {}
        """On process 0: the newest report of each process, by rank."""
        self._why_stop: str | None = None
        self._counts: dict[int, float] = {}
        self._counting = threading.RLock()
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    def is_ending(self) -> bool:
        """Whether this process is about to end because of another."""
        return self._failure is not None

    def tell_failure(self, reason: str, code: int, *, is_stuck: bool = False) -> None:
        """Tells the others why this process is about to end, and returns when they know; this is its last word.

        They end with its exit code, so that whoever started them decides alike on every host; at once if it `is_stuck`.
        """
        # Never given back: from here on, the process ends with its own error, not with another's.
        self._last_word.acquire()
        if self._failure is None:
            what = reason.splitlines()[0][:500]
            remedy = _remedy("; start all again when that is mended", code)
            line = f"process {self.rank} ({rendezvous.who_am_i()}) failed: {what}{remedy}"
            grace_s = 0 if is_stuck else _GRACE_S
            self._send_all({"failed": line, "rank": self.rank, "code": code, "grace_s": grace_s, "is_stuck": is_stuck})
            self._all_told.wait(_TELL_S)

    def await_failure(self) -> None:
        """After an error that may be another process's: does not return if one failed, this process then ends with it."""
        deadline = time.monotonic() + _AWAIT_S
        while time.monotonic() < deadline:
            if self._failure is not None:
                threading.Event().wait()
            time.sleep(0.05)

    def everyones(self, value: Any, about: str) -> list[Any]:
        """See `everyones`."""
        self._rounds[about] += 1
        name = f"{about} {self._rounds[about]}"
        if self.rank == 0:
            self._hear(name, 0, value)
        else:
            self._links[0].send({"value": value, "of_round": name})
        with self._rounds_changed:
            self._rounds_changed.wait_for(lambda: name in self._answers)
            return self._answers.pop(name)

    def report(self, values: Any) -> None:
        """Sends process 0 the JSON `values`, in place of what it was sent before; waits for nobody."""
        if self.rank == 0:
            self.reports[0] = values
        else:
            self._links[0].send({"report": values})

    def leave(self) -> None:
        """Tells the others that this process will end, having done its part."""
        self._send_all({"leaving": True})

    def request_stop(self, why: str) -> None:
        """Lets all processes agree on a moment to stop and stop there."""
        if self.rank > 0:
            self._links[0].send({"stop": why})
            return
        with self._counting:
            if self._why_stop is None:
                self._why_stop = why
                self._send_all({"freeze": True})
                self._count(0, _freeze())

    def _listen(self) -> None:
        interval = self._timeout_s / 10
        next_sign = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                selector.register(link, selectors.EVENT_READ, link)
                for message in link.early:
                    self._take(link, message)
            while True:
                began = time.monotonic()
                ready = selector.select(interval)
                if (now := time.monotonic()) - began > interval + _STOPPED_S:  # all may have stood still
                    for link in self._links.values():
                        link.heard = now
                for key, _ in ready:
                    messages = key.data.receive()
                    if messages is None:
                        selector.unregister(key.fileobj)
                        self._count_told(key.data)  # or has no need to be
                        if not key.data.leaving:
                            how = "ended without a word: killed, or with its machine"
                            self._lose(key.data, how, "; see there, and start all again", is_stuck=False)
                    for message in messages or ():
                        self._take(key.data, message)
                if time.monotonic() >= next_sign:
                    next_sign = time.monotonic() + interval
                    self._send_all({"alive": True})
                    self._look_for_the_silent(time.monotonic())

    def _look_for_the_silent(self, now: float) -> None:
        for link in self._links.values():
            if not link.leaving and now - link.heard > self._timeout_s:
                how = f"gave no sign of life for {self._timeout_s} s (distributed.heartbeat_timeout_s)"
                self._lose(link, how, "; end what is left, and start all again", is_stuck=True)

    def _take(self, link: Link, message: dict[str, Any]) -> None:
        match message:
            case {"failed": line, "rank": rank, "code": code, "grace_s": grace_s, "is_stuck": is_stuck}:
                link.send({"told": True})
                if self.rank == 0:
                    self._send_all(message, but=link)
                self._end_with(line, rank, code, grace_s, is_stuck)
            case {"told": _}:
                self._count_told(link)
            case {"leaving": _}:
                link.leaving = True
            case {"stop": why}:
                self.request_stop(why)
            case {"report": values}:
                self.reports[link.rank] = values
            case {"value": value, "of_round": name}:
                self._hear(name, link.rank, value)
            case {"values": values, "of_round": name}:
                self._answer(name, values)
            case {"freeze": _}:
                link.send({"count": _freeze()})
            case {"count": count}:
                self._count(link.rank, count)
            case {"stop_after": count, "why": why}:
                _stop_after(count, why)

    def _count_told(self, link: Link) -> None:
        self._told.add(link.rank)
        if self._told == self._links.keys():
            self._all_told.set()

    def _lose(self, link: Link, how: str, remedy: str, *, is_stuck: bool) -> None:
        line = f"process {link.rank} ({link.who}) {how}{_remedy(remedy, TRY_AGAIN)}"
        if self.rank == 0 and self._failure is None:
            message = {"failed": line, "rank": link.rank, "code": TRY_AGAIN, "grace_s": 0, "is_stuck": is_stuck}
            self._send_all(message, but=link)
        self._end_with(line, link.rank, TRY_AGAIN, 0, is_stuck)

    def _end_with(self, line: str, rank: int, code: int, grace_s: float, is_stuck: bool) -> None:
        """Ends this process because of another, `rank`, unless it fails by itself meanwhile."""
        if self._failure is None:
            self._failure = line
            threading.Thread(target=self._end, args=(line, rank, code, grace_s, is_stuck), daemon=True).start()

    def _end(self, line: str, rank: int, code: int, grace_s: float, is_stuck: bool) -> None:
        time.sleep(grace_s)
        if code == TRY_AGAIN and _before_end is not None:
            _before_end(line, is_stuck=is_stuck)
        is_committed = await_commit()
        if not self._last_word.acquire(blocking=False):  # it ends by itself, and has said why
            if is_committed:
                _committing.release()
            return
        heartbeat.of_this_process().tell(ended_by=rank)
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
        os._exit(code)

    def _hear(self, name: str, rank: int, value: Any) -> None:
        """On process 0: one more value of a round of `everyones`."""
        with self._rounds_changed:
            values = self._heard.setdefault(name, {})
            values[rank] = value
            if len(values) <= len(self._links):
                return
            del self._heard[name]
        in_order = [values[rank] for rank in range(len(values))]
        self._send_all({"values": in_order, "of_round": name})
        self._answer(name, in_order)

    def _answer(self, name: str, values: list[Any]) -> None:
        with self._rounds_changed:
            self._answers[name] = values
            self._rounds_changed.notify_all()

    def _count(self, rank: int, count: float) -> None:
        """On process 0: the moment to stop is the first that none has passed; all at once if none is at work."""
        with self._counting:
            self._counts[rank] = count
            if len(self._counts) <= len(self._links):
                return
            fewest, most = min(self._counts.values()), max(self._counts.values())
            agreed = NOW if fewest == most and most in (-1, math.inf) else most + 1
            self._send_all({"stop_after": agreed, "why": self._why_stop})
            if agreed == NOW:
                self._drain()
            _stop_after(agreed, str(self._why_stop))

    def _send_all(self, message: dict[str, Any], but: Link | None = None) -> None:
        line = rendezvous.line_of(message)
        for link in self._links.values():
            if link is not but:
                link.send_line(line)

    def _drain(self) -> None:
        """Reads until the others have ended: what is unread when a process ends may cost them what it said last."""
        deadline = time.monotonic() + _TELL_S
        for link in self._links.values():
            while link.receive(deadline - time.monotonic()) is not None:
                pass


def _remedy(text: str, code: int) -> str:
    """What is left for people to do; nothing where a launcher, which has heartbeats written, starts all again."""
    return "" if code == TRY_AGAIN and heartbeat.VARIABLE in os.environ else text


def _freeze() -> float:
    return -1 if _stoppable is None else _stoppable.freeze()


def _stop_after(count: float, why: str) -> None:
    if _stoppable is not None:  # else this process is ending already
        _stoppable.stop_after(count, why)
