"""Resolves a run: what every `auto` comes to on the devices of a mesh, and why; once, for all who must agree on it."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llamajax.config.model import REMATS, ModelConfig, Remat
from llamajax.config.parallel import Reduction, SequenceForm, StackForm, TensorForm, num_parts, splits_residual
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.estimates.communication import sequence_numbers
from llamajax.estimates.formulas import (
    DTYPE_BYTES,
    expected_bytes,
    gathered_layer_bytes,
    layer_matrix_bytes,
    mesh_sizes,
    params_gathered_once,
    prefetched_bytes,
)
from llamajax.estimates.gpu_memory_budget import memory_fraction
from llamajax.estimates.gpus import Gpu, planned_gpu
from llamajax.kernels.choice import Site, can_fuse, choose
from llamajax.kernels.plain import MAX_CHUNK_SCORES
from llamajax.parallel.float8 import LEAST_CAPABILITY
from llamajax.parallel.tensor import SHARED
from llamajax.step.loss import MAX_CHUNK_LOGITS
from llamajax.units import format_bytes

MAX_UNROLLED = 40
"""Layers of a program without a loop over them, each counted as often as a ring goes through it: with more XLA compiles for
minutes."""

LEAST_TOKENS = 2048
"""That a device multiplies while it passes as many on; with fewer, small matmuls and hops cost more than they hide."""
LEAST_DEVICES = 4
"""That share a matmul; two send so little that plans come out alike."""


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run on the devices of a mesh, nothing left open: what the training step is traced, compiled and planned from.

    It is hashable, so `jax.jit` takes it as a static argument.
    """

    config: Config
    """The run; neither `model.remat` nor a setting of `parallel` is `auto`."""
    mesh: Mapping[str, int] = field(hash=False)
    """Sizes of the mesh axes, outer to inner."""
    gpu: Gpu | None
    """The GPU that `hardware` names; None: it names none."""
    memory_fraction: float
    """Share of a GPU's memory that XLA's arrays may take."""
    reasons: Mapping[str, str] = field(compare=False)
    """By setting which form was chosen, and why, in one line; settings without a choice are left out."""


def resolve(config: Config, mesh: Mapping[str, int]) -> ResolvedRun:
    """The run with every form chosen by formulas; the same for whoever asks.

    Args:
        config: the run. Its `model.remat: auto` comes to what keeps most of what should fit;
            `llamajax.planning.scheduling.resolve_here` compiles to find the fastest.
        mesh: sizes of the mesh axes.
    """
    gpu = None if config.hardware.gpu == "none" else planned_gpu(config.hardware)
    fraction = memory_fraction(config)
    budget = None if gpu is None or config.mesh.num_cpu_devices is not None else fraction * gpu.memory_bytes
    asked, (remat, reason) = config.model.remat, remat_policy(config, mesh, budget)
    config = _with_remat(config, remat)
    chosen = {
        "stack": stack_form(config, mesh, budget),
        "sequence": sequence_form(config, mesh),
        "tensor": tensor_form(config, mesh),
    }
    config = _in_forms(config, **{setting: form for setting, (form, _) in chosen.items()})
    chosen["grad_reduce"] = reduction_form(config, mesh, budget)
    config = _in_forms(config, grad_reduce=chosen["grad_reduce"][0])
    no_choice = {axis for axis, size in mesh.items() if size == 1}
    if config.train.grad_accum_steps == 1:
        no_choice.add("grad_reduce")
    if asked == "auto":
        chosen["remat"] = remat, reason
    return ResolvedRun(
        config=config,
        mesh=mesh,
        gpu=gpu,
        memory_fraction=fraction,
        reasons={setting: f"{form}: {reason}" for setting, (form, reason) in chosen.items() if setting not in no_choice},
    )


def resolve_planned(config: Config) -> ResolvedRun:
    """The run on the cluster that its `hardware` describes; see `resolve`.

    Raises:
        ConfigError: `hardware` names no GPU, or the mesh does not divide the number of its devices.
    """
    planned_gpu(config.hardware)
    return resolve(config, mesh_sizes(config))


def attention_kernel(run: ResolvedRun, capability: tuple[int, ...] | None) -> tuple[str, str | None]:
    """Which kernel computes attention in training, and why, in one line; and a warning if it is none that a GPU deserves.

    Args:
        run: the run.
        capability: CUDA's version of the GPUs' architecture; None: there are none.

    Raises:
        ConfigError: the one that is asked for cannot.
    """
    model, is_gpu = run.config.model, capability is not None
    asked = model.attention_kernel
    site = Site.of(model, run.mesh, run.config.parallel.sequence, is_gpu=is_gpu, capability=capability)
    kernel, reason = choose(asked, site)
    told = f"{kernel}: {reason}"
    if kernel != "plain" or asked == "plain" or not is_gpu:
        return told, None
    return told, "attention takes no fused kernel: its scores go through the GPU's memory, which takes several times as long"


def remat_policy(config: Config, axes: Mapping[str, int], budget: float | None) -> tuple[Remat, str]:
    """What `model.remat` comes to by formulas, and why, in one line."""
    asked = config.model.remat
    if asked != "auto":
        return asked, "model.remat says so"
    if budget is None:
        return "full", "there is no GPU, or hardware.gpu does not say which, whose memory could be filled"
    for remat in REMATS:
        tried = _with_remat(config, remat)
        form, _ = stack_form(tried, axes, budget)
        if _fits(_in_forms(tried, stack=form), axes, budget):
            return remat, "keeps most of what should fit"
    return "full", "nothing should fit that keeps more"


