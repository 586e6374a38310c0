"""The memory of one device of the cluster: XLA's buffer assignment in the terms of training.

Two functions return the same figures: `memory_plan` reads the compiler's layout, exact to the byte; `estimate` adds up
formulas, instantly and without the compiler, to choose which candidates are worth compiling.
"""

import math
from collections import Counter
from dataclasses import dataclass

from llamajax.estimates.device_memory import host_bytes
from llamajax.estimates.gpu_memory_budget import Allowance, allowance, room
from llamajax.estimates.host_memory import host_room
from llamajax.estimates.rollouts import held_reference_bytes
from llamajax.kernels.cudnn import workspace_bytes
from llamajax.planning.cost.attention import planned_kernel
from llamajax.planning.scopes import MEMORY_KINDS, MemoryKind, Namer, StageArrays
from llamajax.planning.xla.buffers import Buffer
from llamajax.planning.xla.compile import CompiledStep
from llamajax.planning.xla.hlo import Module, arrays
from llamajax.step.layer_groups import further_card_bytes, needed_host_bytes
from llamajax.step.resolve import ResolvedRun, formula_bytes


@dataclass(frozen=True)
class PeakTensor:
    """An array that is alive at the fullest moment."""

    buffer: Buffer
    kind: MemoryKind
    name: str
    """Readable name, such as `layers/mlp gate_up, recomputed`."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """One device's memory in bytes."""

    by_kind: dict[MemoryKind, int]
    """Contents of the peak; adds up to `peak_bytes`."""
    argument_bytes: int
    """State and batch, held all the time."""
    temp_bytes: int
    """Size of XLA's one block for all temporary arrays, as compiled without cuDNN's workspace."""
    peak_bytes: int
    """All memory that XLA takes: arguments, results that replace none of them, the block of temporary arrays, workspace."""
    host_bytes: int
    """Memory of the host for this device's data."""
    host_room_bytes: float
    """Memory of the host that is there for them; infinite where it is unknown."""
    capacity_bytes: int
    """Memory of the card."""
    allowance: Allowance
    """Memory taken besides XLA's arrays."""
    training_fraction: float
    """Share of the card that training takes for XLA's arrays."""
    tensors: tuple[PeakTensor, ...]
    """Arrays alive at the fullest moment, largest first."""

    def largest(self, count: int) -> list[tuple[PeakTensor, int]]:
        """Groups identical tensors and returns the groups that take the most: one tensor of each, and the group's size."""
        alike: dict[tuple[str, str, tuple[int, ...]], list[PeakTensor]] = {}
        for tensor in self.tensors:
            alike.setdefault((tensor.name, tensor.buffer.dtype, tensor.buffer.shape), []).append(tensor)
        groups = sorted(alike.values(), key=lambda group: -group[0].buffer.size * len(group))
        return [(group[0], len(group)) for group in groups[:count]]

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.budget_bytes and self.host_bytes <= self.host_room_bytes

    @property
    def budget_bytes(self) -> int:
        """Returns the bytes that XLA may take: training's share of the card, if that leaves enough for the rest."""
        return int(min(self.training_fraction, self.room) * self.capacity_bytes)

    @property
    def room(self) -> float:
        """Returns the share of the card that is left for XLA's arrays."""
        return room(self.capacity_bytes, self.allowance)

    @property
    def memory_fraction(self) -> float:
        """Returns the least sufficient XLA_PYTHON_CLIENT_MEM_FRACTION, the share of the card that jax takes for arrays."""
        return math.ceil(1000 * self.peak_bytes / self.capacity_bytes) / 1000


def memory_plan(step: CompiledStep, module: Module) -> MemoryPlan:
    """Returns the memory of a compiled step; `module` is its parsed `hlo`."""
    buffers = step.buffers
    config = step.run.config
    namer = Namer(module, buffers.arguments, config.is_frozen, StageArrays.of(config, step.run.mesh))
    alive = sorted((*buffers.arguments, *buffers.peak), key=lambda buffer: -buffer.size)
    tensors = tuple(PeakTensor(buffer, *namer.tell(buffer)) for buffer in alive)
    by_kind: Counter[MemoryKind] = Counter(dict.fromkeys(MEMORY_KINDS, 0))
    for tensor in tensors:
        by_kind[tensor.kind] += tensor.buffer.size
    by_kind["temporaries"] += buffers.other_bytes
    by_kind["gaps"] += buffers.gap_bytes
    by_kind["workspace"] += _attention_workspace(module)
    run = step.run
    by_kind["parameters"] += held_reference_bytes(config, run.mesh)
    by_kind["activations"] += further_card_bytes(config, run.mesh)  # step is the form as one program
    assert run.gpu is not None
    return MemoryPlan(
        by_kind=dict(by_kind),
        argument_bytes=buffers.argument_bytes,
        temp_bytes=buffers.arena_bytes,
        peak_bytes=sum(by_kind.values()),
        host_bytes=buffers.host_bytes + needed_host_bytes(config, run.mesh) - host_bytes(config, run.mesh),
        host_room_bytes=host_room(config),
        capacity_bytes=run.gpu.memory_bytes,
        allowance=allowance(run.mesh),
        training_fraction=run.memory_fraction,
        tensors=tensors,
    )


def estimate(run: ResolvedRun) -> MemoryPlan:
    """Returns the memory of a run by formulas, see `expected_bytes`: to choose what to compile, and where no compiler is
    installed."""
    expected = formula_bytes(run.config, run.mesh)
    expected["workspace"] = _planned_workspace(run)
    by_kind: dict[MemoryKind, int] = {kind: expected.get(kind, 0) for kind in MEMORY_KINDS}
    state = by_kind["parameters"] + by_kind["optimizer"] + by_kind["batch"]
    peak = sum(by_kind.values())
    assert run.gpu is not None
    return MemoryPlan(
        by_kind=by_kind,
        argument_bytes=state,
        temp_bytes=peak - state,
        peak_bytes=peak,
        host_bytes=needed_host_bytes(run.config, run.mesh),
        host_room_bytes=host_room(run.config),
        capacity_bytes=run.gpu.memory_bytes,
        allowance=allowance(run.mesh),
        training_fraction=run.memory_fraction,
        tensors=(),
    )


def _planned_workspace(run: ResolvedRun) -> int:
    if planned_kernel(run)[0] != "cudnn":
        return 0
    config, model, axes = run.config, run.config.model, run.mesh
    rows = config.rows_per_device(axes)
    tensor, sequence = axes["tensor"], axes["sequence"]
    heads, kv_heads = model.num_heads // tensor // sequence, max(1, model.computed_kv_heads(axes) // tensor // sequence)
    return workspace_bytes(rows, heads, kv_heads, config.data.seq_len, model.head_dim)


def _attention_workspace(module: Module) -> int:
    """Returns the largest workspace of cuDNN; 0 where XLA includes it in the temporary arrays."""
    largest = 0
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if "__cudnn$fmhaSoftmaxBackward" not in instruction.attributes.get("custom_call_target", ""):
                continue
            known = max(array.num_elements for array in arrays(instruction.shape) if array.dtype == "u8")
            # Queries [B, T, N, H] and keys [B, S, K, H].
            (queries,), (keys,) = (list(arrays(shape)) for shape in computation.operand_shapes(instruction)[:2])
            batch, seq_len, heads, head_dim = queries.dims
            if not known:
                largest = max(largest, workspace_bytes(batch, heads, keys.dims[2], seq_len, head_dim))
    return largest
