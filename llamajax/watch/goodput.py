"""Splits the wall time of a run, over all its starts, and computes the share spent on training.

Goodput is the effective training time ratio (ETTR): productive seconds of the wall time since the run was first started
(ByteRobust, arXiv 2509.16293, section 2).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

PARTS = {
    "productive": "steps that count, without the wait for their batches",
    "data wait": "waiting for the batches of these steps",
    "compile": "compiling the step, or loading a compiled step",
    "start": "imports, devices, the other processes",
    "load": "checkpoint and its verification, weights, data",
    "save": "stalls: until a checkpoint has left the devices, and until the last one is written",
    "evaluation": "evaluating held-out documents",
    "rollouts": "writing and rewarding completions to train on",
    "replicas": "comparing replicas on different devices",
    "restart": "no process: from the end of one to the start of the next",
    "lost work": "steps recomputed or dropped, and time without records before a process was lost",
    "other": "everything else",
}
"""Every way in which a run spends time, with a description."""

_OF_START = {"start": "start_s", "compile": "compile_s", "load": "load_s"}
_OF_PAUSES = {
    "saving": "save", "evaluating": "evaluation", "comparing replicas": "replicas", "compiling": "compile",
    "writing completions": "rollouts",
}  # fmt: skip
_ENDS_WELL = ("finished", "stopped")


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The wall time of a run, split into parts."""

    wall_s: float
    """Seconds from the first start to the newest record, without the time between the end of a finished run and its next
    start, in which nobody waits for it."""
    seconds: dict[str, float]
    """Seconds of each of `PARTS`; they add up to `wall_s`."""

    @property
    def share(self) -> float:
        """Productive share of the wall time, 0 to 1."""
        return self.seconds["productive"] / self.wall_s if self.wall_s else 0.0

    def __str__(self) -> str:
        """Formats the share and what took the rest, largest first: `93.1%: compile 3.2%, data wait 1.0%`."""
        rest = sorted(
            ((s / self.wall_s, part) for part, s in self.seconds.items() if part != "productive" and s), reverse=True
        )
        told = [f"{part} {share:.1%}" for share, part in rest if share >= 0.0005]
        return f"{self.share:.1%}{': ' if told else ''}{', '.join(told)}"


def goodput(series: Mapping[str, tuple[np.ndarray, np.ndarray]], events: Sequence[Mapping[str, Any]]) -> Goodput | None:
    """Splits the wall time of a run into parts; returns None for a run without a recorded start.

    Time between events is added up, forward only: the clock may have been set back, or belong to another machine. Time that
    older versions did not record is `other`. All waiting for batches counts as `data wait`, even while a device still
    computes the step before, so the true goodput is rather higher.

    Args:
        series: steps and values by metric name, as in `RunLog`.
        events: events of the run in order, as in `RunLog`.
    """
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    if not starts:
        return None
    lives = [events[first:end] for first, end in pairwise([*starts, len(events)])]
    seconds = dict.fromkeys(PARTS, 0.0)
    in_steps = _total(series, "perf/step_time_s")
    seconds["data wait"] = min(in_steps, _total(series, "perf/data_wait_s"))
    seconds["productive"] = in_steps - seconds["data wait"]
    wall_s = 0.0
    for life, following in zip(lives, [*lives[1:], None], strict=True):
        for part, key in _OF_START.items():
            seconds[part] += _number(life[0], key) or 0.0
        for event in life:
            seconds["lost work"] += _number(event, "lost_s") or 0.0
            if event["event"] == "pause":
                seconds[_OF_PAUSES.get(str(event.get("doing")), "other")] += _number(event, "seconds") or 0.0
        times = [_began(life[0]), *(event["time"] for event in life)]
        last_record = float(series["time"][1][-1])
        record = last_record if following is None else _number(following[0], "newest_record")
        next_time = last_record if following is None else _began(following[0])
        index = next((i for i, event in enumerate(life) if event["event"] in ("stop", "restart")), len(life))
        ended = life[index] if index < len(life) else None
        newest = max(life[index - 1]["time"], min(record or -math.inf, next_time if ended is None else ended["time"]))
        is_finished = ended is not None and ended["event"] == "stop" and ended.get("reason") == "finished"
        if ended is not None and not (ended["event"] == "stop" and ended.get("reason") in _ENDS_WELL):
            seconds["lost work"] += max(0.0, ended["time"] - newest)
        if following is not None and (ended is not None or record is not None) and not is_finished:
            went_back = any(event["event"] == "rollback" for event in life) and "began" not in following[0]
            seconds["load" if went_back else "restart"] += max(0.0, next_time - (newest if ended is None else ended["time"]))
        until = [] if is_finished and following is not None else [next_time]
        wall_s += sum(max(0.0, later - earlier) for earlier, later in pairwise([*times, *until]))
    known_s = sum(seconds.values()) - seconds["other"]
    wall_s = max(wall_s, known_s)
    seconds["other"] = wall_s - known_s
    return Goodput(wall_s=wall_s, seconds=seconds)


def _total(series: Mapping[str, tuple[np.ndarray, np.ndarray]], key: str) -> float:
    values = series[key][1] if key in series else np.zeros(0)
    return float(values[np.isfinite(values) & (values > 0)].sum())


def _number(event: Mapping[str, Any], key: str) -> float | None:
    """Returns a fact that is a non-negative number of seconds, or None."""
    value = event.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None


def _began(start: Mapping[str, Any]) -> float:
    """Returns when the process of this `start` began."""
    return min(_number(start, "began") or start["time"], start["time"])
