"""Chooses the best of several programs for a step: with other settings, or scheduled with latencies.

Plans and training choose alike: they compile differently, but share the list of programs and the comparison.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import jax

from llamajax import disk
from llamajax.config.model import REMATS, Remat
from llamajax.config.run import Config
from llamajax.estimates.machine import Machine
from llamajax.parallel import compilation_cache
from llamajax.planning.cost.attention import Scores
from llamajax.planning.cost.experts import Loads
from llamajax.planning.cost.replay import replay
from llamajax.planning.cost.timeline import Timeline
from llamajax.planning.latencies import latency_text
from llamajax.planning.xla.parse import parse
from llamajax.processes.peers import of_first
from llamajax.step.compile import Option, compile_with, compiler_options
from llamajax.step.resolve import ResolvedRun, resolve

GUESSES = "# XLA's own guesses are better here\n"
"""Content of the latencies file where the cost model's latencies do not help."""
FASTEST = "the fastest of five that fits by the cost model"
"""Reason of `model.remat: auto` for the result of `fastest_remat`."""
_NOT_JUDGED = "# not yet judged\n"
"""Prefix of latencies that may turn out not to help: a start that finds it, because a run was killed, judges again."""


Preference = tuple[bool, float]


def preference(timeline: Timeline, *, fits: bool) -> Preference:
    """Sort key of schedules: those that fit come first, then faster ones."""
    return not fits, timeline.step_time_s


def fastest_remat(
    config: Config, mesh: Mapping[str, int], compiled: Callable[[ResolvedRun], Preference], doing: Callable[[str], None]
) -> Remat:
    """Returns the `model.remat` with the preferred step, among all policies.

    Args:
        config: the run.
        mesh: sizes of the mesh axes.
        compiled: compiles the run's step and returns its `preference`.
        doing: takes a line of progress.
    """
    found: dict[Remat, Preference] = {}
    for remat in REMATS:
        doing(f"compiling the step with model.remat: {remat}")
        found[remat] = compiled(resolve(config.changed({"model.remat": remat}), mesh))
    return min(found, key=lambda remat: found[remat])


class Timed(Protocol):
    """A compiled step with a known timeline."""

    @property
    def timeline(self) -> Timeline: ...


Step = TypeVar("Step", bound=Timed)


def made_latencies(run: ResolvedRun, guessed: Step, untimed: Callable[[], Step]) -> tuple[str, Step | None]:
    """Returns the latencies that the cost model gives XLA for a step, and the step compiled to compute them, if there was
    one.

    Args:
        run: the run.
        guessed: its step, scheduled with XLA's built-in estimates.
        untimed: compiles the step with the `untimed` `compiler_options`.
    """
    other = untimed() if compiler_options(run, untimed=True) != compiler_options(run) else None
    return latency_text((other or guessed).timeline.latencies), other


class Judged(NamedTuple):
    """A compiled program and its rating."""

    preference: Preference
    """Sort key of the program, see `preference`."""
    timeline: Timeline
    """Predicted times of its instructions."""
    step: jax.stages.Compiled
    """The compiled program."""
    from_cache: bool
    """Whether jax loaded it from an earlier compilation."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The machine and the limits by which programs are judged."""

    machine: Machine
    mesh: Mapping[str, int]
    scores: Scores | None
    """Scores of attention, see `replay`."""
    loads: Loads | None
    """Loads of experts, see `replay`."""
    budget: float
    """Bytes that a device has for arrays."""

    def compiled(self, lowered: jax.stages.Lowered, told: dict[str, Option]) -> Judged:
        """Compiles the program with these options and judges it."""
        with compilation_cache.loaded() as loaded:
            step = compile_with(lowered, told)
        hlo, memory = step.as_text(), step.memory_analysis()
        assert hlo is not None
        assert memory is not None
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        needed = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
        timeline = replay(parse(hlo), self.machine, self.mesh, self.scores, self.loads)
        return Judged(preference(timeline, fits=needed <= self.budget), timeline, step, bool(loaded))

    def latencies(self, run: ResolvedRun, lowered: jax.stages.Lowered, path: Path) -> tuple[str, Judged]:
        """Returns the latencies of `lowered`, or `GUESSES` where scheduling with them does not help, and the program that
        uses them.

        Process 0's result counts, because two hosts may choose other kernels; all processes call this together.

        Args:
            run: the run.
            lowered: its step.
            path: file that later starts name too: jax's cache identifies a program by its options.
        """
        guessed = self.compiled(lowered, compiler_options(run))
        made, _ = made_latencies(run, guessed, lambda: self.compiled(lowered, compiler_options(run, untimed=True)))
        text = of_first(made)
        disk.keep(path, f"{_NOT_JUDGED}{text}".encode())
        informed = self.compiled(lowered, compiler_options(run, latencies=str(path)))
        helps = of_first(informed.preference < guessed.preference)
        return (text, informed) if helps else (GUESSES, guessed)
