"""What one device of the cluster holds: XLA's buffer assignment, told in the words of training.

Two ways to the same figures: `memory_plan` reads what the compiler laid out, to the byte; `estimate` adds up formulas, in
no time and without the compiler, to choose what is worth compiling.
"""

import math
from collections import Counter
from dataclasses import dataclass

from llamajax.config.gpus import planned_gpu
from llamajax.config.run import Config
from llamajax.kernels.cudnn import planned_obstacle, workspace_bytes
from llamajax.kernels.plain import MAX_CHUNK_SCORES
from llamajax.parallel.allowance import Allowance, allowance, memory_fraction, room
from llamajax.planning.scopes import MEMORY_KINDS, MemoryKind, Namer
from llamajax.planning.xla.buffers import Buffer
from llamajax.planning.xla.compile import CompiledStep
from llamajax.planning.xla.hlo import Computation, Instruction, Module, arrays
from llamajax.step.loss import MAX_CHUNK_LOGITS

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """An array alive at the fullest moment."""

    kind: MemoryKind
    name: str
    """For people, such as `layers/mlp gate_up, recomputed`."""
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Bytes."""
    instruction: str
    """The HLO instruction that makes it."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """One device's memory in bytes."""

    by_kind: dict[MemoryKind, int]
    """What the peak consists of; adds up to `peak_bytes`."""
    argument_bytes: int
    """State and batch, held all the time."""
    temp_bytes: int
    """XLA's one block for all temporary arrays, as compiled without cuDNN's workspace."""
    peak_bytes: int
    """Everything that XLA takes: arguments, results that replace none of them, the block of temporary arrays, workspace."""
    host_bytes: int
    capacity_bytes: int
    """The card."""
    allowance: Allowance
    """Beside XLA's arrays."""
    training_fraction: float
    """Of the card, what training takes for XLA's arrays."""
    tensors: tuple[Tensor, ...]
    """What is alive at the fullest moment, largest first."""

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.budget_bytes

    @property
    def budget_bytes(self) -> int:
        """What XLA may take: training's part of the card, if that leaves enough for the rest."""
        return int(min(self.training_fraction, self.room) * self.capacity_bytes)

    @property
    def room(self) -> float:
        """The share of the card that is left for XLA's arrays."""
        return room(self.capacity_bytes, self.allowance)

    @property
    def memory_fraction(self) -> float:
        """The least XLA_PYTHON_CLIENT_MEM_FRACTION, which says how much of the card jax takes for arrays."""
        return math.ceil(1000 * self.peak_bytes / self.capacity_bytes) / 1000


def memory_plan(step: CompiledStep, module: Module) -> MemoryPlan:
    """The memory of a compiled step, whose parsed `hlo` is `module`."""
    buffers = step.buffers
    namer = Namer(module, buffers.arguments)
    alive = (_tensor(buffer, *namer.tell(buffer)) for buffer in (*buffers.arguments, *buffers.peak))
    tensors = sorted(alive, key=lambda tensor: -tensor.size)
    by_kind: Counter[MemoryKind] = Counter(dict.fromkeys(MEMORY_KINDS, 0))
    for tensor in tensors:
        by_kind[tensor.kind] += tensor.size
    by_kind["temporaries"] += buffers.other_bytes
    by_kind["gaps"] += buffers.gap_bytes
    by_kind["workspace"] += _attention_workspace(module)
    axes = step.config.mesh.axis_sizes(step.config.hardware.num_devices)
    return MemoryPlan(
        by_kind=dict(by_kind),
        argument_bytes=buffers.argument_bytes,
        temp_bytes=buffers.arena_bytes,
        peak_bytes=sum(by_kind.values()),
        host_bytes=buffers.host_bytes,
        capacity_bytes=step.gpu.memory_bytes,
        allowance=allowance(axes),
        training_fraction=memory_fraction(step.config),
        tensors=tuple(tensors),
    )


