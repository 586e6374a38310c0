"""Resolves a run once for every caller: which value every `auto` resolves to on the devices of a mesh, and why."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamajax.config.model import REMATS, ModelConfig, Remat
from llamajax.config.parallel import Reduction, SequenceForm, StackForm, TensorForm, num_parts, splits_residual
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.estimates.communication import sequence_numbers
from llamajax.estimates.device_memory import expected_bytes, saved_host_bytes
from llamajax.estimates.experts import exchange_form
from llamajax.estimates.formulas import (
    DTYPE_BYTES,
    computed_model,
    copy_bytes,
    gathered_layer_bytes,
    is_layer_matrix,
    layer_matrix_bytes,
    mesh_sizes,
    params_gathered_once,
    prefetched_bytes,
    weights,
)
from llamajax.estimates.gpu_memory_budget import memory_fraction
from llamajax.estimates.gpus import Gpu, planned_gpu
from llamajax.estimates.host_memory import host_room
from llamajax.estimates.rollouts import held_reference_bytes
from llamajax.kernels.choice import GroupedSite, Site, can_fuse, choose, choose_grouped
from llamajax.kernels.plain import MAX_CHUNK_SCORES
from llamajax.parallel.float8 import LEAST_CAPABILITY
from llamajax.parallel.tensor import SHARED
from llamajax.step.expert_forms import parts_form
from llamajax.step.layer_groups import further_card_bytes, needed_host_bytes, uses_files
from llamajax.step.loss import MAX_CHUNK_LOGITS
from llamajax.step.offload_form import OffloadChoice, offload_form, step_seconds
from llamajax.step.pipeline_forms import head_form, pipeline_form
from llamajax.units import format_bytes

MAX_UNROLLED = 40
"""Limit of layers in a program without a loop over them, where a layer counts once per step of a ring through it. With more
layers XLA compiles for minutes."""

ADAPTED = 4
"""Layers without adapters that take as long to compile as one with them, which has three times as many products."""

LEAST_TOKENS = 2048
"""Least number of tokens that a device multiplies while it passes as many on; with fewer, small matmuls and hops cost more
than they hide."""
LEAST_DEVICES = 4
"""Least number of devices that share a matmul; two devices send so little that plans are equal."""


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run on the devices of a mesh with every choice made: the input to tracing, compiling and planning the training step.

    It is hashable, so `jax.jit` accepts it as a static argument.
    """

    config: Config
    """The run's configuration; neither `model.remat` nor a setting of `parallel` is `auto`."""
    mesh: Mapping[str, int] = field(hash=False)
    """Sizes of the mesh axes, outer to inner."""
    gpu: Gpu | None
    """The GPU that `hardware` names; None: it names none."""
    memory_fraction: float
    """Share of a GPU's memory that XLA's arrays may take."""
    reasons: Mapping[str, str] = field(compare=False)
    """Chosen form and the reason, in one line, by setting; settings without a choice are left out."""


