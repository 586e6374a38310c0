"""Mixtures that change during a run: which rows each stage takes, and how often it goes through each source.

A stage begins at a position, the first row after the steps before it, and counts its proportions from there. In rows of a
length that occurred before, a source continues where it was left. Rows of another length are packed separately, so there it
begins a pass of its own, in another order. All of this is a function of seed, stages and position, so nothing needs to be
saved. A step belongs to its stage even if rows were passed over. Passed-over rows shift all later positions, so the end of a
stage reaches beyond its rows, and as many rows are missing at the beginning of the next stage. If the weights change there,
a source may use some of these rows twice or not at all.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
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
    """Rows that one stage of a run reads."""

    first_row: int
    """Position at which its order begins."""
    order: grain.MapDataset
    """Places of training rows by position, without end."""
    held_out_rows: Sequence[Row]
    """Rows of its length from documents that are never trained on, in a fixed order; may be empty."""


def takes_part(stages: Sequence[Stage], source: int, seq_len: int) -> bool:
    """Returns whether any stage trains on this source in rows of this length."""
    return any(stage.seq_len == seq_len and stage.weights[source] for stage in stages)


def stage_orders(
    stages: Sequence[Stage], rows: Mapping[int, Sequence[Sequence[Any]]], seed: int, rows_after: Callable[[int], int]
) -> list[grain.MapDataset]:
    """Returns the order of each stage, by position in the run, from its first one on.

    Args:
        stages: all stages of the run, in order.
        rows: rows of each source, by row length.
        seed: seed of the run.
        rows_after: returns the number of rows of the first steps.
    """
    taken: defaultdict[int, list[int]] = defaultdict(list)
    orders = []
    ends = [*(rows_after(stage.from_step) for stage in stages[1:]), None]
    for stage, end in zip(stages, ends, strict=True):
        before, base = taken[stage.seq_len], stages[0].seq_len
        own_seed = seed if stage.seq_len == base else f"{seed}/{stage.seq_len}"
        first = rows_after(stage.from_step)
        orders.append(training_order(rows[stage.seq_len], stage.weights, own_seed, first, before))
        counts = Proportions(stage.weights).counts(0 if end is None else end - first)
        taken[stage.seq_len] = [sum(pair) for pair in itertools.zip_longest(before, counts, fillvalue=0)]
    return orders


@dataclass(frozen=True)
class Passes:
    """Number of passes of a run through its sources."""

    stages: tuple[Stage, ...]
    """All stages of the run, in order."""
    num_rows: Mapping[int, Sequence[int]]
    """Number of training rows of each source, by row length."""
    rows_after: Callable[[int], int]
    """Returns the number of rows of the first steps."""

    @cached_property
    def _proportions(self) -> list[Proportions]:
        return [Proportions(stage.weights) for stage in self.stages]

    def after(self, step: int, passed_over: Sequence[PassedOver] = ()) -> list[float]:
        """Returns the passes through each source in the first `step` steps, added up over all row lengths.

        Rows that were passed over count as used.
        """
        rows_after = self.rows_after

        def end(of_step: int) -> int:
            """Returns the position after the last row of a step."""
            before = of_step - 1
            return next_row(before, rows_after, passed_over) + rows_after(of_step) - rows_after(before) if of_step else 0

        epochs = [0.0] * len(self.stages[0].weights)
        ends = [*(stage.from_step for stage in self.stages[1:]), step]
        for stage, proportions, last in zip(self.stages, self._proportions, ends, strict=True):
            if (last_step := min(last, step)) > stage.from_step:
                first_row = rows_after(stage.from_step)
                begun, read = (proportions.counts(end(at) - first_row) for at in (stage.from_step, last_step))
                for source, (a, b) in enumerate(zip(begun, read, strict=True)):
                    epochs[source] += (b - a) / self.num_rows[stage.seq_len][source] if b > a else 0.0
        return epochs

    def num_steps(self, num_epochs: float) -> int:
        """Returns the fewest steps that read `num_epochs` times the rows of all sources of their stage."""

        def has_read(step: int) -> bool:
            ends = [*(stage.from_step for stage in self.stages[1:]), step]
            read = Fraction(0)
            for stage, end in zip(self.stages, ends, strict=True):
                rows = self.rows_after(max(stage.from_step, min(end, step))) - self.rows_after(stage.from_step)
                read += Fraction(rows, self.rows_of(stage))
            return read >= Fraction(str(num_epochs))

        return bisect.bisect_left(range(2**62), True, lo=1, key=has_read)

    def rows_of(self, stage: Stage) -> int:
        """Returns the number of rows of all sources that a stage takes rows from."""
        return sum(rows for rows, weight in zip(self.num_rows[stage.seq_len], stage.weights, strict=True) if weight)

    def check(self, sources: Sequence[SourceConfig], num_steps: int) -> None:
        """Raises `ConfigError` if the run would go through a source more often than its `max_epochs`."""
        for index, (source, epochs) in enumerate(zip(sources, self.after(num_steps), strict=True)):
            if source.max_epochs is not None and epochs > source.max_epochs:
                remedies = [*self._remedies(index, source.max_epochs, num_steps), "raise it"]
                raise ConfigError(
                    f"data.sources.{index}.max_epochs: {source.max_epochs:g} is below the {epochs:.4g} epochs that the run's"
                    f" {num_steps:,} steps would make through it; {', '.join(remedies[:-1])}{' or ' * (len(remedies) > 1)}"
                    f"{remedies[-1]}"
                )

    def _remedies(self, source: int, max_epochs: float, num_steps: int) -> list[str]:
        """Returns what would keep a source within its epochs: a lower weight, unless it is the only one, or fewer steps."""

        def at_most(candidates: range, epochs: Callable[[int], float]) -> int:
            """Returns how many of the candidates, which need ever more epochs, stay within the limit."""
            return bisect.bisect_left(candidates, True, key=lambda candidate: epochs(candidate) > max_epochs)

        def weighted(thousandths: int) -> float:
            return self._with_less_of(source, thousandths).after(num_steps)[source]

        remedies, lower = [], at_most(range(1, 1000), weighted)
        if lower and len(self.stages) == 1:
            remedies.append(f"lower its weight to at most {self._with_less_of(source, lower).stages[0].weights[source]:g}")
        elif lower:
            remedies.append(f"lower its weights to at most {lower / 1000:g} of their values")
        if steps := at_most(range(1, num_steps), lambda steps: self.after(steps)[source]):
            remedies.append(f"lower train.num_steps to at most {steps}")
        return remedies

    def _with_less_of(self, source: int, thousandths: int) -> "Passes":
        """Returns the passes with the weights of a source scaled by this many thousandths, rounded to six digits."""

        def lowered(stage: Stage) -> Stage:
            less = float(f"{stage.weights[source] * thousandths / 1000:.6g}")
            return replace(stage, weights=(*stage.weights[:source], less, *stage.weights[source + 1 :]))

        return replace(self, stages=tuple(map(lowered, self.stages)))
