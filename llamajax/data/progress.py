"""Reports whether work makes progress, for watchdogs, and how far tokenizing is, for people."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, Protocol, Self

import rich.progress

from llamajax.processes import peers

REPORT_EVERY_S = 10.0
"""Seconds between progress lines without a terminal for the bar."""

_signs = 0


def signs() -> int:
    """Returns a number that grows while work on data or checkpoints makes progress, for watchdogs to compare."""
    return _signs


def gets_on() -> None:
    """Signals that such work makes progress; cheap, and callable from any thread."""
    global _signs
    _signs += 1  # losing one to another thread is harmless


class Progress(Protocol):
    """Receives the progress of tokenizing groups of files."""

    def advance(self, num_documents: int, text_bytes: int, bytes_read: int, num_tokens: int = 0, group: int = 0) -> None:
        """Counts tokenized documents, and how far they reach into the files of the group."""
        ...

    def finish_group(self, num_bytes: int, group: int = 0) -> None:
        """Counts a whole group as done, by this or another process."""
        ...


@contextlib.contextmanager
def seconds_told(doing: str, log: Callable[[str], None]) -> Iterator[None]:
    """Logs at intervals, and at the end of a long block, how long a block without progress reports has been running.

    Args:
        doing: beginning of the lines.
        log: receives a line, in another thread.
    """
    ended, started = threading.Event(), time.monotonic()

    def seconds() -> str:
        return f"{time.monotonic() - started:,.0f} s"

    def tell() -> None:
        used = time.process_time()
        while not ended.wait(REPORT_EVERY_S):
            if time.process_time() - used > REPORT_EVERY_S / 10:  # without computing, it hangs
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


_DONE = {"tokenizing": "tokenized", "hashing": "hashed", "checking": "checked", "fetching": "fetched", "sampling": ""}
"""First word of the last line; empty if the next step reports the result."""


class TokenizingProgress:
    """Shows the progress of tokenizing or other work on bytes: a bar on a terminal, otherwise a line at intervals."""

    def __init__(
        self,
        total_bytes: int,
        log: Callable[[str], None],
        *,
        animate: bool = True,
        by: str = "",
        doing: Literal["tokenizing", "hashing", "checking", "fetching", "sampling"] = "tokenizing",
    ) -> None:
        """Prepares the bar.

        Args:
            total_bytes: size of all groups.
            log: receives a line.
            animate: whether to show the bar on a terminal.
            by: suffix of the speed that names the workers, if any.
            doing: kind of work.
        """
        self._total_bytes = total_bytes
        self._log, self._by = log, by
        self._doing, self._done, self._of_bytes = doing, _DONE[doing], doing in ("hashing", "checking", "fetching")
        self.text_bytes = 0
        """Number of UTF-8 bytes of the documents so far."""
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
