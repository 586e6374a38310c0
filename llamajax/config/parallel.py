"""Devices and processes: the mesh, how its devices share the work, and runs of several processes."""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from llamajax.config.rules import Bound, NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveIntOrUnset, Section
from llamajax.errors import ConfigError

TensorForm = Literal["auto", "collective", "ring"]
StackForm = Literal["auto", "scan", "prefetch", "unrolled"]
SequenceForm = Literal["auto", "gather", "ring", "ulysses"]
Reduction = Literal["auto", "micro", "step"]
PipelineForm = Literal["auto", "1f1b", "interleaved"]
HeadForm = Literal["auto", "shared", "last"]
ExchangeForm = Literal["auto", "blocks", "ragged"]
ZeroStage = Annotated[int, Bound(lambda value: value in (1, 2, 3), "must be 1, 2 or 3")]
ZeroStageOrNone = Annotated[int, Bound(lambda value: value in (0, 1), "must be 0 or 1")]
AxisSize = Annotated[int, Bound(lambda value: value == -1 or value > 0, "must be positive, or -1 for the rest")]
_STATE = ("embed", "embed_tensor", "expert_shards")
"""Dims of the state that axes with different tokens split."""
_OF_TENSOR = ("kv_heads", "mlp", "vocab", "residual_seq", "embed_tensor", "experts", "expert_shards")


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Number of devices along each mesh axis; `-1` on one axis takes the rest."""

    # The only ordered list of axes, outer to inner: the more an axis communicates, the closer its devices are.
    # `splits` are the dims of arrays that an axis splits. `micro_batch` is the rows of one micro-batch; `batch` is the rows
    # that devices compute at once, for every stage of a pipeline those of another micro-batch.
    pipeline: AxisSize = field(default=1, metadata={"splits": ("batch", "layers")})
    """Stages of a pipeline. Each holds some of the layers, and all of them work at once, on different micro-batches."""
    data: AxisSize = field(default=1, metadata={"splits": ("batch", "micro_batch")})
    """Data-parallel replicas. Each holds the whole (sharded) state, unless `parallel.zero_data` splits that too."""
    fsdp: AxisSize = field(default=-1, metadata={"splits": ("batch", "micro_batch", *_STATE, "expert_embed")})
    """Shards of parameters, gradients and optimizer state (ZeRO). The axis also splits the batch."""
    expert: AxisSize = field(default=1, metadata={"splits": ("batch", "micro_batch", *_STATE, "experts")})
    """Shards of the experts of `model.experts` (expert parallelism). The devices of this axis have different tokens, which
    travel to the experts that they chose and back; so they shard all other parts of the state as `fsdp` does."""
    sequence: AxisSize = field(default=1, metadata={"splits": ("seq", "residual_seq", *_STATE, "expert_embed")})
    """Shards of the sequence (context parallelism). The devices of this axis have different tokens, so they shard the state
    as well."""
    tensor: AxisSize = field(default=1, metadata={"splits": _OF_TENSOR})
    """Shards of heads, MLP, vocabulary and experts (tensor parallelism). Between these the axis also splits tokens, where it
    divides a row's part (sequence parallelism). Key/value heads may be fewer than the axis, if they divide it; a vocabulary
    may have any size."""
    stages: tuple[int, ...] = ()
    """Number of layers of each stage of `mesh.pipeline`, such as [26, 22], for stages of unequal speed. Each stage then runs
    its own programs. Empty: the stages share the layers evenly, in one program."""
    num_cpu_devices: PositiveIntOrUnset = None
    """Devices per process that the CPU emulates; unset: use the accelerators that jax finds."""

    def broken_rules(self) -> Iterator[str]:
        automatic = [axis for axis in AXES if getattr(self, axis) == -1]
        if len(automatic) > 1:
            chosen = next(axis for axis in automatic if axis != "fsdp")  # fsdp is -1 by default, so point at the other line
            yield f"{chosen}: {' and '.join(automatic)} are both -1; only one axis can take the rest"
        if any(count < 1 for count in self.stages):
            yield f"stages: {list(self.stages)} must be positive numbers of layers"
        if self.stages and (len(self.stages) == 1 or self.pipeline not in (-1, len(self.stages))):
            yield f"stages: {list(self.stages)} must name the layers of 2 or more stages; pipeline={self.pipeline}"

    def axis_sizes(self, num_devices: int) -> dict[str, int]:
        """Returns the size of every configured axis on `num_devices` devices, with the automatic axis resolved.

        Raises:
            ConfigError: the sizes do not multiply to `num_devices`.
        """
        sizes = {axis: getattr(self, axis) for axis in AXES}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if -1 in sizes.values():
            if num_devices % fixed:
                raise ConfigError(f"mesh: {product(sizes)} = {fixed} does not divide the {num_devices} devices")
            return {axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()}
        if fixed != num_devices:
            there = "there is 1 device" if num_devices == 1 else f"there are {num_devices} devices"
            raise ConfigError(f"mesh: {product(sizes)} = {fixed}, but {there}; set one axis to -1 for the rest")
        return sizes


_SPLITS: dict[str, tuple[str, ...]] = {
    axis.name: axis.metadata["splits"] for axis in dataclasses.fields(MeshConfig) if "splits" in axis.metadata
}
_DIMS = (*dict.fromkeys(dim for dims in _SPLITS.values() for dim in dims), "head_dim")
AXES = tuple(_SPLITS)
"""Names of the mesh axes, outer to inner."""


def axes_of(dim: str) -> tuple[str, ...]:
    """Returns the mesh axes that split a dim, outer to inner; no axes for `head_dim`.

    Raises:
        ValueError: no array has such a dim.
    """
    if dim not in _DIMS:
        guess = "".join(f"; did you mean {name!r}?" for name in difflib.get_close_matches(dim, _DIMS, n=1))
        raise ValueError(f"unknown logical axis {dim!r}{guess} (known: {', '.join(_DIMS)})")
    axes = tuple(axis for axis, dims in _SPLITS.items() if dim in dims)
    # Gathered over the other axes, the experts of a device are consecutive.
    return tuple(sorted(axes, key=lambda axis: axis not in axes_of("experts"))) if dim == "expert_shards" else axes


def num_parts(dim: str, sizes: Mapping[str, int]) -> int:
    """Returns the number of parts into which a mesh with axes of these sizes splits a dim."""
    return math.prod(sizes[axis] for axis in axes_of(dim))


def splits_residual(seq_len: int, sizes: Mapping[str, int]) -> bool:
    """Whether the residual stream of rows of `seq_len` tokens is split over `residual_seq`. It is if axes of these sizes
    divide the rows; otherwise it is split over `seq`, as everything else is."""
    return seq_len % num_parts("residual_seq", sizes) == 0


def product(sizes: Mapping[str, int]) -> str:
    """Returns `data(2) x fsdp(4)`, without an axis that takes the rest."""
    return " x ".join(f"{axis}({size})" for axis, size in sizes.items() if size != -1)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """How the devices of the mesh share the work; every choice gives the same numbers."""

    stack: StackForm = "auto"
    """Loop over the layers. `scan` gathers the weights of a layer when the layer computes. `prefetch` gathers those of the
    next layer, and reduces the gradients of the last one, while a layer computes. `unrolled` does the same without a loop,
    so that values kept for the backward pass are not copied, in a program that grows with the number of layers."""
    zero: ZeroStage = 3
    """ZeRO stage: what `mesh.fsdp` and `mesh.sequence` split. 1: weights and optimizer state between steps; 2: also
    gradients of micro-batches; 3: also weights during the step. Below 3, every device holds all weights in `compute_dtype`
    during the step. At 1, it also holds all gradients in `train.grad_accum_dtype` until they are reduced at the end of the
    step."""
    zero_data: ZeroStageOrNone = 0
    """ZeRO stage of `mesh.data`. 0: every replica along that axis holds everything. 1: weights and optimizer state are split
    between steps; weights are gathered over the axis once per step, and gradients reduced over it once."""
    grad_reduce: Reduction = "auto"
    """When gradients are summed over devices that do not split them. `micro`: after every micro-batch. `step`: at the end of
    the step, which sends them once however many micro-batches there are; embedding, head and first layer are then also
    gathered and reduced once, so a device holds them whole."""
    sequence: SequenceForm = "auto"
    """How attention sees rows that `mesh.sequence` splits. `gather` brings all keys and values of a row to every device.
    `ring` passes them from device to device while others compute; `data.seq_len` must be a multiple of twice the axis.
    `ulysses` exchanges tokens for heads, so that a device has whole rows of some heads; the axis must divide the heads."""
    tensor: TensorForm = "auto"
    """How tokens reach the matmuls that `mesh.tensor` splits, and how their sums return. `collective` gathers before and
    scatters after. `ring` passes tokens and sums from device to device while devices multiply."""

    expert_slots: NonNegativeFloat = 1.25
    """Tokens that a device can send to each device of its experts at once, over the balanced number. Other tokens follow in
    further rounds, so none is lost, but all devices wait for these. 0: as many as could ever go to one device."""
    expert_exchange: ExchangeForm = "auto"
    """How tokens travel to experts. `blocks`, which `auto` resolves to: all slots, filled or not. `ragged`: filled ones
    alone, once devices know how many come. XLA has it for GPUs, where it may pay between nodes: the plan tells."""
    expert_parts: PositiveIntOrUnset = None
    """Parts of a device's rows that take turns at the experts: the tokens of one travel while the device computes with
    another. At most the rows that a device has of a micro-batch; unset: by formulas."""

    pipeline: PipelineForm = "auto"
    """Order in which the stages of `mesh.pipeline` work. `1f1b`, which `auto` resolves to: each stage has consecutive
    layers. `interleaved`: each has several chunks of layers, so that stages wait less at the start and end of a step, and
    send more often; `train.grad_accum_steps` must be a multiple of the stages."""
    pipeline_chunks: PositiveIntOrUnset = None
    """`interleaved`: chunks of layers per stage; unset: the fewest that divide the layers evenly."""
    pipeline_head: HeadForm = "auto"
    """Stages that compute head and loss. `shared`: all stages, each for its share of the tokens, which the last stage sends.
    `last`: the last stage, while the others wait."""

    @property
    def prefetches(self) -> bool:
        """Whether the weights of a layer arrive while another layer computes."""
        return self.stack in ("prefetch", "unrolled")

    def broken_rules(self) -> Iterator[str]:
        if self.pipeline == "1f1b" and self.pipeline_chunks not in (None, 1):
            yield f"pipeline_chunks: {self.pipeline_chunks} has no effect with pipeline: 1f1b; set interleaved, or remove it"
        if self.pipeline == "interleaved" and self.pipeline_chunks == 1:
            yield "pipeline_chunks: 1 is not interleaved; set 2 or more, or pipeline: 1f1b"
        if self.zero == 1 and self.grad_reduce == "micro":
            yield "grad_reduce: micro scatters gradients after every micro-batch, as zero: 2 does; choose that, or step"


PLAIN = ParallelConfig(stack="scan", sequence="gather", tensor="collective", grad_reduce="micro", expert_exchange="blocks")
"""Settings that work for every mesh and every model."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Section):
    """Several processes (hosts) in one run, joined by jax.distributed."""

    enabled: bool = False
    """Join the other processes. Under Slurm and Open MPI, the addresses below are found automatically."""
    coordinator_address: str | None = None
    """Address `host:port` of process 0; unset: found in the launcher's environment."""
    num_processes: PositiveIntOrUnset = None
    """Number of processes in the run; unset: LLAMAJAX_NUM_PROCESSES, else found in the launcher's environment."""
    process_id: NonNegativeInt | None = None
    """Rank of this process; unset: LLAMAJAX_PROCESS_ID, else found in the launcher's environment."""
    heartbeat_timeout_s: PositiveInt = 30
    """Seconds without a sign of life after which a process counts as lost."""
    initialization_timeout_s: PositiveInt = 300
    """Seconds to wait for all processes at the start."""

    def broken_rules(self) -> Iterator[str]:
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            yield f"process_id: {self.process_id} must be below num_processes={self.num_processes}"
        for name in ("coordinator_address", "num_processes", "process_id"):
            if not self.enabled and getattr(self, name) is not None:
                yield f"{name}: has no effect unless enabled is true; set it, or remove this"
