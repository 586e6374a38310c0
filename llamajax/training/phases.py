"""Tracks which phase each thread of a run is in, since when, and how long the phase may last."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llamajax.config.recovery import WatchdogConfig

SETTINGS = {
    "start": "start_s",
    "compile": "compile_s",
    "load": "load_s",
    "first step": "compile_s",
    "step": "step_s",
    "save": "save_s",
    "evaluate": "evaluate_s",
    "rollout": "rollout_s",
}
"""Every kind of phase, with the setting of `WatchdogConfig` that is the minimum for its limit."""

_FIRST = "first step"  # tunes kernels and sets up collectives, so its time says little about later steps


@dataclass(kw_only=True)
class Phase:
    """One phase of one thread. Its clock pauses during a nested phase."""

    kind: str
    """A key of `SETTINGS`."""
    setting: str
    """Name of the `WatchdogConfig` setting that raises the limit."""
    limit: float
    """Seconds that the phase may take; infinite if the watchdog is off."""
    resumed: float
    """Time at which the clock last resumed."""
    spent: float = 0.0
    """Seconds on the clock at that time."""
    doing: str = ""
    """Current activity in more detail, for people."""
    longest: float = 0.0
    """Most seconds that the clock has shown before a restart."""
    grace: float = 0.0
    """Seconds above the limit during which another process may report that it is the stuck one."""

    def took(self, now: float) -> float:
        """Returns the seconds on the clock, assuming that it runs."""
        return self.spent + now - self.resumed

    def deadline(self) -> float:
        """Returns the time at which the phase counts as stuck, assuming that its clock keeps running."""
        return self.resumed - self.spent + self.limit + self.grace

    def restart(self, now: float) -> None:
        """Sets the clock to 0."""
        self.longest = max(self.longest, self.took(now))
        self.resumed, self.spent, self.grace = now, 0.0, 0.0

    def allow(self, limit: float, setting: str) -> None:
        """Raises the limit when the phase turns out to do longer work, and names the setting of that work."""
        if limit > self.limit:
            self.limit, self.setting = limit, setting


class Phases:
    """The phases of all threads, nested per thread, and the longest time that each kind of phase has taken."""

    def __init__(self, config: WatchdogConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts without any phase.

        Args:
            config: minimum limits and the factor.
            clock: returns seconds since an arbitrary start.
        """
        self._config, self._clock = config, clock
        self._of_threads: dict[int, list[Phase]] = {}
        self._longest: dict[str, float] = {}
        self._changing = threading.RLock()

    def limit(self, kind: str) -> float:
        """Returns the seconds that a phase starting now may take."""
        if not self._config.enabled:
            return math.inf
        longest = 0.0 if kind == _FIRST else self._longest.get(kind, 0.0)
        if kind == "step" and not longest:
            longest = self._longest.get(_FIRST, 0.0)
        return max(getattr(self._config, SETTINGS[kind]), self._config.factor * longest)

    def begin(self, kind: str) -> None:
        """Ends the innermost phase of the calling thread, if there is one, and starts another in its place."""
        with self._changing:
            phases = self._of_threads.setdefault(threading.get_ident(), [])
            if phases:
                self._learn(phases.pop())
            phases.append(self._new(kind))

    def forget(self, kind: str) -> None:
        """Forgets how long phases of this kind have taken, because later ones differ."""
        with self._changing:
            self._longest.pop(kind, None)

    @contextlib.contextmanager
    def within(self, kind: str) -> Iterator[None]:
        """Nests a phase in the current phase of the calling thread, if any. A phase that ends with an error is not
        recorded."""
        own = threading.get_ident()
        with self._changing:
            phases = self._of_threads.setdefault(own, [])
            if phases:
                phases[-1].spent = phases[-1].took(self._clock())
            phases.append(self._new(kind))
        try:
            yield
            with self._changing:
                self._learn(phases[-1])
        finally:
            with self._changing:
                phases.pop()
                if phases:
                    phases[-1].resumed = self._clock()
                else:
                    del self._of_threads[own]

    def of(self, thread: int) -> Phase | None:
        """Returns the innermost phase of the thread."""
        with self._changing:
            phases = self._of_threads.get(thread)
            return phases[-1] if phases else None

    def running(self) -> list[tuple[int, Phase]]:
        """Returns the innermost phase of every thread that is in one."""
        with self._changing:
            return [(thread, phases[-1]) for thread, phases in self._of_threads.items()]

    def deadline(self) -> float:
        """Returns the earliest time at which a running phase counts as stuck."""
        return min((phase.deadline() for _, phase in self.running()), default=math.inf)

    def stand_still(self, seconds: float) -> None:
        """Excludes this time from all running phases: the whole process was suspended during it."""
        for _, phase in self.running():
            phase.resumed += seconds

    def _new(self, kind: str) -> Phase:
        return Phase(kind=kind, setting=SETTINGS[kind], limit=self.limit(kind), resumed=self._clock())

    def _learn(self, done: Phase) -> None:
        self._longest[done.kind] = max(self._longest.get(done.kind, 0.0), done.longest, done.took(self._clock()))