def resolve(config: Config, mesh: Mapping[str, int]) -> ResolvedRun:
    """Returns the run with every form chosen by formulas; the same for every caller.

    Args:
        config: the run. Its `model.remat: auto` resolves to the policy that saves most of what should fit;
            `llamajax.planning.scheduling.resolve_here` compiles to find the fastest.
        mesh: sizes of the mesh axes.
    """
    gpu = None if config.hardware.gpu == "none" else planned_gpu(config.hardware)
    fraction = memory_fraction(config)
    budget = None if gpu is None or config.mesh.num_cpu_devices is not None else fraction * gpu.memory_bytes
    asked, (remat, reason) = config.model.remat, remat_policy(config, mesh, budget)
    config = _with_remat(config, remat)
    offload = offload_choice(config, mesh, budget)
    config = dataclasses.replace(config, offload=offload.offload)
    chosen: dict[str, tuple[Any, str]] = {
        "stack": stack_form(config, mesh, budget),
        "sequence": sequence_form(config, mesh),
        "tensor": tensor_form(config, mesh),
        "expert_parts": parts_form(config, mesh),
        "expert_exchange": exchange_form(config, mesh),
    }
    config = _in_forms(config, **{setting: form for setting, (form, _) in chosen.items()})
    order, chunks, why = pipeline_form(config, mesh)
    chosen["pipeline"], chosen["pipeline_head"] = (order, why), head_form(config, mesh, gpu)
    config = _in_forms(config, pipeline=order, pipeline_chunks=chunks, pipeline_head=chosen["pipeline_head"][0])
    chosen["grad_reduce"] = reduction_form(config, mesh, budget)
    config = _in_forms(config, grad_reduce=chosen["grad_reduce"][0])
    no_choice = {axis for axis, size in mesh.items() if size == 1}
    if config.train.grad_accum_steps == 1:
        no_choice.add("grad_reduce")
    if mesh["pipeline"] == 1:
        no_choice.add("pipeline_head")
    if num_parts("experts", mesh) == 1 or not config.model.experts.enabled:
        no_choice |= {"expert_parts", "expert_exchange"}
    if asked == "auto":
        chosen["remat"] = remat, reason
    reasons = {setting: f"{form}: {reason}" for setting, (form, reason) in chosen.items() if setting not in no_choice}
    if offload.reason:
        reasons["offload"] = offload.reason
    return ResolvedRun(config=config, mesh=mesh, gpu=gpu, memory_fraction=fraction, reasons=reasons)


def with_placed_state(config: Config, mesh: Mapping[str, int]) -> Config:
    """Returns the run with `offload.optimizer` and `offload.parameters` resolved. The state of a run has one place, whatever
    policy of `model.remat` and other forms its steps have, so this comes before all other choices."""
    if "auto" not in (config.offload.optimizer, config.offload.parameters):
        return config
    placed = resolve(config, mesh).config.offload
    return config.changed(
        {f"offload.{name}": getattr(placed, name) for name in ("optimizer", "parameters", "gradient_dtype")}
    )


def resolve_planned(config: Config) -> ResolvedRun:
    """Returns the run on the cluster that its `hardware` describes; see `resolve`.

    Raises:
        ConfigError: `hardware` names no GPU, or the mesh does not divide the number of its devices.
    """
    planned_gpu(config.hardware)
    return resolve(config, mesh_sizes(config))


def attention_kernel(run: ResolvedRun, capability: tuple[int, ...] | None) -> tuple[str, str | None]:
    """Returns the kernel that computes attention in training, with the reason, in one line; and a warning if it is slow for
    a GPU.

    Args:
        run: the run.
        capability: CUDA compute capability of the GPUs; None: there are none.

    Raises:
        ConfigError: the requested kernel cannot compute this attention.
    """
    model, is_gpu = run.config.model, capability is not None
    asked = model.attention_kernel
    site = Site.of(model, run.mesh, run.config.parallel.sequence, is_gpu=is_gpu, capability=capability)
    kernel, reason = choose(asked, site)
    told = f"{kernel}: {reason}"
    if kernel != "plain" or asked == "plain" or not is_gpu:
        return told, None
    return told, "attention uses no fused kernel: its scores go through the GPU's memory, which takes several times as long"


def remat_policy(config: Config, axes: Mapping[str, int], budget: float | None) -> tuple[Remat, str]:
    """Returns the policy that `model.remat` resolves to by formulas, and the reason in one line."""
    asked = config.model.remat
    if asked != "auto":
        return asked, "model.remat says so"
    if budget is None:
        return "full", "there is no GPU, or hardware.gpu does not name it, so its memory is unknown"
    if config.offload.activations != "none" or "auto" in (config.offload.optimizer, config.offload.parameters):
        return _fastest_with_offload(config, axes, budget), "is the fastest that should fit, with values in host memory"
    for remat in REMATS:
        tried = _with_remat(config, remat)
        form, _ = stack_form(tried, axes, budget)
        if _fits(_in_forms(tried, stack=form), axes, budget):
            return remat, "saves most of what should fit"
    return "full", "no policy that saves more should fit"


