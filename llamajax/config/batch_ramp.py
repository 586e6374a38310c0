"""The ramp of the global batch: its settings, and the batch size and data position of every step."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llamajax.config.rules import PositiveIntOrUnset, Section


@dataclass(frozen=True, kw_only=True)
class BatchRampConfig(Section):
    """Growth of the global batch from `start` to `train.global_batch_size` in equal increments. The three numbers are those
    of Megatron-LM's `--rampup-batch-size`; without them, all steps have the full batch."""

    start: PositiveIntOrUnset = None
    """Sequences of the first step; unset: no ramp."""
    increment: PositiveIntOrUnset = None
    """Sequences that each increment adds to the batch. It divides the growth, and micro-batches divide it."""
    sequences: PositiveIntOrUnset = None
    """Sequences over which the increments are spread evenly. The sequences of all earlier steps decide the size of a batch,
    which is full after this many: 5859375 are 12 billion tokens in rows of 2,048."""

    def broken_rules(self) -> Iterator[str]:
        numbers = {"start": self.start, "increment": self.increment, "sequences": self.sequences}
        missing = [name for name, number in numbers.items() if number is None]
        if 0 < len(missing) < len(numbers):
            yield f"{missing[0]}: a ramp needs start, increment and sequences; set it, or leave all three unset"


class BatchPhase(NamedTuple):
    """Consecutive steps with the same batch size."""

    from_step: int
    """Number of finished steps after which the phase begins."""
    first_row: int
    """Number of sequences in all earlier steps."""
    batch_size: int
    """Sequences per step."""


@functools.lru_cache(maxsize=64)
def batch_phases(ramp: BatchRampConfig, global_batch_size: int) -> tuple[BatchPhase, ...]:
    """Returns the phases of a run in order; the last one, with the full batch, has no end."""
    phases, step, row = list[BatchPhase](), 0, 0
    if ramp.start and ramp.increment and ramp.sequences:
        num_increments = (global_batch_size - ramp.start) // ramp.increment
        for reached in range(num_increments):
            batch_size = ramp.start + reached * ramp.increment
            next_at = -(-(reached + 1) * ramp.sequences // num_increments)
            num_steps = max(0, -(-(next_at - row) // batch_size))
            if num_steps:  # a step may reach several increments
                phases.append(BatchPhase(step, row, batch_size))
            step, row = step + num_steps, row + num_steps * batch_size
    return *phases, BatchPhase(step, row, global_batch_size)
