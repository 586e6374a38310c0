"""Writes and reads the records of a run: `metrics.jsonl` and `events.jsonl`.

`metrics.jsonl` holds numbers by step, in order: one line per optimizer step (`train/*`, `perf/*`, and `data/*`: the data
read so far) and one per evaluation (`eval/*`). A line starts with its `step`, the number of finished optimizer steps, and
its `time` (seconds since 1970). Floats are written so that they read back bit for bit; JSON has no non-finite numbers, so
these are the strings "NaN", "Infinity" and "-Infinity" (protobuf's JSON mapping does the same). `events.jsonl` holds the
events of the run: every start (when its process began, the time it took until then, the steps it dropped), compilation (with
its XLA options), save (when it starts), pause between steps, rollback and stop; it only grows. `rolled_back.jsonl` holds the
lines of `metrics.jsonl` that a rollback removed from there.
"""

import itertools
import json
import math
import os
import re
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import numpy as np

from llamajax.errors import ConfigError
from llamajax.watch.goodput import Goodput, goodput

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
ROLLED_BACK_FILE = "rolled_back.jsonl"
HOSTS_FILE = "hosts.json"
"""Medians of every process, as last reported to process 0; see `llamajax.watch.hosts`."""
EPOCHS = "data/epochs/"
"""Prefix of metrics that count passes through a source; the index of the source in `data.sources` follows."""
MOST_KEPT = 100_000
"""Maximum number of records, of about 500 bytes each, kept in memory while a log cannot be written."""
FINAL_STEPS = 20
"""Number of steps at the end of a run that its final training loss is averaged over."""

Record = dict[str, Any]
"""One line of a log: names to numbers or text."""

# Seconds that a record waits for its disk, and seconds without such a wait after which the disk is no longer slow.
_PATIENCE_S, _CALM_S = 1, 60

_STEP = re.compile(rb'\{"step": (\d+),')