def _fastest_with_offload(config: Config, axes: Mapping[str, int], budget: float) -> Remat:
    """Returns the policy with the fastest layers by formulas, among those that fit; `full` where none does."""
    found: dict[Remat, float] = {}
    for remat in REMATS:
        tried = _with_remat(config, remat)
        choice = offload_choice(tried, axes, budget)
        tried = dataclasses.replace(tried, offload=choice.offload)
        tried = _in_forms(tried, stack=stack_form(tried, axes, budget)[0])
        if _fits(tried, axes, budget) and needed_host_bytes(tried, axes) <= host_room(tried):
            found[remat] = step_seconds(tried, axes)
    return min(found, key=lambda remat: found[remat]) if found else "full"


def offload_choice(config: Config, axes: Mapping[str, int], budget: float | None) -> OffloadChoice:
    """Returns what waits in host memory, for a run with a chosen `model.remat`; `budget` as for `stack_form`."""
    form = sequence_form(config, axes)[0]

    def needed(run: Config) -> dict[str, int]:
        return formula_bytes(_in_forms(run, stack="prefetch", sequence=form), axes)

    return offload_form(_in_forms(config, sequence=form), axes, budget, needed)


def float8_matmuls(model: ModelConfig, capability: tuple[int, ...] | None) -> dict[str, str]:
    """Returns a line `matmuls` with the matmuls that training does in float8; empty if there are none.

    Args:
        model: the network.
        capability: CUDA compute capability of the GPUs; None: there are none.

    Raises:
        ConfigError: these GPUs are too old to multiply in float8.
    """
    if not model.float8_weights:
        return {}
    if capability is not None and capability < LEAST_CAPABILITY:
        least, own = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, capability))
        raise ConfigError(
            f"model.matmul_dtype: {model.matmul_dtype} needs GPUs of compute capability {least} or newer, such as H100,"
            f" and these have {own}; set compute_dtype"
        )
    rate = "rounded to eight bits, but no faster: there is no GPU" if capability is None else "MFU counts bfloat16's peak"
    return {"matmuls": f"{model.matmul_dtype} with {', '.join(model.float8_weights)} of each layer; {rate}"}


def matmul_kernels(model: ModelConfig, capability: tuple[int, ...] | None) -> dict[str, str]:
    """Returns `float8_matmuls`, and for a model with experts a line `expert_kernel`: the kernel of their products, with the
    reason.

    Raises:
        ConfigError: see `float8_matmuls`; or `model.experts.kernel` cannot compute these products.
    """
    lines = float8_matmuls(model, capability)
    if model.experts.enabled:
        site = GroupedSite.of(model, is_gpu=capability is not None, capability=capability)
        lines["expert_kernel"] = ": ".join(choose_grouped(model.experts.kernel, site))
    return lines


