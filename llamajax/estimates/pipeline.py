"""A pipeline by arithmetic: the layers of a device, the values that it keeps, and the ticks of a step.

`llamajax.parallel.pipeline_schedule` runs these ticks. A mesh without a pipeline is one stage.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from llamajax.config.parallel import num_parts, splits_residual
from llamajax.config.run import Config
from llamajax.config.stages import layers_of_stages


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """The work of one device of a pipeline in a step."""

    stages: int
    chunks: int
    """Chunks of layers per stage."""
    micro_batches: int
    num_layers: int
    """Layers of the model."""
    counts: tuple[int, ...] = ()
    """Layers of each stage, `mesh.stages`; empty: as evenly as possible."""
    dense: tuple[int, ...] = ()
    """See `ModelConfig.dense_layers`."""

    @staticmethod
    def of(config: Config, mesh: Mapping[str, int]) -> "StageWork":
        """Returns the work of a device; `parallel.pipeline_chunks` must be resolved, or unset for one chunk."""
        return StageWork(
            stages=mesh["pipeline"],
            chunks=config.parallel.pipeline_chunks or 1,
            micro_batches=config.train.grad_accum_steps,
            num_layers=config.model.num_layers,
            counts=config.mesh.stages,
            dense=config.model.dense_layers,
        )

    @property
    def layers(self) -> int:
        """Returns the number of layers that a device holds; empty slots count."""
        return self.layers_of("layers") + self.layers_of("dense_layers")

    def layers_of(self, stack: str) -> int:
        """Returns the number of layers of one of the model's stacks that a device holds; empty slots count."""
        return self.chunks * self.slots_of(stack)

    def slots_of(self, stack: str) -> int:
        """Returns the number of slots in a chunk for layers of one of the model's stacks, `layers` or `dense_layers`."""
        table = layers_of_stages(self.num_layers, self.stages, self.chunks, self.counts, self.dense)
        slots = zip(*itertools.chain(*table), strict=True)
        return sum((max(layers) in self.dense) == (stack == "dense_layers") for layers in slots)

    @property
    def units(self) -> int:
        """Returns the number of passes of a micro-batch through a chunk, in each direction."""
        return self.micro_batches * self.chunks

    @property
    def delay(self) -> int:
        """Returns the ticks between a micro-batch's forward pass through the last stage and its backward pass there."""
        return 2 if self.stages > 1 else 0

    @property
    def fill(self) -> int:
        """Returns the number of first ticks, which have forward passes only."""
        return self.stages * self.chunks - 1

    @property
    def both(self) -> int:
        """Returns the number of ticks with forward and backward passes."""
        return self.forward_passes - self.fill

    @property
    def drain(self) -> int:
        """Returns the number of last ticks, which have backward passes only."""
        return self.fill + self.delay

    @property
    def forward_passes(self) -> int:
        """Returns the number of ticks with a forward pass through a chunk, those of an idle stage included."""
        return self.units + self.stages - 1

    @property
    def backward_passes(self) -> int:
        """Returns the number of ticks with a backward pass through a chunk, those of an idle stage included."""
        return self.both + self.drain

    @property
    def heads(self) -> int:
        """Returns how often a stage computes the head, once without a micro-batch; with several chunks, conditions skip
        ticks without one."""
        return self.micro_batches + (self.stages > 1 and self.chunks == 1)

    @property
    def slots(self) -> int:
        """Returns the number of passes that a device keeps the values of."""
        return 2 * self.fill + 1 + self.delay

    @property
    def layers_per_chunk(self) -> int:
        return self.layers // self.chunks

    @property
    def bubble(self) -> float:
        """Returns the number of passes in which a stage waits for others, relative to those in which it works."""
        return (self.forward_passes + self.backward_passes) / (2 * self.units) - 1

    @property
    def exchanges(self) -> int:
        """Returns how often a stage's layers change devices between the stored state and compute: never if a stage stores
        the layers of its only chunk; by columns of all layers otherwise, which even counts of layers reach first."""
        even = self.num_layers % self.stages == 0 and not self.dense
        return 0 if even and self.layers * self.stages == self.num_layers and self.chunks == 1 else 1 + even


def residual_tokens(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the tokens of a row in the residual stream of a device."""
    is_split = splits_residual(config.data.seq_len, mesh)
    return config.data.seq_len // num_parts("residual_seq" if is_split else "seq", mesh)


def share_of_head(config: Config, mesh: Mapping[str, int]) -> float:
    """Returns a device's share of the head's work on a micro-batch: all of it, or, where the stages share it, a part of the
    tokens with its padding."""
    tokens, p = residual_tokens(config, mesh), mesh["pipeline"]
    return -(-tokens // p) / tokens if config.parallel.pipeline_head == "shared" else 1.0
