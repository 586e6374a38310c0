"""Which of several programs is the best one: of a step with other settings, or scheduled by latencies.

Plans and training choose alike: they differ in how they compile, and share what is compiled and compared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import jax

from llamajax import disk
from llamajax.config.model import REMATS, Remat
from llamajax.config.run import Config
from llamajax.parallel import compilation_cache
from llamajax.planning.cost.attention import Scores
from llamajax.planning.cost.gpu import Machine
from llamajax.planning.cost.replay import replay
from llamajax.planning.cost.timeline import Timeline
from llamajax.planning.latencies import latency_text
from llamajax.planning.xla.parse import parse
from llamajax.processes.peers import of_first
from llamajax.step.compile import Option, compile_with, compiler_options
from llamajax.step.resolve import ResolvedRun, resolve

GUESSES = "# XLA's own guesses are better here\n"
"""Stands in for the latencies that the cost model made, where they do not help."""
FASTEST = "the fastest of five that fits by the cost model"
"""Why `model.remat: auto` comes to what `fastest_remat` finds."""
_NOT_JUDGED = "# not yet judged\n"
"""Before latencies that may turn out not to help: a start that finds them so, after a run was killed, judges anew."""


Preference = tuple[bool, float]


def preference(timeline: Timeline, *, fits: bool) -> Preference:
    """Sort key of schedules: those that fit come first, then faster ones."""
    return not fits, timeline.step_time_s


def fastest_remat(
    config: Config, mesh: Mapping[str, int], compiled: Callable[[ResolvedRun], Preference], doing: Callable[[str], None]
) -> Remat:
    """The `model.remat` whose step is preferred, of all that there are.

    Args:
        config: the run.
        mesh: sizes of the mesh axes.
        compiled: compiles the run's step, and tells its `preference`.
        doing: is told what takes so long.
    """
    found: dict[Remat, Preference] = {}
    for remat in REMATS:
        doing(f"compiling the step with model.remat: {remat}")
        found[remat] = compiled(resolve(config.changed({"model.remat": remat}), mesh))
    return min(found, key=lambda remat: found[remat])


class Timed(Protocol):
    """A compiled step of which a timeline is known."""

    @property
    def timeline(self) -> Timeline: ...


Step = TypeVar("Step", bound=Timed)


def made_latencies(run: ResolvedRun, guessed: Step, untimed: Callable[[], Step]) -> tuple[str, Step | None]:
    """The latencies that the cost model tells XLA of a step, and the step compiled in order to make them, if one was.

    Args:
        run: the run.
        guessed: its step, scheduled by XLA's own guesses.
        untimed: compiles the step as `compiler_options` with `untimed`.
    """
    other = untimed() if compiler_options(run, untimed=True) != compiler_options(run) else None
    return latency_text((other or guessed).timeline.latencies), other


class Judged(NamedTuple):
    """A program that was compiled, and what it is worth."""

    preference: Preference
    """See `preference`."""
    timeline: Timeline
    """What it does when."""
    step: jax.stages.Compiled
    """The program."""
    from_cache: bool
    """Whether jax had it from an earlier compilation."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """What programs are judged by."""

    machine: Machine
    mesh: Mapping[str, int]
    scores: Scores | None
    """See `replay`."""
    budget: float
    """Bytes that a device has for arrays."""

    def compiled(self, lowered: jax.stages.Lowered, told: dict[str, Option]) -> Judged:
        """The program, compiled with these options."""
        with compilation_cache.loaded() as loaded:
            step = compile_with(lowered, told)
        hlo, memory = step.as_text(), step.memory_analysis()
        assert hlo is not None
        assert memory is not None
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        needed = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
        timeline = replay(parse(hlo), self.machine, self.mesh, self.scores)
        return Judged(preference(timeline, fits=needed <= self.budget), timeline, step, bool(loaded))

    def latencies(self, run: ResolvedRun, lowered: jax.stages.Lowered, path: Path) -> tuple[str, Judged]:
        """Those of `lowered`, or `GUESSES` where scheduling by them does not help, and the program that goes by them.

        The first process's, since two hosts may choose other kernels; all call this together.

        Args:
            run: the run.
            lowered: its step.
            path: the file that later starts name, too: jax's cache knows a program by its options.
        """
        guessed = self.compiled(lowered, compiler_options(run))
        made, _ = made_latencies(run, guessed, lambda: self.compiled(lowered, compiler_options(run, untimed=True)))
        text = of_first(made)
        disk.keep(path, f"{_NOT_JUDGED}{text}".encode())
        informed = self.compiled(lowered, compiler_options(run, latencies=str(path)))
        helps = of_first(informed.preference < guessed.preference)
        return (text, informed) if helps else (GUESSES, guessed)