def stack_form(config: Config, axes: Mapping[str, int], budget: float | None) -> tuple[StackForm, str]:
    """Returns how the layers run, and the reason in one line; `budget` is the memory for a GPU's arrays in bytes, None for
    no limit."""
    if axes["pipeline"] > 1:
        return "unrolled", "each stage writes out the layers of a chunk, with its weights whole"
    if config.parallel.stack != "auto":
        return config.parallel.stack, "parallel.stack says so"
    away = _away(config, axes)
    if away is not None and config.mesh.num_cpu_devices is not None:
        return "prefetch", f"{away} and return one layer ahead"
    if (given := config.given_form("stack")) is not None:
        return given
    shards, is_alone = num_parts("embed", axes), num_parts("micro_batch", axes) * num_parts("seq", axes) == 1
    num_layers = config.model.num_layers
    bodies = num_layers * _ring_length(config, axes) * (ADAPTED if config.adapters.enabled else 1)
    form: StackForm = "unrolled" if bodies <= MAX_UNROLLED else "prefetch"
    if is_alone and away is not None:
        form = "prefetch"  # written out, XLA keeps the gradients of many layers before it stacks them
    elif is_alone and form == "prefetch":
        return "scan", f"there is nothing to gather or to reduce, and {num_layers} layers are too many without a loop"
    if away is not None:
        away = _away(_in_forms(config, stack=form), axes)
        return form, f"{away} and return one layer ahead"
    if not _fits(_in_forms(config, stack=form), axes, budget):
        return "scan", f"{format_bytes(prefetched_bytes(config.model, axes))} for three layers' weights might not fit"
    if is_alone:
        return form, f"values that {num_layers} layers save for the backward pass are not copied"
    if shards == 1:
        reduced = format_bytes(layer_matrix_bytes(config.model, axes))
        return form, f"{reduced} of gradients are reduced while the layer below computes"
    gathered = format_bytes(gathered_layer_bytes(config.model, axes))
    return form, f"{gathered} of weights come from {shards} devices while the previous layer computes"


def _away(config: Config, axes: Mapping[str, int]) -> str | None:
    """Returns the data of layers that wait for the layers' turn, and where, in a few words; None: there are none."""
    parts = []
    if config.offload.names:
        parts.append(f"{format_bytes(saved_host_bytes(config, axes))} of saved values")
    if config.offload.parameters == "all":
        parts.append(f"{format_bytes(copy_bytes(config, axes)[1])} of weights")
    return f"{' and '.join(parts)} wait {'on the disk' if uses_files(config) else 'in host memory'}" if parts else None


def sequence_form(config: Config, axes: Mapping[str, int]) -> tuple[SequenceForm, str]:
    """Returns the form that `parallel.sequence` names, or that `auto` resolves to for training on GPUs; and the reason in
    one line.

    A fused kernel is worth more than any saved communication: the plain form moves every score through the GPU's memory
    several times. Without a fused kernel, a ring computes little more than the half of the scores that causal rows need, and
    hides its communication. Otherwise the form that sends the least is chosen.

    Args:
        config: the run.
        axes: sizes of the mesh axes.
    """
    parts = num_parts("seq", axes)
    if parts == 1:
        return "gather", "no row is split"
    if (given := config.given_form("sequence")) is not None:
        return given
    tokens = config.train.global_batch_size / config.train.grad_accum_steps / num_parts("micro_batch", axes)
    tokens *= config.data.seq_len / parts
    width = DTYPE_BYTES[config.model.compute_dtype]

    def sent(form: SequenceForm) -> float:
        return width * tokens * sequence_numbers(config.model, axes, form)

    forms: tuple[SequenceForm, ...] = ("gather", "ring", "ulysses")
    possible: list[SequenceForm] = [form for form in forms if not config.sequence_problems(form, axes)]
    bytes_of_forms = ", ".join(f"{format_bytes(sent(form))} by {form}" for form in possible)
    told = f"a device sends per layer and micro-batch {bytes_of_forms}"
    fused = can_fuse(config.model, axes, "ulysses")
    if "ulysses" in possible and fused:
        return "ulysses", f"a fused kernel can compute whole rows; {told}"
    if "ring" in possible:
        share = (2 * parts + 1) / (4 * parts)
        return "ring", f"it computes {share:.0%} of the scores of whole rows, and hides its communication; {told}"
    return min(possible, key=sent), f"it sends the least; {told}"


