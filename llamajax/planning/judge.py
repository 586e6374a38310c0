"""Which of two programs is the better one: of a step with other settings, or scheduled by latencies."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax

from llamajax.planning.cost.attention import Scores
from llamajax.planning.cost.gpu import Machine
from llamajax.planning.cost.replay import replay
from llamajax.planning.cost.timeline import Timeline
from llamajax.planning.latencies import FILE_NAME, latency_text
from llamajax.planning.xla.parse import parse
from llamajax.step.compile import Option, compile_with

GUESSES = "# XLA's own guesses are better here\n"
"""Stands in for the latencies that the cost model made, where they do not help."""


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
        step = compile_with(lowered, told)
        hlo, memory = step.as_text(), step.memory_analysis()
        assert hlo is not None
        assert memory is not None
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        needed = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
        timeline = replay(parse(hlo), self.machine, self.mesh, self.scores)
        return Judged(preference(timeline, fits=needed <= self.budget), timeline, step)

    def latencies(
        self, lowered: jax.stages.Lowered, options: Callable[..., dict[str, Option]]
    ) -> tuple[str, jax.stages.Compiled]:
        """Those of `lowered`, or `GUESSES` where scheduling by them does not help, and the program that goes by them.

        `options` makes the compiler's, with a file of latencies.
        """
        guessed = self.compiled(lowered, options())
        timeline = guessed.timeline
        if (untimed := options(untimed=True)) != options():
            timeline = self.compiled(lowered, untimed).timeline
        text = latency_text(timeline.latencies)
        with tempfile.TemporaryDirectory(prefix="llamajax-latencies-") as folder:
            path = Path(folder, FILE_NAME)
            path.write_text(text)
            informed = self.compiled(lowered, options(latencies=str(path)))
        return (text, informed.step) if informed.preference < guessed.preference else (GUESSES, guessed.step)
