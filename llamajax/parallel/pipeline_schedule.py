"""The order in which the stages of a pipeline work: 1F1B (PipeDream-Flush, arXiv:2006.09503), and its interleaved form with
several chunks of layers per stage (arXiv:2104.04473).

All stages run in lockstep. In one tick, each runs the forward pass of one micro-batch through one of its chunks, and the
backward pass of another. Three loops follow each other: ticks with forward passes only, with both, and with backward passes
only. A pass over one chunk of one micro-batch is a unit; stage s starts its unit u one tick after stage s - 1.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

DELAY = 2
"""Ticks from the forward pass of a micro-batch through the last stage to its backward pass there. The loss has one tick in
between, so that communication with the stages that share it hides behind the passes of that tick."""


class Unit(NamedTuple):
    """The pass of one micro-batch through one chunk of a stage."""

    micro_batch: jax.Array
    """In [0, micro_batches), also where the unit is not valid."""
    chunk: jax.Array
    """In [0, chunks)."""
    is_valid: jax.Array
    """False where the pipeline is still filling, or already draining."""


@dataclass(frozen=True)
class PipelineSchedule:
    """The ticks of one step.

    A schedule of several chunks needs a multiple of `stages` micro-batches.
    """

    stages: int
    micro_batches: int
    chunks: int = 1

    @property
    def units(self) -> int:
        """Returns the number of forward passes, and of backward passes, of every stage."""
        return self.micro_batches * self.chunks

    @property
    def fill(self) -> int:
        """Returns the number of first ticks, which have forward passes only; as many last ticks, and `DELAY` more, have
        backward passes only."""
        return self.chunks * self.stages - 1

    @property
    def ticks(self) -> int:
        """Returns the number of all ticks."""
        return self.units + self.stages - 1 + self.fill + DELAY

    @property
    def slots(self) -> int:
        """Returns the number of units whose values a stage keeps for their backward passes; it does not grow with the
        micro-batches."""
        return 2 * self.fill + 1 + DELAY

    def forward(self, tick: Any, stage: Any) -> Unit:
        """Returns the unit of a stage's forward pass in a tick."""
        return self._unit(tick - stage, backward=False)

    def backward(self, tick: Any, stage: Any) -> Unit:
        """Returns the unit of a stage's backward pass in a tick."""
        return self._unit(tick - self.fill - DELAY - (self.stages - 1 - stage), backward=True)

    def slot(self, tick: Any) -> Any:
        """Returns the slot in which all stages keep the values of a tick's forward pass."""
        return tick % self.slots

    def slot_of(self, unit: Unit, stage: Any) -> Any:
        """Returns the slot in which a stage has kept the values of a unit."""
        number = unit.micro_batch // self.stages * self.stages * self.chunks
        number += unit.chunk * self.stages + unit.micro_batch % self.stages
        return self.slot(number + stage)

    def _unit(self, number: Any, *, backward: bool) -> Unit:
        p, v = self.stages, self.chunks
        is_valid = (number >= 0) & (number < self.units)
        number = jnp.clip(number, 0, self.units - 1)
        chunk = number // p % v
        return Unit(number // (p * v) * p + number % p, v - 1 - chunk if backward else chunk, is_valid)