def tensor_form(config: Config, axes: Mapping[str, int]) -> tuple[TensorForm, str]:
    """Returns the form that `parallel.tensor` names, or that `auto` resolves to for training on GPUs; and the reason in one
    line.

    Args:
        config: the run.
        axes: sizes of the mesh axes.
    """
    devices = math.prod(axes[axis] for axis in SHARED)
    if devices == 1:
        return "collective", "no matmul is shared"
    if (given := config.given_form("tensor")) is not None:
        return given
    if not splits_residual(config.data.seq_len, axes):
        return "collective", f"mesh.tensor does not divide the tokens of a row of {config.data.seq_len}"
    if devices < LEAST_DEVICES:
        return "collective", f"{devices} devices send too little to gain from a ring"
    rows = config.rows_per_device(axes)
    tokens = rows * config.data.seq_len // num_parts("residual_seq", axes)
    if tokens < LEAST_TOKENS:
        return "collective", f"{tokens:,} tokens per hop are too few for separate matmuls"
    return "ring", f"{tokens:,} tokens per hop are multiplied while others travel"


def _ring_length(config: Config, axes: Mapping[str, int]) -> int:
    """Returns how many times larger a layer's program becomes, because rings over devices repeat parts of it."""
    by_rows = num_parts("seq", axes) if sequence_form(config, axes)[0] == "ring" else 1
    return by_rows * (axes["tensor"] if tensor_form(config, axes)[0] == "ring" else 1)


def reduction_form(config: Config, axes: Mapping[str, int], budget: float | None) -> tuple[Reduction, str]:
    """Returns when gradients are reduced, and the reason in one line, for a run with a chosen stack form."""
    parallel, micro_batches = config.parallel, config.train.grad_accum_steps
    if parallel.grad_reduce != "auto":
        return parallel.grad_reduce, "parallel.grad_reduce says so"
    if parallel.zero == 1:
        return "step", "parallel.zero: 1 keeps gradients whole until the end of the step"
    shards = num_parts("embed", axes)
    replicas = num_parts("micro_batch", axes) * num_parts("seq", axes) // shards
    if shards * replicas == 1:
        return "micro", "there is nothing to reduce"
    if micro_batches == 1:
        return "micro", "there is only one micro-batch"
    if config.offload.parameters == "all":
        return "micro", "gradients of layers leave for host memory in each micro-batch"
    late = _in_forms(config, grad_reduce="step")
    width = DTYPE_BYTES[config.model.compute_dtype]
    ends = 2 * width * params_gathered_once(late, axes) * (shards - 1) // shards
    sizes = weights(computed_model(config.model, axes))
    layers = 2 * width * sum(size for name, size in sizes.items() if is_layer_matrix(name)) // (shards * axes["tensor"])
    layers = 0 if parallel.zero_data else layers * (replicas - 1) // replicas
    often, once = ends + (0 if parallel.prefetches else layers), ends + layers
    if once > often * micro_batches:
        wait = f"{format_bytes(often)} is exposed in each of {micro_batches} micro-batches"
        return "micro", f"{wait}; once per step it would be {format_bytes(once)}"
    if not _fits(late, axes, budget):
        return "micro", "embedding, head and first layer, kept whole for the step, might not fit"
    return "step", f"{format_bytes(once)} is exposed once, instead of {format_bytes(often)} {micro_batches} times"


def _with_remat(config: Config, remat: Remat) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))


def _in_forms(config: Config, **forms: Any) -> Config:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **forms))


def formula_bytes(config: Config, axes: Mapping[str, int]) -> dict[str, int]:
    """Returns `expected_bytes` of the step as GPUs compute it."""
    form, _ = sequence_form(config, axes)
    scores = 0 if can_fuse(config.model, axes, form) else MAX_CHUNK_SCORES
    expected = expected_bytes(config, axes, max_chunk_scores=scores, max_chunk_logits=MAX_CHUNK_LOGITS)
    expected["activations"] += further_card_bytes(config, axes)
    expected["parameters"] += held_reference_bytes(config, axes)
    return expected


def _fits(config: Config, axes: Mapping[str, int], budget: float | None) -> bool:
    """Returns whether a run should fit according to the formulas."""
    return budget is None or sum(formula_bytes(config, axes).values()) <= budget
