"""Finds hosts that are slower than the others by comparing what each measures about itself; pure functions of reports.

In lockstep all hosts have the same step time, whichever one is slow. So each reports its own part: how long its devices were
idle because a batch was missing, or because the host was busy between steps, and the time of a fixed program on them. A
difference must show in several reports in a row, because noise mostly adds time, and only occasionally.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

KINDS = {"device": "computes", "data": "waits for its batches", "host": "takes between steps"}
"""Measurements that are compared, and what a slow host does."""
REPORT_EVERY = 8
"""Number of steps between reports of a host."""
REPORTS = 5
"""Number of consecutive reports in each median: moments 32 steps apart, or means over all 40 steps."""

_THROUGHOUT = 0.81  # share of the median's difference that the reports must show on average: more than 32 steps of 40
_LEAST_S = 0.002  # minimum loss per step, in data or between steps, that makes a host slow
_OWN_NOISE = 4.0  # differences below this many robust standard deviations of one host's reports do not count
_NOISE_BETWEEN = 4.0  # the same for the medians of the hosts
_REMEMBERED = 16  # reports of each host used to estimate its noise
_LEAST_DIFFERENCES = 8  # minimum number of differences between reports, over all hosts, for that estimate


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A host that is slower than the others, or has recovered."""

    process: int
    kind: str
    """One of `KINDS`."""
    seconds: float
    """Seconds that the host takes: its devices for the fixed program, or otherwise per step."""
    median_s: float
    """Median of the other processes, in seconds."""
    since: int
    """Step of the first report that showed it."""
    over: bool = False
    """Whether the host is as fast as the others again."""

    def line(self, host: str) -> str:
        """Formats a line for people; `host` is the host of the process."""
        who = f"slow       process {self.process} ({host})"
        if self.over:
            return f"{who} is as fast as the others again"
        if self.kind == "device":
            more = self.seconds / self.median_s - 1
            figures = f"{1e3 * self.seconds:.1f} ms against {1e3 * self.median_s:.1f} ms"
            return f"{who} computes {more:.0%} slower than the median ({figures}) since step {self.since}"
        figures = f"{1e3 * self.seconds:.1f} ms per step, the median {1e3 * self.median_s:.1f} ms"
        return f"{who} {KINDS[self.kind]} {figures}, since step {self.since}"


class Comparison:
    """Compares the newest reports of all processes and reports only changes."""

    def __init__(self, num_processes: int, ratio: float) -> None:
        """Expects reports from `num_processes`; a host that makes a step `ratio` times as long is slow."""
        self._ratio = ratio
        self._reports = {kind: np.full((num_processes, _REMEMBERED), np.nan) for kind in KINDS}
        self._steps = {kind: np.zeros((num_processes, _REMEMBERED), np.int64) for kind in KINDS}
        self._slow: dict[tuple[int, str], Slow] = {}

    def take(self, process: int, report: Mapping[str, float]) -> None:
        """Takes a report: its `step`, and the measured seconds by kind. A repeated report counts once."""
        for kind, reports in self._reports.items():
            steps = self._steps[kind][process]
            if kind in report and report["step"] > steps[-1]:
                steps[:] = [*steps[1:], report["step"]]
                reports[process] = [*reports[process, 1:], report[kind]]

    def changes(self, step_time_s: float) -> list[Slow]:
        """Returns the hosts that have become slow since the last call, or have recovered.

        Args:
            step_time_s: seconds per step, the same for all processes.
        """
        changed = []
        for kind, reports in self._reports.items():
            newest = reports[:, -REPORTS:]
            level = np.median(newest, axis=1)
            known = np.isfinite(level)
            differences = np.abs(np.diff(reports, axis=1))
            differences = differences[np.isfinite(differences)]
            if known.sum() < 2 or len(differences) < _LEAST_DIFFERENCES:
                continue
            own_noise = 1.4826 * float(np.median(differences)) / np.sqrt(2)
            middle = _middle(level)
            unit = middle if kind == "device" else step_time_s / self._ratio  # duration of a step without that loss
            enough = max((self._ratio - 1) * unit, 0.0 if kind == "device" else _LEAST_S, _OWN_NOISE * own_noise)
            for process in np.flatnonzero(known & (level - middle >= enough)):
                key = int(process), kind
                needed = max(enough, _NOISE_BETWEEN * _noise_between(level[known & (np.arange(len(level)) != process)]))
                more = level[process] - middle
                throughout = np.minimum(newest[process] - middle, more).mean() >= _THROUGHOUT * more
                if key not in self._slow and more >= needed and throughout:
                    slow = Slow(
                        process=key[0], kind=kind, seconds=float(level[process]), median_s=middle,
                        since=int(self._steps[kind][process, -REPORTS]),
                    )  # fmt: skip
                    self._slow[key] = slow
                    changed.append(slow)
            for key, slow in list(self._slow.items()):
                if key[1] == kind and level[key[0]] - middle < enough / 2:
                    del self._slow[key]
                    changed.append(replace(slow, over=True))
        return changed

    def slowest(self) -> tuple[int, float] | None:
        """Returns the process with the slowest devices, and the ratio of their time to the median; None if unknown."""
        level = np.median(self._reports["device"][:, -REPORTS:], axis=1)
        if np.isfinite(level).sum() < 2:
            return None
        process = int(np.nanargmax(level))
        return process, float(level[process] / _middle(level))


def _middle(level: Float64[np.ndarray, "processes"]) -> float:
    """Returns the median of the known values; of two, the faster one."""
    return float(np.quantile(level[np.isfinite(level)], 0.5, method="lower"))


def _noise_between(level: Float64[np.ndarray, "others"]) -> float:
    """Returns the robust standard deviation of the other hosts, which may be different machines."""
    return 1.4826 * float(np.median(np.abs(level - np.median(level))))
