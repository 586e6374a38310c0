"""What a run writes down about itself, and how it is read back: `metrics.jsonl` and `events.jsonl`.

`metrics.jsonl` holds numbers by step, in order: one line per optimizer step (`train/*`, `perf/*`) and one per
evaluation (`eval/*`). A line starts with its `step`, the number of finished optimizer steps, and its `time` (seconds since
1970). Floats are written so that they read back bit for bit; JSON has no other numbers, so the rest are the strings
"NaN", "Infinity" and "-Infinity" (protobuf's JSON mapping does the same). `events.jsonl` holds what happened: every start,
save (begun) and stop; it only ever grows.
"""

import json
import math
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamajax.errors import ConfigError, DataError

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
FINAL_STEPS = 20
"""Steps at the end of a run that its final training loss is averaged over."""

Record = dict[str, Any]
"""One line of a log: names to numbers or texts."""

_STEP = re.compile(rb'\{"step": (\d+),')


def encode(record: Mapping[str, Any]) -> str:
    """The record as one line of JSON, without the line end."""

    def finite(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return value

    return json.dumps({key: finite(value) for key, value in record.items()}, allow_nan=False, ensure_ascii=False)


def drop_later_steps(path: Path, last_step: int) -> None:
    """Cuts off the lines of steps after `last_step`, which will be computed again, and a last line torn by a kill.

    The log is in order, so that is one truncation: there is no moment at which a kill would lose more.

    Raises:
        DataError: a line in the middle is not a record.
    """
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            match = _STEP.match(line)
            if match is None:
                raise _damaged(path, number)
            if int(match[1]) > last_step:
                break
            end += len(line)
    os.truncate(path, end)


def drop_torn_line(path: Path) -> None:
    """Cuts off a last line that has no line end, because the process was killed while writing it."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """Everything a run wrote down."""

    series: dict[str, tuple[np.ndarray, np.ndarray]]
    """Metric name to its steps (int64, rising) and values (float64)."""
    events: list[Record]
    """In order; each has `time` and `event`, one of `start`, `save` (begun) and `stop`."""


def read_run(run_dir: Path) -> RunLog:
    """Reads the logs of a finished or unfinished run; a torn last line, still being written, does not count.

    Raises:
        ConfigError: there is no run in `run_dir`, or it has not finished a step yet.
        DataError: a line in the middle of a log is damaged.
    """
    metrics_path, events_path = run_dir / METRICS_FILE, run_dir / EVENTS_FILE
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such directory; name the run_dir of a run")
    if not metrics_path.is_file():
        raise ConfigError(f"{run_dir}: has no {METRICS_FILE}; name the run_dir of a run that was started")

    columns: dict[str, tuple[array[int], array[float]]] = defaultdict(lambda: (array("q"), array("d")))
    with metrics_path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                step = record.pop("step")
                for key, value in record.items():
                    steps, values = columns[key]
                    steps.append(step)
                    values.append(float(value))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise _damaged(metrics_path, number) from error
    if not columns:
        raise ConfigError(f"{metrics_path}: holds no step yet; try again after the first one")

    series = {}
    for key, columns_of_key in columns.items():
        steps, values = np.array(columns_of_key[0]), np.array(columns_of_key[1])
        last_of_its_step = np.append(np.diff(steps) > 0, True)  # an evaluation may have been repeated after a restart
        series[key] = steps[last_of_its_step], values[last_of_its_step]
    return RunLog(series=series, events=_read_events(events_path) if events_path.is_file() else [])


def _read_events(path: Path) -> list[Record]:
    events = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            event = json.loads(line)
            events.append({"time": float(event["time"]), "event": str(event["event"]), **event})
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path, number) from error
    return events


def _damaged(path: Path, number: int) -> DataError:
    return DataError(f"{path}:{number}: the line is damaged: not a record with a step; restore the file or remove the line")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run in a dozen numbers; None where the run has not got that far, or did not measure it."""

    step: int
    """Finished optimizer steps."""
    num_steps: int | None
    """Steps the run is meant to have."""
    num_params: int | None
    tokens: int | None
    """Positions trained on, all sequences and steps."""
    train_loss: float | None
    """Nats per token, mean of the last `FINAL_STEPS` steps."""
    eval_loss: float | None
    """Nats per token on held-out documents, newest evaluation."""
    eval_bits_per_byte: float | None
    tokens_per_sec: float | None
    """Over all devices; this and the next three are medians over the steps."""
    tokens_per_sec_per_device: float | None
    mfu: float | None
    """Model FLOPs utilization, 0 to 1, causal half of attention counted."""
    mfu_full_attention: float | None
    """The same with the full square of attention counted."""
    steps_time_s: float
    """Seconds spent in the steps that count."""
    wall_time_s: float | None
    """Seconds from the first start to the newest record, everything included."""
    restarts: int
    stop_reason: str | None
    """`finished`, `stopped`, or the error; None while running, and after a kill."""


def summarize(log: RunLog) -> RunSummary:
    """The run in a dozen numbers."""

    def newest(key: str) -> float | None:
        return float(log.series[key][1][-1]) if key in log.series else None

    def median(key: str) -> float | None:
        return float(np.median(log.series[key][1])) if key in log.series else None

    starts = [event for event in log.events if event["event"] == "start"]
    facts = starts[-1] if starts else {}
    last_event = log.events[-1] if log.events else {}
    step = int(log.series["time"][0][-1])
    losses = log.series["train/loss"][1][-FINAL_STEPS:] if "train/loss" in log.series else np.array([])
    losses = losses[np.isfinite(losses)]  # those of skipped steps need not be
    last_time = max(float(log.series["time"][1][-1]), last_event.get("time", 0.0))
    return RunSummary(
        step=step,
        num_steps=facts.get("num_steps"),
        num_params=facts.get("num_params"),
        tokens=step * facts["tokens_per_step"] if "tokens_per_step" in facts else None,
        train_loss=float(losses.mean()) if losses.size else None,
        eval_loss=newest("eval/loss"),
        eval_bits_per_byte=newest("eval/bits_per_byte"),
        tokens_per_sec=median("perf/tokens_per_sec"),
        tokens_per_sec_per_device=median("perf/tokens_per_sec_per_device"),
        mfu=median("perf/mfu"),
        mfu_full_attention=median("perf/mfu_full_attention"),
        steps_time_s=float(log.series["perf/step_time_s"][1].sum()) if "perf/step_time_s" in log.series else 0.0,
        wall_time_s=last_time - starts[0]["time"] if starts else None,
        restarts=max(0, len(starts) - 1),
        stop_reason=last_event.get("reason") if last_event.get("event") == "stop" else None,
    )
