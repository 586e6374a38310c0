"""Whether work gets on, for what watches it, and how far tokenizing is, for people to see."""

import sys
import time
from collections.abc import Callable
from typing import Self

import rich.progress

from llamajax.parallel import processes

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


class TokenizingProgress:
    """Shows how tokenizing goes: a moving bar on a terminal, now and then a line where there is none."""

    def __init__(self, total_bytes: int, log: Callable[[str], None], *, animate: bool = True) -> None:
        self._total_bytes = total_bytes
        self._log = log
        self._finished_bytes = self._read_bytes = self._text_bytes = self._documents = 0
        self._started = self._reported = time.monotonic()
        self._bar = rich.progress.Progress(
            "tokenizing",
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            "{task.fields[speed]}",
            rich.progress.TimeRemainingColumn(),
            disable=not animate or not sys.stdout.isatty() or not total_bytes or processes.rank() > 0,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total_bytes, speed="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._bar.stop()
        if self._documents and error is None:
            self._log(
                f"tokenized  {self._documents:,} documents in {time.monotonic() - self._started:.1f} s, {self._speed()}"
            )

    def advance(self, num_documents: int, text_bytes: int, group_bytes_read: int) -> None:
        """Counts documents that were tokenized, and how far into the group's files they reach."""
        self._documents += num_documents
        self._text_bytes += text_bytes
        self._read_bytes = max(self._read_bytes, self._finished_bytes + group_bytes_read)
        self._show()

    def finish_group(self, group_bytes: int) -> None:
        """Counts a whole group as done, whoever did it."""
        self._finished_bytes += group_bytes
        self._read_bytes = self._finished_bytes
        self._show()

    def _show(self) -> None:
        gets_on()
        self._bar.update(self._task, completed=self._read_bytes, speed=self._speed())
        now = time.monotonic()
        if self._bar.disable and self._documents and now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            done = min(self._read_bytes / self._total_bytes, 1.0) if self._total_bytes else 0.0
            left = f", {(now - self._started) * (1 / done - 1):.0f} s left" if done else ""
            self._log(f"tokenizing {done:.0%}, {self._speed()}{left}")

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{self._documents / seconds:,.0f} documents/s, {self._text_bytes / seconds / 1e6:.1f} MB/s"