def encode(record: Mapping[str, Any]) -> str:
    """Returns the record as one line of JSON, without the line end."""

    def finite(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return value

    return json.dumps({key: finite(value) for key, value in record.items()}, allow_nan=False, ensure_ascii=False)


class Appender:
    """A file that grows by whole records, even while its disk is full or slow: records that cannot be written are kept and
    written later, in order. A context manager that makes a last attempt at the end.

    The operating system has a record when `append_record` returns, so a killed process loses no record that could be
    written; on a slow disk, no record that `wait` waited for.
    """

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        """Opens the file, or creates it.

        Args:
            path: the file, which no other writer may use.
            say: takes a line, from any thread, when the file cannot be written or its disk is slow, when that ends, and when
                records are lost.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path, self._say = path, say
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._kept: deque[bytes] = deque()
        self._num_late = self._num_lost = 0
        self._is_torn = self._is_slow = False
        self._slow_at = -math.inf
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=path.name)
        self._attempt: Future[None] | None = None
        """Set while kept records are being written."""

    def append_record(self, record: bytes) -> None:
        """Writes a record and all waiting ones, or keeps them. Never fails, and waits for a slow disk only once."""
        with self._lock:
            self._kept.append(record)
            while len(self._kept) > MOST_KEPT:
                self._kept.popleft()
                self._num_lost += 1
        attempt = self._begin()
        try:
            if not self._is_slow:
                attempt.result(_PATIENCE_S)
        except TimeoutError:
            self._is_slow = True
            self._say(f"{self._path}: its disk is slow; the run continues and writes it later")

    def wait(self) -> None:
        """Returns when every record is written, or could not be written."""
        if (attempt := self._attempt) is not None:
            attempt.result()

    def _begin(self) -> Future[None]:
        """Returns the attempt in progress, or a new one."""
        with self._lock:
            self._attempt = self._attempt or self._writer.submit(self._write_kept)
            return self._attempt

    def _write_kept(self) -> None:
        """Writes until no record is kept or the disk fails; runs in its own thread."""
        while (records := self._take()) is not None:
            began = time.monotonic()
            try:
                self._write(b"".join(records))
            except OSError as error:
                with self._lock:
                    self._kept.extendleft(reversed(records))
                    self._num_late, self._attempt = len(self._kept), None
                if self._problem is None:
                    self._problem = error.strerror or str(error)
                    self._say(f"{self._path}: cannot be written: {self._problem}; the run continues and writes it later")
                return
            finally:
                if (now := time.monotonic()) - began > _PATIENCE_S:
                    self._slow_at = now

    def _take(self) -> list[bytes] | None:
        """Returns the next record, or all of them while each write takes long; None if there is none and the attempt is
        over."""
        with self._lock:
            if self._kept:
                records = list(self._kept) if self._is_slow and self._problem is None else [self._kept[0]]
                for _ in records:
                    self._kept.popleft()
                return records
            self._attempt = None
            problem, self._problem = self._problem, None
            is_over = self._is_slow and time.monotonic() - self._slow_at > _CALM_S
            self._is_slow = self._is_slow and not is_over
        if problem is not None:
            lost = f", lost: {self._num_lost:,}" if self._num_lost else ""
            self._say(f"{self._path}: is written again; records that came late: {self._num_late:,}{lost}")
            self._num_lost = 0
        if is_over:
            self._say(f"{self._path}: its disk is no longer slow; every record is written")
        return None

    def _write(self, record: bytes) -> None:
        if self._is_torn:
            self._file.truncate(self._size)
        rest, self._is_torn = memoryview(record), True
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self._size)  # removes the partial record; if this fails too, the next attempt does it
            raise
        self._size, self._is_torn = self._size + len(record), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._begin().result()
        self._writer.shutdown()
        if self._kept:
            num_lost = self._num_lost + len(self._kept)
            self._say(f"{self._path}: records lost: {num_lost:,}; {self._problem}")
        self._file.close()


def later_steps(path: Path, last_step: int) -> bytes:
    """Returns the complete lines of steps after `last_step`."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        matches = ((line, _STEP.match(line)) for line in file if line.endswith(b"\n"))
        return b"".join(line for line, match in matches if match and int(match[1]) > last_step)


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Records removed from a log, as far as they could be read."""

    steps: int
    """Number of optimizer steps."""
    seconds: float
    """Seconds that these steps took."""
    newest: float | None
    """Time of the newest record, removed or not; None if there was none."""


def drop_later_steps(path: Path, last_step: float) -> Dropped:
    """Cuts off the lines of steps after `last_step`, which will be recomputed, and a last line torn by a kill.

    The log is in order, so this is one truncation, and a kill at any moment loses nothing more. A damaged line before it
    stays unchanged.
    """
    end, kept, later = 0, b"", []
    with path.open("rb") as file:
        for line in file:
            match = _STEP.match(line)
            if later or not line.endswith(b"\n") or (match and int(match[1]) > last_step):
                later.append(line)
            else:
                end += len(line)
                kept = line
    os.truncate(path, end)
    records = [record for line in [kept, *later] if (record := _record(line)) is not None]
    later_steps = [record for record in records if record["step"] > last_step]
    times = [time for record in later_steps if isinstance(time := record.get("perf/step_time_s"), float)]
    return Dropped(steps=len(times), seconds=math.fsum(times), newest=records[-1]["time"] if records else None)


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """All records of a run."""

    series: dict[str, tuple[np.ndarray, np.ndarray]]
    """Steps (int64, rising) and values (float64) by metric name."""
    events: list[Record]
    """Events in order; each has `time`, `step` and `event`, such as `start`, `compile` (with the final XLA options), `data`,
    `save` (started), `pause` (ended), `slow` (a host is slow or has recovered), `rollback` (from `step` to `to_step`) and
    `stop`."""
    damaged: tuple[str, ...]
    """Locations of lines that are not records and are skipped, such as `metrics.jsonl:7`."""

    @property
    def warning(self) -> str | None:
        """One line about damaged lines, or None if there are none."""
        if not self.damaged:
            return None
        more = f" and {len(self.damaged) - 3} more" if len(self.damaged) > 3 else ""
        return f"{', '.join(self.damaged[:3])}{more}: not a record, skipped; restore the file or remove the line"


def read_run(run_dir: Path) -> RunLog:
    """Reads the logs of a finished or unfinished run; a torn last line, still being written, does not count.

    Raises:
        ConfigError: there is no run in `run_dir`, or it has not finished a step yet.
    """
    metrics_path, events_path = run_dir / METRICS_FILE, run_dir / EVENTS_FILE
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such directory; name the run_dir of a run")
    if not metrics_path.is_file():
        raise ConfigError(f"{run_dir}: has no {METRICS_FILE}; name the run_dir of a run that was started")

    damaged: list[str] = []
    columns: dict[str, tuple[array[int], array[float]]] = defaultdict(lambda: (array("q"), array("d")))
    for record in _records(metrics_path, damaged):
        try:
            numbers = {key: float(value) for key, value in record.items() if key != "step"}
        except (ValueError, TypeError, OverflowError):
            damaged.append(f"{metrics_path}: step {record['step']}")
            continue
        for key, value in numbers.items():
            columns[key][0].append(record["step"])
            columns[key][1].append(value)
    if not columns:
        raise ConfigError(f"{metrics_path}: holds no step yet; try again after the first one")

    series = {}
    for key, columns_of_key in columns.items():
        steps, values = np.array(columns_of_key[0]), np.array(columns_of_key[1])
        last_of_its_step = np.append(np.diff(steps) > 0, True)  # an evaluation may be repeated after a restart
        series[key] = steps[last_of_its_step], values[last_of_its_step]
    events = list(_records(events_path, damaged, has="event")) if events_path.is_file() else []
    return RunLog(series=series, events=events, damaged=tuple(damaged))


def _records(path: Path, damaged: list[str], has: str | None = None) -> Iterator[Record]:
    """Yields the complete lines that are records with a step, a time and, if given, a text `has`; adds others to
    `damaged`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            record = _record(line, has)
            if record is None:
                damaged.append(f"{path}:{number}")
            else:
                yield record


def _record(line: bytes, has: str | None = None) -> Record | None:
    """Parses a line as a record with a step, a time and, if given, a text `has`; returns None for anything else."""
    try:
        record = json.loads(line)
        is_record = type(record["step"]) is int and 0 <= record["step"] < 2**63 and math.isfinite(record["time"])
        return record if is_record and (has is None or type(record[has]) is str) else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run in a dozen numbers; None for those that it has not reached or measured."""

    step: int
    """Number of finished optimizer steps."""
    num_steps: int | None
    """Number of steps that the run is meant to have."""
    num_params: int | None
    tokens: int | None
    """Number of positions trained on, over all sequences and steps."""
    train_loss: float | None
    """Nats per token, or the objective's loss per pair of answers; mean of the last `FINAL_STEPS` steps."""
    eval_loss: float | None
    """The same on held-out documents, newest evaluation."""
    eval_bits_per_byte: float | None
    tokens_per_sec: float | None
    """Tokens per second over all devices; this and the next three are medians over the steps."""
    tokens_per_sec_per_device: float | None
    mfu: float | None
    """Model FLOPs utilization, 0 to 1, causal half of attention counted."""
    mfu_full_attention: float | None
    """The same with the full square of attention counted."""
    steps_time_s: float
    """Seconds spent in the steps that count."""
    wall_time_s: float | None
    """Seconds from the first start to the newest record, including everything; never less than `steps_time_s`."""
    goodput: Goodput | None
    """Split of these seconds."""
    restarts: int
    stop_reason: str | None
    """`finished`, `stopped`, or the error; None while running, and after a kill."""
    epochs: tuple[float, ...] = ()
    """Passes through each source, in the order of `data.sources`; empty in logs of older versions."""
    eval_reward_accuracy: float | None = None
    """Share of the held-out pairs whose chosen answer has the higher reward, 0 to 1."""
    train_reward: float | None = None
    """Mean reward of completions, over the last steps; None if the run trains on none of its own."""
    eval_reward: float | None = None
    """Mean reward of the completions of held-out prompts."""

    def figures(self) -> Record:
        """Returns all of it, by name, for programs."""
        split = {"share": self.goodput.share, **asdict(self.goodput)} if self.goodput else None
        return asdict(self) | {"goodput": split}


def summarize(log: RunLog) -> RunSummary:
    """Summarizes the run in a dozen numbers."""

    def known(figure: Callable[[np.ndarray], Any], key: str) -> float | None:
        return float(figure(log.series[key][1])) if key in log.series else None

    starts = [event for event in log.events if event["event"] == "start"]
    num_gone_back = sum(  # a rollback starts the loop again in the same process
        event["event"] == "start" and "began" not in event and before["event"] == "rollback"
        for before, event in itertools.pairwise(log.events)
    )
    facts = {key: value for key, value in starts[-1].items() if type(value) is int} if starts else {}
    last_event = log.events[-1] if log.events else {}
    step = int(log.series["time"][0][-1])
    losses = log.series["train/loss"][1][-FINAL_STEPS:] if "train/loss" in log.series else np.array([])
    losses = losses[np.isfinite(losses)]  # losses of skipped steps may not be finite
    steps_time_s = known(np.sum, "perf/step_time_s") or 0.0
    split = goodput(log.series, log.events)
    tokens = step * facts["tokens_per_step"] if "tokens_per_step" in facts else None
    if "data/tokens" in log.series:  # older versions had no stages and recorded only tokens per step
        tokens = int(log.series["data/tokens"][1][-1])
    epochs = itertools.takewhile(log.series.__contains__, (f"{EPOCHS}{source}" for source in itertools.count()))
    return RunSummary(
        step=step,
        num_steps=facts.get("num_steps"),
        num_params=facts.get("num_params"),
        tokens=tokens,
        train_loss=float(losses.mean()) if losses.size else None,
        eval_loss=known(itemgetter(-1), "eval/loss"),
        eval_bits_per_byte=known(itemgetter(-1), "eval/bits_per_byte"),
        eval_reward_accuracy=known(itemgetter(-1), "eval/reward_accuracy"),
        train_reward=known(lambda rewards: np.mean(rewards[-FINAL_STEPS:]), "train/reward"),
        eval_reward=known(itemgetter(-1), "eval/reward"),
        tokens_per_sec=known(np.median, "perf/tokens_per_sec"),
        tokens_per_sec_per_device=known(np.median, "perf/tokens_per_sec_per_device"),
        mfu=known(np.median, "perf/mfu"),
        mfu_full_attention=known(np.median, "perf/mfu_full_attention"),
        steps_time_s=steps_time_s,
        wall_time_s=None if split is None else split.wall_s,
        goodput=split,
        restarts=max(0, len(starts) - 1 - num_gone_back),
        stop_reason=last_event.get("reason") if last_event.get("event") == "stop" else None,
        epochs=tuple(float(log.series[key][1][-1]) for key in epochs),
    )
