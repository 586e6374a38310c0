"""Devices and processes: the mesh, and several processes in one run."""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from llamajax.config.rules import Bound, NonNegativeInt, PositiveInt, PositiveIntOrUnset, Section
from llamajax.errors import ConfigError

TensorForm = Literal["auto", "collective", "ring"]
StackForm = Literal["auto", "scan", "prefetch", "unrolled"]
SequenceForm = Literal["auto", "gather", "ring", "ulysses"]
Reduction = Literal["auto", "micro", "step"]
ZeroStage = Annotated[int, Bound(lambda value: value in (1, 2, 3), "must be 1, 2 or 3")]
ZeroStageOrNone = Annotated[int, Bound(lambda value: value in (0, 1), "must be 0 or 1")]
AxisSize = Annotated[int, Bound(lambda value: value == -1 or value > 0, "must be positive, or -1 for the rest")]


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """How many devices lie along each mesh axis; `-1` on one axis takes the rest."""

    # Nothing else names the axes in order: outer to inner, the more an axis communicates, the closer its devices lie.
    # `splits` are the dims of arrays that lie along an axis.
    data: AxisSize = field(default=1, metadata={"splits": ("batch",)})
    """Data-parallel replicas of the whole (sharded) state, unless `parallel.zero_data` splits that too."""
    fsdp: AxisSize = field(default=-1, metadata={"splits": ("batch", "embed", "embed_tensor")})
    """Shards of parameters, gradients and optimizer state (ZeRO); also splits the batch."""
    sequence: AxisSize = field(default=1, metadata={"splits": ("seq", "residual_seq", "embed", "embed_tensor")})
    """Shards of the sequence (context parallelism); its devices have different tokens, so they share the state as well."""
    tensor: AxisSize = field(default=1, metadata={"splits": ("kv_heads", "mlp", "vocab", "residual_seq", "embed_tensor")})
    """Shards of heads, MLP and vocabulary (tensor parallelism), and between these of the tokens, where it divides a row's
    part (sequence parallelism). Key/value heads may be fewer, if they divide it; a vocabulary may be of any size."""
    num_cpu_devices: PositiveIntOrUnset = None
    """Emulate this many devices per process on the CPU; unset: use the accelerators that jax finds."""

    def broken_rules(self) -> Iterator[str]:
        automatic = [axis for axis in AXES if getattr(self, axis) == -1]
        if len(automatic) > 1:
            chosen = next(axis for axis in automatic if axis != "fsdp")  # -1 by default, so not the line to point at
            yield f"{chosen}: {' and '.join(automatic)} are both -1; only one axis can take the rest"

    def axis_sizes(self, num_devices: int) -> dict[str, int]:
        """The size of every configured axis on `num_devices` devices, the automatic one resolved.

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
            raise ConfigError(
                f"mesh: {product(sizes)} = {fixed}, but there are {num_devices} devices; set one axis to -1 for the rest"
            )
        return sizes


_SPLITS: dict[str, tuple[str, ...]] = {
    axis.name: axis.metadata["splits"] for axis in dataclasses.fields(MeshConfig) if "splits" in axis.metadata
}
_DIMS = (*dict.fromkeys(dim for dims in _SPLITS.values() for dim in dims), "head_dim", "layers")
AXES = tuple(_SPLITS)
"""The mesh axes, outer to inner."""


def axes_of(dim: str) -> tuple[str, ...]:
    """The mesh axes that split a dim, outer to inner; none of them for `head_dim` and `layers`.

    Raises:
        ValueError: no array has such a dim.
    """
    if dim not in _DIMS:
        guess = "".join(f"; did you mean {name!r}?" for name in difflib.get_close_matches(dim, _DIMS, n=1))
        raise ValueError(f"unknown logical axis {dim!r}{guess} (known: {', '.join(_DIMS)})")
    return tuple(axis for axis, dims in _SPLITS.items() if dim in dims)


def num_parts(dim: str, sizes: Mapping[str, int]) -> int:
    """How many parts a dim is split into on a mesh whose axes have these sizes."""
    return math.prod(sizes[axis] for axis in axes_of(dim))


def splits_residual(seq_len: int, sizes: Mapping[str, int]) -> bool:
    """Whether the residual stream of rows of `seq_len` tokens is split over `residual_seq`, on axes of these sizes: only if
    that divides them; else over `seq`, as all else is."""
    return seq_len % num_parts("residual_seq", sizes) == 0


def product(sizes: Mapping[str, int]) -> str:
    """`data(2) x fsdp(4)`, without an axis that takes the rest."""
    return " x ".join(f"{axis}({size})" for axis, size in sizes.items() if size != -1)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """In which form the mesh's devices share the work; every form gives the same numbers."""

    stack: StackForm = "auto"
    """How the layers run: `scan` gathers a layer's weights when it comes to it; `prefetch` gathers those of the next layer,
    and reduces the gradients of the last one, while a layer computes; `unrolled` does the same without a loop, so that what
    layers keep for the backward pass is not copied, in a program that grows with the layers."""
    zero: ZeroStage = 3
    """What `mesh.fsdp` and `mesh.sequence` split (ZeRO): weights and optimizer state between steps (1), gradients of
    micro-batches as well (2), weights during the step as well (3). Below 3 every device has all weights, as
    `compute_dtype`, for the step; at 1 it also has all their gradients, as `train.grad_accum_dtype`, until they are reduced
    at its end."""
    zero_data: ZeroStageOrNone = 0
    """The same for `mesh.data`: a replica of everything along that axis (0), or weights and optimizer state split between
    steps (1): gathered over it once per step, and gradients reduced over it once."""
    grad_reduce: Reduction = "auto"
    """When gradients are summed over devices that do not split them: after every `micro` batch, or at the end of the `step`,
    which sends them once however many micro-batches there are. With it embedding, head and first layer are gathered and
    reduced once too, for which a device holds them whole."""
    sequence: SequenceForm = "auto"
    """How attention sees rows that `mesh.sequence` splits: `gather` brings all keys and values of a row to every device;
    `ring` passes them from device to device while others compute, and `data.seq_len` must be a multiple of twice the axis;
    `ulysses` exchanges tokens for heads, so that a device has whole rows of some heads, which the axis must divide."""
    tensor: TensorForm = "auto"
    """How tokens come to the matmuls that `mesh.tensor` splits, and their sums back: `collective` gathers before and
    scatters behind; `ring` passes tokens and sums from device to device while these multiply."""

    @property
    def prefetches(self) -> bool:
        """Whether a layer's weights come while another computes."""
        return self.stack in ("prefetch", "unrolled")

    def broken_rules(self) -> Iterator[str]:
        if self.zero == 1 and self.grad_reduce == "micro":
            yield "grad_reduce: micro scatters gradients after every micro-batch, which is zero: 2; choose that, or step"


PLAIN = ParallelConfig(stack="scan", sequence="gather", tensor="collective", grad_reduce="micro")
"""The form that every mesh and every model can take."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Section):
    """Several processes (hosts) in one run, joined by jax.distributed."""

    enabled: bool = False
    """Join the other processes; under Slurm and Open MPI the addresses below are found by themselves."""
    coordinator_address: str | None = None
    """`host:port` of process 0; unset: found from the launcher's environment."""
    num_processes: PositiveIntOrUnset = None
    """Processes in the run; unset: LLAMAJAX_NUM_PROCESSES, else found from the launcher's environment."""
    process_id: NonNegativeInt | None = None
    """Rank of this process; unset: LLAMAJAX_PROCESS_ID, else found from the launcher's environment."""
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
