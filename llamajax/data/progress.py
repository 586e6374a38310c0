"""Whether work gets on, for what watches it, and how far tokenizing is, for people to see."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, Protocol, Self

import rich.progress

from llamajax.processes import peers

REPORT_EVERY_S = 10.0
"""Seconds between lines where there is no terminal to animate."""

_signs = 0


def signs() -> int:
    """Grows while work on data or checkpoints gets on: what watches whether it does compares this with what it was."""
    return _signs


def gets_on() -> None:
    """Says that such work gets on; in any thread, as often as one likes."""
    global _signs
    _signs += 1  # one that another thread's overwrites is no loss


class Progress(Protocol):
    """Takes how far the tokenizing of groups of files is."""

    def advance(self, num_documents: int, text_bytes: int, bytes_read: int, num_tokens: int = 0, group: int = 0) -> None:
        """Counts documents that were tokenized, and how far into the files of the group they reach."""
        ...

    def finish_group(self, num_bytes: int, group: int = 0) -> None:
        """Counts a whole group as done, whoever did it."""
        ...


@contextlib.contextmanager
def seconds_told(doing: str, log: Callable[[str], None]) -> Iterator[None]:
    """Logs now and then how long the block, which tells nothing itself, has been computing, and at its end if it did.

    Args:
        doing: what the lines begin with.
        log: takes a line, in another thread.
    """
    ended, started = threading.Event(), time.monotonic()

    def seconds() -> str:
        return f"{time.monotonic() - started:,.0f} s"

    def tell() -> None:
        used = time.process_time()
        while not ended.wait(REPORT_EVERY_S):
            if time.process_time() - used > REPORT_EVERY_S / 10:  # it hangs if it does not compute
                gets_on()
            used = time.process_time()
            log(f"{doing}: {seconds()} so far")

    thread = threading.Thread(target=tell, name="seconds", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if time.monotonic() - started >= REPORT_EVERY_S:
        log(f"{doing}: done in {seconds()}")


_DONE = {"tokenizing": "tokenized", "hashing": "hashed", "checking": "checked", "sampling": ""}
"""The word that the last line begins with; empty if the next step reports the result."""


class TokenizingProgress:
    """Shows how tokenizing goes, or other work on bytes: a moving bar on a terminal, now and then a line elsewhere."""

    def __init__(
        self,
        total_bytes: int,
        log: Callable[[str], None],
        *,
        animate: bool = True,
        by: str = "",
        doing: Literal["tokenizing", "hashing", "checking", "sampling"] = "tokenizing",
    ) -> None:
        """Takes the size of all groups, what takes a line, who works, if that is to be told, and what is done."""
        self._total_bytes = total_bytes
        self._log, self._by = log, by
        self._doing, self._done, self._of_bytes = doing, _DONE[doing], doing in ("hashing", "checking")
        self.text_bytes = 0
        """Of the documents so far, in UTF-8."""
        self._finished_bytes = self._documents = self._tokens = 0
        self._read_bytes: dict[int, int] = {}
        self._started = self._reported = time.monotonic()
        self._bar = rich.progress.Progress(
            self._doing,
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            "{task.fields[speed]}",
            rich.progress.TimeRemainingColumn(),
            disable=not animate or not sys.stdout.isatty() or not total_bytes or peers.rank() > 0,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total_bytes, speed="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._bar.stop()
        if self._done and (self._documents or (self._of_bytes and self._total_bytes)) and error is None:
            what = f"{self._total_bytes / 1e6:,.1f} MB" if self._of_bytes else f"{self._documents:,} documents"
            self._log(f"{self._done:10} {what} in {time.monotonic() - self._started:.1f} s, {self._speed()}")

    def advance(self, num_documents: int, text_bytes: int, bytes_read: int, num_tokens: int = 0, group: int = 0) -> None:
        """See `Progress`."""
        self._documents += num_documents
        self.text_bytes += text_bytes
        self._tokens += num_tokens
        self._read_bytes[group] = max(self._read_bytes.get(group, 0), bytes_read)
        self._show()

    def finish_group(self, num_bytes: int, group: int = 0) -> None:
        """See `Progress`."""
        self._finished_bytes += num_bytes
        self._read_bytes.pop(group, None)
        self._show()

    def _show(self) -> None:
        gets_on()
        read_bytes = self._finished_bytes + sum(self._read_bytes.values())
        self._bar.update(self._task, completed=read_bytes, speed=self._speed())
        now = time.monotonic()
        if self._bar.disable and (self._documents or self._of_bytes) and now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            done = min(read_bytes / self._total_bytes, 1.0) if self._total_bytes else 0.0
            left = f", {(now - self._started) * (1 / done - 1):.0f} s left" if done else ""
            self._log(f"{self._doing:10} {done:.0%}, {self._speed()}{left}")

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        if self._of_bytes:
            return f"{self._finished_bytes / seconds / 1e6:,.0f} MB/s{self._by}"
        tokens = f", {self._tokens / seconds / 1e6:.2f} M tokens/s" if self._tokens else ""
        return f"{self._documents / seconds:,.0f} documents/s, {self.text_bytes / seconds / 1e6:.1f} MB/s{tokens}{self._by}"