def float8_matmuls(model: ModelConfig, capability: tuple[int, ...] | None) -> dict[str, str]:
    """`matmuls`: which of them training does in float8, in one line; nothing if none.

    Args:
        model: the network.
        capability: CUDA's version of the GPUs' architecture; None: there are none.

    Raises:
        ConfigError: GPUs as old as these multiply nothing in float8.
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


def stack_form(config: Config, axes: Mapping[str, int], budget: float | None) -> tuple[StackForm, str]:
    """How the layers run, and why, in one line; `budget` is in bytes of a GPU's arrays, None where nothing bounds them."""
    if (given := config.given_form("stack")) is not None:
        return given
    shards, is_alone = num_parts("embed", axes), num_parts("batch", axes) * num_parts("seq", axes) == 1
    num_layers = config.model.num_layers
    form: StackForm = "unrolled" if num_layers * _ring_length(config, axes) <= MAX_UNROLLED else "prefetch"
    if is_alone and form == "prefetch":
        return "scan", f"there is nothing to gather or to reduce, and {num_layers} layers are many without a loop"
    if not _fits(_in_forms(config, stack=form), axes, budget):
        return "scan", f"{format_bytes(prefetched_bytes(config.model, axes))} for three layers' weights would hardly fit"
    if is_alone:
        return form, f"what {num_layers} layers keep for the backward pass is not copied"
    if shards == 1:
        reduced = format_bytes(layer_matrix_bytes(config.model, axes))
        return form, f"{reduced} of gradients are reduced while the layer below computes"
    gathered = format_bytes(gathered_layer_bytes(config.model, axes))
    return form, f"{gathered} of weights come from {shards} devices while the layer before computes"


def sequence_form(config: Config, axes: Mapping[str, int]) -> tuple[SequenceForm, str]:
    """The form that `parallel.sequence` names, or that `auto` comes to for training on GPUs; and why, in one line.

    A fused kernel is worth more than any bytes: the plain form moves every score through the GPU's memory several times.
    Without one, a ring computes hardly more than the half of the scores that causal rows need, and hides what it sends. Else
    what sends less is taken.

    Args:
        config: the run.
        axes: sizes of the mesh axes.
    """
    parts = num_parts("seq", axes)
    if parts == 1:
        return "gather", "no row is split"
    if (given := config.given_form("sequence")) is not None:
        return given
    tokens = config.train.global_batch_size / config.train.grad_accum_steps / num_parts("batch", axes)
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
        return "ulysses", f"whole rows can be one fused kernel's; {told}"
    if "ring" in possible:
        share = (2 * parts + 1) / (4 * parts)
        return "ring", f"it computes {share:.0%} of the scores that whole rows have, and hides what it sends; {told}"
    return min(possible, key=sent), f"it sends least; {told}"


def tensor_form(config: Config, axes: Mapping[str, int]) -> tuple[TensorForm, str]:
    """The form that `parallel.tensor` names, or that `auto` comes to for training on GPUs; and why, in one line.

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
        return "collective", f"{tokens:,} tokens per hop are too few for matmuls of their own"
    return "ring", f"{tokens:,} tokens per hop are multiplied while others travel"


def _ring_length(config: Config, axes: Mapping[str, int]) -> int:
    """How many times as much of a program a layer is, because rings over devices go through it."""
    by_rows = num_parts("seq", axes) if sequence_form(config, axes)[0] == "ring" else 1
    return by_rows * (axes["tensor"] if tensor_form(config, axes)[0] == "ring" else 1)


def reduction_form(config: Config, axes: Mapping[str, int], budget: float | None) -> tuple[Reduction, str]:
    """When gradients are reduced, and why, in one line; of a run whose layers' form is chosen."""
    parallel, micro_batches = config.parallel, config.train.grad_accum_steps
    if parallel.grad_reduce != "auto":
        return parallel.grad_reduce, "parallel.grad_reduce says so"
    if parallel.zero == 1:
        return "step", "parallel.zero: 1 keeps them whole until then"
    shards = num_parts("embed", axes)
    replicas = num_parts("batch", axes) * num_parts("seq", axes) // shards
    if shards * replicas == 1:
        return "micro", "there is nothing to reduce"
    if micro_batches == 1:
        return "micro", "there is one micro-batch"
    late = _in_forms(config, grad_reduce="step")
    width = DTYPE_BYTES[config.model.compute_dtype]
    ends = 2 * width * params_gathered_once(late, axes) * (shards - 1) // shards
    layers = 2 * layer_matrix_bytes(config.model, axes) * config.model.num_layers // shards
    layers = 0 if parallel.zero_data else layers * (replicas - 1) // replicas
    often, once = ends + (0 if parallel.prefetches else layers), ends + layers
    if once > often * micro_batches:
        wait = f"{format_bytes(often)} cannot be hidden {micro_batches} times"
        return "micro", f"{wait}; at the end it would be {format_bytes(once)}"
    if not _fits(late, axes, budget):
        return "micro", "embedding, head and first layer, whole for the step, would hardly fit"
    return "step", f"{format_bytes(once)} cannot be hidden, once, and not {format_bytes(often)} {micro_batches} times"


def _with_remat(config: Config, remat: Remat) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))


def _in_forms(config: Config, **forms: str) -> Config:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **forms))


def formula_bytes(config: Config, axes: Mapping[str, int]) -> dict[str, int]:
    """`expected_bytes` of the step as it is computed on GPUs."""
    form, _ = sequence_form(config, axes)
    scores = 0 if can_fuse(config.model, axes, form) else MAX_CHUNK_SCORES
    return expected_bytes(config, axes, max_chunk_scores=scores, max_chunk_logits=MAX_CHUNK_LOGITS)


def _fits(config: Config, axes: Mapping[str, int], budget: float | None) -> bool:
    """Whether a run should fit by the formulas."""
    return budget is None or sum(formula_bytes(config, axes).values()) <= budget