def minimum_state_bytes(config: Config) -> int:
    """Bytes of weights and moments per device when every matrix is split over all devices that may split it (ZeRO-3).

    Norms and biases, a thousandth of the rest, are whole on every device.
    """
    model, axes = config.model, config.mesh.axis_sizes(config.hardware.num_devices)
    matrices = model.num_matmul_params + (0 if model.tie_embeddings else model.vocab_size * model.embed_dim)
    per_param = _DTYPE_BYTES[model.param_dtype] + 2 * _DTYPE_BYTES[config.optimizer.moment_dtype]
    return per_param * (matrices // (axes["fsdp"] * axes["tensor"]) + model.num_params - matrices)


def estimate(config: Config) -> MemoryPlan:
    """The memory of `config` by formulas; good to some 15%, for choosing what to compile and where no compiler is.

    Weights, moments and gradients: their sizes over the shards. Activations: what `model.remat` keeps of every layer.
    Temporaries: the larger of a layer's backward pass (its hidden states, gate and up with their gradients, attention
    scores in chunks) and of one chunk of logits.
    """
    model, axes = config.model, config.mesh.axis_sizes(config.hardware.num_devices)
    fsdp, tensor, sequence = axes["fsdp"], axes["tensor"], axes["sequence"]
    stored, moment = _DTYPE_BYTES[model.param_dtype], _DTYPE_BYTES[config.optimizer.moment_dtype]
    wide = _DTYPE_BYTES[model.compute_dtype]
    D, L, V, F = model.embed_dim, model.num_layers, model.vocab_size // tensor, model.mlp_dim // tensor
    heads = model.num_heads * model.head_dim // tensor
    qkv = heads + 2 * model.num_kv_heads * model.head_dim // tensor
    rows = config.train.global_batch_size // config.train.grad_accum_steps // (axes["data"] * fsdp)
    tokens = rows * config.data.seq_len // sequence
    layer_params = (model.num_params - 2 * model.vocab_size * D) // L // tensor

    saved = {
        "full": D,
        "save_attention": D + heads,
        "save_attention_qkv": D + heads + qkv,
        "save_attention_qkv_mlp": D + heads + qkv + 2 * F,
        "none": 14 * D + heads + 2 * qkv + 4 * F,  # most of the hidden states also widened to fp32
    }[model.remat]
    kept_weights = L * layer_params * wide if model.remat == "none" else 0
    scores = min(MAX_CHUNK_SCORES, tokens * config.data.seq_len * model.num_heads // tensor)
    layer = tokens * wide * (10 * D + 2 * heads + 2 * qkv + 4 * F) + 3 * scores * 4
    shard = minimum_state_bytes(config) // (stored + 2 * moment)
    loss = min(MAX_CHUNK_LOGITS, tokens * V) * (4 + 2 * wide)
    by_kind: dict[MemoryKind, int] = {
        "parameters": stored * shard,
        "optimizer": 2 * moment * shard,
        "batch": 16 * rows * config.train.grad_accum_steps * config.data.seq_len // sequence,
        "gradients": (stored + (4 if config.train.grad_accum_steps > 1 else 0)) * shard + 4 * V * D,  # the sum is fp32
        "activations": L * tokens * saved * wide,
        "logits": max(0, loss - layer),
        "collectives": 2 * D * F * wide + kept_weights,
        "temporaries": layer,
        "gaps": 0,
        "workspace": _planned_workspace(config),
    }
    state = by_kind["parameters"] + by_kind["optimizer"] + by_kind["batch"]
    peak = sum(by_kind.values())
    return MemoryPlan(
        by_kind=by_kind,
        argument_bytes=state,
        temp_bytes=peak - state,
        peak_bytes=peak,
        host_bytes=0,
        capacity_bytes=planned_gpu(config.hardware).memory_bytes,
        allowance=allowance(axes),
        training_fraction=memory_fraction(config),
        tensors=(),
    )


def _tensor(buffer: Buffer, kind: MemoryKind, name: str) -> Tensor:
    return Tensor(
        kind=kind, name=name, dtype=buffer.dtype, shape=buffer.shape, size=buffer.size, instruction=buffer.instruction
    )


def fuses_attention(config: Config) -> bool:
    """Whether cuDNN computes attention when `config` is trained on the GPUs of its `hardware`."""
    axes = config.mesh.axis_sizes(config.hardware.num_devices)
    return config.model.attention_kernel != "plain" and planned_obstacle(config.model, axes) is None


def _planned_workspace(config: Config) -> int:
    if not fuses_attention(config):
        return 0
    model, axes = config.model, config.mesh.axis_sizes(config.hardware.num_devices)
    rows = config.train.global_batch_size // config.train.grad_accum_steps // (axes["data"] * axes["fsdp"])
    heads, kv_heads = model.num_heads // axes["tensor"], model.num_kv_heads // axes["tensor"]
    return workspace_bytes(rows, heads, kv_heads, config.data.seq_len, model.head_dim)


def _attention_workspace(module: Module) -> int:
    """The largest that cuDNN takes; none where XLA knows it, which then lays it out with the temporary arrays."""
    return max(
        (
            _workspace(instruction, computation)
            for computation in module.computations.values()
            for instruction in computation.instructions.values()
            if "__cudnn$fmhaSoftmaxBackward" in instruction.attributes.get("custom_call_target", "")
        ),
        default=0,
    )


def _workspace(instruction: Instruction, computation: Computation) -> int:
    """Of one backward pass, from the shapes of its queries [B, T, N, H] and keys [B, S, K, H]."""
    known = max(array.num_elements for array in arrays(instruction.shape) if array.dtype == "u8")
    (queries,), (keys,) = (list(arrays(shape)) for shape in computation.operand_shapes(instruction)[:2])
    batch, seq_len, heads, head_dim = queries.dims
    return 0 if known else workspace_bytes(batch, heads, keys.dims[2], seq_len, head_dim)
