"""What the threads of a run are at, since when, and until when that may last."""

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
}
"""Every kind of phase, and which setting of `WatchdogConfig` it may always take."""

_FIRST = "first step"  # it tunes kernels and brings up collectives, which says little of later ones


@dataclass(kw_only=True)
class Phase:
    """One phase of one thread. Its clock stands still while another one is within it."""

    kind: str
    """A key of `SETTINGS`."""
    setting: str
    """Of `WatchdogConfig`, which raises its limit."""
    limit: float
    """Seconds that it may take; infinite if nobody watches."""
    resumed: float
    """When its clock last began to run."""
    spent: float = 0.0
    """Seconds on its clock until then."""
    doing: str = ""
    """More exactly, for people."""
    longest: float = 0.0
    """Seconds that its clock has shown at most."""
    grace: float = 0.0
    """Seconds above its limit, in which another process may say that it is the one that is stuck."""

    def took(self, now: float) -> float:
        """Seconds on its clock, if that runs."""
        return self.spent + now - self.resumed

    def deadline(self) -> float:
        """When it counts as stuck, if its clock runs on until then."""
        return self.resumed - self.spent + self.limit + self.grace

    def restart(self, now: float) -> None:
        """Sets its clock to 0."""
        self.longest = max(self.longest, self.took(now))
        self.resumed, self.spent, self.grace = now, 0.0, 0.0

    def allow(self, limit: float, setting: str) -> None:
        """Lets it take as long as what it has turned out to be, by that one's setting."""
        if limit > self.limit:
            self.limit, self.setting = limit, setting


class Phases:
    """The phases of all threads, each thread's within each other, and how long those of a kind have taken."""

    def __init__(self, config: WatchdogConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is begun yet.

        Args:
            config: floors and factor of the limits.
            clock: seconds since anything.
        """
        self._config, self._clock = config, clock
        self._of_threads: dict[int, list[Phase]] = {}
        self._longest: dict[str, float] = {}
        self._changing = threading.RLock()

    def limit(self, kind: str) -> float:
        """Seconds that a phase which begins now may take."""
        if not self._config.enabled:
            return math.inf
        longest = 0.0 if kind == _FIRST else self._longest.get(kind, 0.0)
        if kind == "step" and not longest:
            longest = self._longest.get(_FIRST, 0.0)
        return max(getattr(self._config, SETTINGS[kind]), self._config.factor * longest)

    def begin(self, kind: str) -> None:
        """The calling thread has done with the innermost phase it was in, if any, and begins another in its place."""
        with self._changing:
            phases = self._of_threads.setdefault(threading.get_ident(), [])
            if phases:
                self._learn(phases.pop())
            phases.append(self._new(kind))

    def forget(self, kind: str) -> None:
        """How long phases of a kind have taken tells nothing of those to come."""
        with self._changing:
            self._longest.pop(kind, None)

    @contextlib.contextmanager
    def within(self, kind: str) -> Iterator[None]:
        """A phase of the calling thread, within the one it is in, if any; one that ends by an error teaches nothing."""
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
        """The innermost phase of the thread."""
        with self._changing:
            phases = self._of_threads.get(thread)
            return phases[-1] if phases else None

    def running(self) -> list[tuple[int, Phase]]:
        """The innermost phase of every thread that is in one."""
        with self._changing:
            return [(thread, phases[-1]) for thread, phases in self._of_threads.items()]

    def deadline(self) -> float:
        """When the first of those that run counts as stuck."""
        return min((phase.deadline() for _, phase in self.running()), default=math.inf)

    def stand_still(self, seconds: float) -> None:
        """Takes from all that run what just passed without any of them."""
        for _, phase in self.running():
            phase.resumed += seconds

    def _new(self, kind: str) -> Phase:
        return Phase(kind=kind, setting=SETTINGS[kind], limit=self.limit(kind), resumed=self._clock())

    def _learn(self, done: Phase) -> None:
        self._longest[done.kind] = max(self._longest.get(done.kind, 0.0), done.longest, done.took(self._clock()))
