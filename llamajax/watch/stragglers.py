"""Which host of a run is slower than the others: pure comparison of what each measured of itself.

In lockstep all hosts have the same step time, whoever is to blame, so each tells what is its own: how long its devices had
nothing to do for want of a batch, or because the host was at work between steps, and what a fixed program takes on them.
Several reports in a row must show it, since noise mostly adds time, and only now and then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

KINDS = {"device": "computes", "data": "waits for its batches", "host": "takes between steps"}
"""What is compared, and what a slow host does."""
REPORT_EVERY = 8
"""Steps between reports of a host."""
REPORTS = 5
"""Reports in a row of which the median is compared: moments 32 steps apart, or means over all of 40 steps."""

_THROUGHOUT = 0.81  # of the median's difference that all of them must show, on average: more than 32 steps of 40
_LEAST_S = 0.002  # that a host must lose in a step by its data or between steps
_OWN_NOISE = 4.0  # robust standard deviations of one host's reports that are no difference
_NOISE_BETWEEN = 4.0  # of the hosts' medians, likewise
_REMEMBERED = 16  # reports of each host that say how much they vary
_LEAST_DIFFERENCES = 8  # between a host's reports, of all hosts, without which that is not known


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A host that is slower than the others, or no longer."""

    process: int
    kind: str
    """One of `KINDS`."""
    seconds: float
    """That it takes: its devices for the fixed program, otherwise in a step."""
    median_s: float
    """That the median of the other processes takes."""
    since: int
    """Step of the first report that showed it."""
    over: bool = False
    """Whether it is as fast as the others again."""

    def line(self, host: str) -> str:
        """For people; `host` is the process's."""
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
    """The newest reports of all processes, compared; tells only what changes."""

    def __init__(self, num_processes: int, ratio: float) -> None:
        """Expects reports of `num_processes`; a step that a host makes `ratio` times as long makes it slow."""
        self._ratio = ratio
        self._reports = {kind: np.full((num_processes, _REMEMBERED), np.nan) for kind in KINDS}
        self._steps = {kind: np.zeros((num_processes, _REMEMBERED), np.int64) for kind in KINDS}
        self._slow: dict[tuple[int, str], Slow] = {}

    def take(self, process: int, report: Mapping[str, float]) -> None:
        """Takes a report: its `step`, and seconds by kind, those that were measured; one that has been taken counts once."""
        for kind, reports in self._reports.items():
            steps = self._steps[kind][process]
            if kind in report and report["step"] > steps[-1]:
                steps[:] = [*steps[1:], report["step"]]
                reports[process] = [*reports[process, 1:], report[kind]]

    def changes(self, step_time_s: float) -> list[Slow]:
        """Who has become slow since the last call, or is no longer.

        Args:
            step_time_s: what a step takes; the same for all.
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
            unit = middle if kind == "device" else step_time_s / self._ratio  # what a step would take without that
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
        """The process whose devices are slowest, and how many times the median's time they take; None if not known."""
        level = np.median(self._reports["device"][:, -REPORTS:], axis=1)
        if np.isfinite(level).sum() < 2:
            return None
        process = int(np.nanargmax(level))
        return process, float(level[process] / _middle(level))


def _middle(level: Float64[np.ndarray, "processes"]) -> float:
    """The median of those that are known; of two, the faster one."""
    return float(np.quantile(level[np.isfinite(level)], 0.5, method="lower"))


def _noise_between(level: Float64[np.ndarray, "others"]) -> float:
    """Robust standard deviation of what the others take, whose machines need not be alike."""
    return 1.4826 * float(np.median(np.abs(level - np.median(level))))
