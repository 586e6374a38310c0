"""Which of two programs is the better one: of a step with other settings, or scheduled by latencies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax

from llamajax import disk
from llamajax.parallel import compilation_cache
from llamajax.planning.cost.attention import Scores
from llamajax.planning.cost.gpu import Machine
from llamajax.planning.cost.replay import replay
from llamajax.planning.cost.timeline import Timeline
from llamajax.planning.latencies import latency_text
from llamajax.planning.xla.parse import parse
from llamajax.processes.peers import of_first
from llamajax.step.compile import Option, compile_with

GUESSES = "# XLA's own guesses are better here\n"
"""Stands in for the latencies that the cost model made, where they do not help."""
_NOT_JUDGED = "# not yet judged\n"
"""Before latencies that may turn out not to help: a start that finds them so, after a run was killed, judges anew."""


def preference(timeline: Timeline, *, fits: bool) -> tuple[bool, float]:
    """The least of several schedules' is the best one's: what fits before what does not, and then the faster one."""
    return not fits, timeline.step_time_s


class Judged(NamedTuple):
    """A program that was compiled, and what it is worth."""

    preference: tuple[bool, float]
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

    def latencies(
        self, lowered: jax.stages.Lowered, options: Callable[..., dict[str, Option]], path: Path
    ) -> tuple[str, Judged]:
        """Those of `lowered`, or `GUESSES` where scheduling by them does not help, and the program that goes by them.

        The first process's, since two hosts may choose other kernels; all call this together.

        Args:
            lowered: the step.
            options: makes the compiler's, with a file of latencies.
            path: the file that later starts name, too: jax's cache knows a program by its options.
        """
        guessed = self.compiled(lowered, options())
        timeline = guessed.timeline
        if (untimed := options(untimed=True)) != options():
            timeline = self.compiled(lowered, untimed).timeline
        text = of_first(latency_text(timeline.latencies))
        disk.keep(path, f"{_NOT_JUDGED}{text}".encode())
        informed = self.compiled(lowered, options(latencies=str(path)))
        helps = of_first(informed.preference < guessed.preference)
        return (text, informed) if helps else (GUESSES, guessed)
