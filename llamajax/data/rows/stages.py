"""Mixtures that change: which rows each stage of a run takes, and how often that goes through each source.

A stage begins at a position, that of the first row behind the steps before it, and counts its proportions from there. In
rows of a length that was there before, a source goes on where it was left; rows of another length are packed anew, so that
it begins a pass of its own through them, in another order. All of it is a function of seed, stages and position: nothing
has to be kept. A step belongs to its stage whatever rows were passed over. These push positions on, and so a run out of the
end of a stage, by as many rows as it then leaves out at the beginning of the next: where weights change there, a source may
take some of these rows twice, or not at all.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import grain

from llamajax.config.data import SourceConfig, Stage
from llamajax.data.rows.order import Proportions, training_order
from llamajax.data.rows.packing import Row
from llamajax.data.rows.position import PassedOver, next_row
from llamajax.errors import ConfigError


@dataclass(frozen=True)
class StageRows:
    """What one stage of a run reads."""

    first_row: int
    """The position at which its order begins."""
    order: grain.MapDataset
    """Places of training rows by position, without end."""
    held_out_rows: Sequence[Row]
    """Rows of its length of documents that are never trained on, in an order that is always the same; may be empty."""


def takes_part(stages: Sequence[Stage], source: int, seq_len: int) -> bool:
    """Whether any stage trains on this source in rows of this length."""
    return any(stage.seq_len == seq_len and stage.weights[source] for stage in stages)


def stage_orders(
    stages: Sequence[Stage], rows: Mapping[int, Sequence[Sequence[Any]]], seed: int, global_batch_size: int
) -> list[grain.MapDataset]:
    """The order of each stage, by position in the run, from its first one on.

    Args:
        stages: all of the run, in their order.
        rows: of each source, by their length.
        seed: of the run.
        global_batch_size: rows per step.
    """
    taken: defaultdict[int, list[int]] = defaultdict(list)
    orders = []
    for stage, num_steps in zip(stages, _lengths(stages), strict=True):
        before, base = taken[stage.seq_len], stages[0].seq_len
        own_seed = seed if stage.seq_len == base else f"{seed}/{stage.seq_len}"
        first = stage.from_step * global_batch_size
        orders.append(training_order(rows[stage.seq_len], stage.weights, own_seed, first, before))
        counts = Proportions(stage.weights).counts(num_steps * global_batch_size)
        taken[stage.seq_len] = [sum(pair) for pair in itertools.zip_longest(before, counts, fillvalue=0)]
    return orders


def _lengths(stages: Sequence[Stage]) -> list[int]:
    """Steps of each stage; 0 for the last one, after which none goes on."""
    return [*(after.from_step - stage.from_step for stage, after in itertools.pairwise(stages)), 0]


@dataclass(frozen=True)
class Passes:
    """How often a run goes through its sources."""

    stages: tuple[Stage, ...]
    """All of the run, in their order."""
    num_rows: Mapping[int, Sequence[int]]
    """Training rows of each source, by their length."""
    global_batch_size: int
    """Rows per step."""

    @cached_property
    def _proportions(self) -> list[Proportions]:
        return [Proportions(stage.weights) for stage in self.stages]

    def after(self, step: int, passed_over: Sequence[PassedOver] = ()) -> list[float]:
        """Passes through each source in the first `step` steps, those in rows of other lengths added up.

        Rows that were passed over on the way count: they are used up.
        """
        size = self.global_batch_size

        def end(of_step: int) -> int:
            """The position behind the last row of a step."""
            return next_row(of_step - 1, size, passed_over) + size if of_step else 0

        epochs = [0.0] * len(self.stages[0].weights)
        ends = [*(stage.from_step for stage in self.stages[1:]), step]
        for stage, proportions, last in zip(self.stages, self._proportions, ends, strict=True):
            if (last_step := min(last, step)) > stage.from_step:
                first_row = stage.from_step * size
                before, after = (proportions.counts(end(at) - first_row) for at in (stage.from_step, last_step))
                for source, (a, b) in enumerate(zip(before, after, strict=True)):
                    epochs[source] += (b - a) / self.num_rows[stage.seq_len][source] if b > a else 0.0
        return epochs

    def check(self, sources: Sequence[SourceConfig], num_steps: int) -> None:
        """Raises `ConfigError` if the run would go through a source more often than its `max_epochs`."""
        for index, (source, epochs) in enumerate(zip(sources, self.after(num_steps), strict=True)):
            if source.max_epochs is not None and epochs > source.max_epochs:
                remedies = [*self._remedies(index, source.max_epochs, num_steps), "raise it"]
                raise ConfigError(
                    f"data.sources.{index}.max_epochs: {source.max_epochs:g} is below the {epochs:.4g} epochs that the run's"
                    f" {num_steps:,} steps would take of it; {', '.join(remedies[:-1])}{' or ' * (len(remedies) > 1)}"
                    f"{remedies[-1]}"
                )

    def _remedies(self, source: int, max_epochs: float, num_steps: int) -> list[str]:
        """What would keep a source within its epochs: a lower weight, unless it is alone, or fewer steps."""

        def at_most(candidates: range, epochs: Callable[[int], float]) -> int:
            """How many of the candidates, which take ever more epochs, are within them."""
            return bisect.bisect_left(candidates, True, key=lambda candidate: epochs(candidate) > max_epochs)

        def weighted(thousandths: int) -> float:
            return self._with_less_of(source, thousandths).after(num_steps)[source]

        remedies, lower = [], at_most(range(1, 1000), weighted)
        if lower and len(self.stages) == 1:
            remedies.append(f"lower its weight to at most {self._with_less_of(source, lower).stages[0].weights[source]:g}")
        elif lower:
            remedies.append(f"lower its weights to at most {lower / 1000:g} of what they are")
        if steps := at_most(range(1, num_steps), lambda steps: self.after(steps)[source]):
            remedies.append(f"lower train.num_steps to at most {steps}")
        return remedies

    def _with_less_of(self, source: int, thousandths: int) -> "Passes":
        """With the weights of a source times so many thousandths, in six digits."""

        def lowered(stage: Stage) -> Stage:
            less = float(f"{stage.weights[source] * thousandths / 1000:.6g}")
            return replace(stage, weights=(*stage.weights[:source], less, *stage.weights[source + 1 :]))

        return replace(self, stages=tuple(map(lowered, self.stages)))
