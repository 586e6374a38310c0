"""The model: its shape, and the mathematics that its family changes."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from llamajax.config.layer_weights import MATRICES, Matrix
from llamajax.config.parallel import axes_of, num_parts, product
from llamajax.config.rules import Bound, PositiveFloat, PositiveFloatOrUnset, PositiveInt, PositiveIntOrUnset, Section

T = TypeVar("T")
DType = Literal["float32", "bfloat16"]
MatmulDType = Literal["compute_dtype", "float8", "float8_unrounded"]
AttentionKernel = Literal["auto", "pallas", "triton", "cudnn", "tokamax", "plain"]
LayerType = Literal["sliding_attention", "full_attention"]
InitChange = Literal["rope_theta", "rope_scaling", "sliding_window", "layer_types", "norm_eps"]
"""Settings that change what weights compute, but none of their shapes."""
Remat = Literal["auto", "none", "save_attention_qkv_mlp", "save_attention_qkv", "save_attention", "full"]
REMATS: tuple[Remat, ...] = ("none", "save_attention_qkv_mlp", "save_attention_qkv", "save_attention", "full")
"""From what keeps most to what keeps least."""
SAVED_BY_REMAT: dict[Remat, tuple[str, ...] | None] = {
    "none": None,
    "full": (),
    "save_attention": ("residual", "attention"),
    "save_attention_qkv": ("residual", "attention", "qkv"),
    "save_attention_qkv_mlp": ("residual", "attention", "qkv", "gate_up"),
}
"""Which of a layer's named values (`checkpoint_name`) the forward pass keeps, beside the layer's input; None: all of it."""
EvenInt = Annotated[PositiveInt, Bound(lambda value: value % 2 == 0, "must be even: rotary positions turn pairs")]


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig(Section):
    """How rotary frequencies are stretched beyond the length the model was first trained on."""

    kind: Literal["none", "linear", "llama3", "yarn", "dynamic"] = "none"
    """`none`: plain RoPE. `linear`: all frequencies divided by `factor`. `llama3` and `yarn`: only the long wavelengths;
    `yarn` also sharpens attention. `dynamic`: plain RoPE up to `original_max_seq_len`; beyond, transformers stretches by
    the length of the whole sequence, so that such a model has no longer ones here."""
    factor: Annotated[float, Bound(lambda value: value >= 1, "must be at least 1.0")] = 1.0
    """Stretch of the long wavelengths."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above `original_max_seq_len / low_freq_factor` are fully stretched."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths below `original_max_seq_len / high_freq_factor` are left alone."""
    original_max_seq_len: PositiveInt = 8192
    """`llama3`, `yarn`, `dynamic`: tokens per sequence of the pretraining that the stretch starts from."""
    beta_fast: PositiveFloat = 32.0
    """`yarn`: wavelengths that fit so many times into the original length are left alone."""
    beta_slow: PositiveFloat = 1.0
    """`yarn`: wavelengths that fit so many times into it are fully stretched."""
    attention_factor: PositiveFloatOrUnset = None
    """`yarn`: factor of queries and of keys; unset: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """`yarn`: the two bounds are rounded outwards to whole pairs of head dims."""

    def broken_rules(self) -> Iterator[str]:
        if self.kind == "none" and self.factor != 1.0:
            yield f"factor: {self.factor} has no effect with kind=none; set kind to linear, llama3 or yarn, or remove factor"
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            yield f"low_freq_factor: {self.low_freq_factor} must be between 0 and high_freq_factor={self.high_freq_factor}"
        if self.beta_slow >= self.beta_fast:
            yield f"beta_slow: {self.beta_slow} must be below beta_fast={self.beta_fast}"
        if self.attention_factor is not None and self.kind != "yarn":
            yield f"attention_factor: has no effect with kind={self.kind}; set kind to yarn, or remove this"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """A LLaMA decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; and what Mistral and Qwen change."""

    vocab_size: PositiveInt
    """Rows of the embedding table; at least the tokenizer's number of pieces."""
    embed_dim: PositiveInt
    """Width of the residual stream."""
    mlp_dim: PositiveInt
    """Width of the SwiGLU hidden layer."""
    num_layers: PositiveInt
    """Decoder layers."""
    num_heads: PositiveInt
    """Query heads per layer."""
    num_kv_heads: PositiveInt
    """Key/value heads per layer; `num_heads` for multi-head attention, fewer for grouped-query attention."""
    head_dim: EvenInt
    """Width of one head; need not be `embed_dim / num_heads`."""
    max_seq_len: PositiveInt = 4096
    """Longest sequence the model is meant for, tokens."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """Stretch of the rotary frequencies."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square inside RMSNorm."""
    sliding_window: PositiveIntOrUnset = None
    """Newest tokens, itself included, that a token sees (Mistral); unset: all before it."""
    layer_types: tuple[LayerType, ...] = ()
    """Which layers have the window, as config.json calls them, in the order in which they repeat, such as
    [sliding_attention, full_attention] for every other one; empty: all."""
    attend_across_documents: bool = False
    """A token sees all before it in its row, whatever document they are of, as Llama 2 and GPT-3 were trained;
    otherwise only its own document, as Llama 3 was."""
    qkv_bias: bool = False
    """Add learned biases to queries, keys and values (Qwen2)."""
    output_bias: bool = False
    """Add a learned bias to attention's output, as Llamas with `attention_bias` have beside `qkv_bias`."""
    mlp_bias: bool = False
    """Add learned biases to gate, input and output of the MLP, as Llamas with `mlp_bias` have."""
    qk_norm: bool = False
    """RMSNorm every head's queries and keys before they are turned by their positions (Qwen3)."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights; residual outputs use `init_std / sqrt(2 * num_layers)`."""
    param_dtype: DType = "float32"
    """Type of the master weights. bfloat16 halves them, but loses every update below 1/512 of its weight, which most of
    fine-tuning's are; gradients are summed in float32 either way."""
    compute_dtype: DType = "bfloat16"
    """Type of activations, matmuls and the weight copies that collectives carry."""
    matmul_dtype: MatmulDType = "compute_dtype"
    """Type of the factors of layers' matmuls in training, forward and backward. `float8` doubles their rate on GPUs of
    compute capability 8.9 and newer, and halves the weights that collectives carry in bfloat16: activations and weights are
    rounded to e4m3, gradients to e5m2, each tensor scaled by its largest entry as it is then; sums are float32, results
    `compute_dtype`. Embedding, head, attention scores, norms, evaluation and generation stay as they are.
    `float8_unrounded` is the same program with nothing rounded, as `llamajax.verify` compares it."""
    float8_exempt: tuple[Matrix, ...] = ()
    """Matrices of every layer whose matmuls stay in `compute_dtype` with `matmul_dtype: float8`, such as [wo, w_down]."""
    attention_kernel: AttentionKernel = "auto"
    """What computes attention: `cudnn` is NVIDIA's fused kernel, for rows that are not split (mesh.sequence 1, or
    parallel.sequence ulysses) and whose documents see each other; `pallas` is llamajax's own, for all rows, which skips what
    documents and windows hide; both are for GPUs and 16-bit types. `tokamax` (extra `tokamax`, Python 3.12) is written for
    Hopper: for rows as `cudnn` takes them, and for closed documents too. `triton` (extra `triton`) is `pallas` in Triton's
    own language. `plain` runs everywhere. `auto` is the first that can of `cudnn`, `pallas` and `plain`, of which the last
    is told with a warning on a GPU; `tokamax` and `triton`, not yet measured, are only taken by name. A kernel that is named
    and cannot is an error."""
    remat: Remat = "full"
    """What the backward pass recomputes: `none` keeps everything, `full` keeps each layer's input only,
    `save_*` also what is added up behind attention, and the named matmul outputs. `auto` is the fastest that fits
    `hardware.gpu` by the plan, for which the step is compiled with each."""

    def broken_rules(self) -> Iterator[str]:
        if min(self.num_heads, self.num_kv_heads) > 0 and self.num_heads % self.num_kv_heads:
            yield f"num_kv_heads: {self.num_kv_heads} must divide num_heads={self.num_heads}"
        if self.layer_types and (self.sliding_window is None or len(set(self.layer_types)) == 1):
            yield "layer_types: must name both types, with sliding_window set; remove it where all layers are alike"
        if len(self.layer_types) > max(self.num_layers, 0):
            yield f"layer_types: names {len(self.layer_types)} layers of num_layers={self.num_layers}; name no more"
        longest = self.rope_scaling.original_max_seq_len
        if self.rope_scaling.kind == "dynamic" and self.max_seq_len > longest:
            rule = f"must be at most rope_scaling.original_max_seq_len={longest} with kind=dynamic"
            yield f"max_seq_len: {self.max_seq_len} {rule}; choose yarn or linear for longer sequences"
        if self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            yield f"rope_theta: {self.rope_theta} must be above 1 with rope_scaling.kind=yarn"
        if self.float8_exempt and self.matmul_dtype == "compute_dtype":
            yield "float8_exempt: has no effect with matmul_dtype=compute_dtype; set that to float8, or remove this"
        if len(set(self.float8_exempt)) == len(MATRICES):
            yield "float8_exempt: leaves no matmul in float8; set matmul_dtype to compute_dtype, or name fewer matrices"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer in the shortest round that the layers repeat; None: the layer sees all tokens
        before."""
        kinds = itertools.cycle(self.layer_types or ["sliding_attention"])
        windows = {"sliding_attention": self.sliding_window, "full_attention": None}
        return shortest_round([windows[kind] for kind in itertools.islice(kinds, self.num_layers)])

    @property
    def float8_weights(self) -> tuple[str, ...]:
        """Of a layer's `MATRICES`, those that training multiplies in float8."""
        exempt = MATRICES if self.matmul_dtype == "compute_dtype" else self.float8_exempt
        return tuple(name for name in MATRICES if name not in exempt)

    def computed_kv_heads(self, axes: Mapping[str, int]) -> int:
        """Key/value heads as devices on axes of these sizes compute with them: where more devices split them than there are,
        every device has a copy of one, with its share of the query heads."""
        return max(self.num_kv_heads, num_parts("kv_heads", axes))

    def undivided(self, axes: Mapping[str, int]) -> list[str]:
        """What of the model does not divide over mesh axes of these sizes: one line each."""
        problems = [
            f"model.{name}: {getattr(self, name)} must be divisible by "
            + " x ".join(f"mesh.{axis}={axes[axis]}" for axis in axes_of(dim) if axes[axis] > 1)
            for dim, name in {"embed": "embed_dim", "mlp": "mlp_dim"}.items()
            if getattr(self, name) % num_parts(dim, axes)
        ]
        heads, parts = self.computed_kv_heads(axes), num_parts("kv_heads", axes)
        over = " x ".join(f"mesh.{axis}={axes[axis]}" for axis in axes_of("kv_heads"))
        if heads % parts or heads % self.num_kv_heads or self.num_heads % heads:
            problems.append(
                f"model.num_kv_heads: {self.num_kv_heads} must be divisible by {over},"
                f" or divide it where it divides num_heads={self.num_heads}"
            )
        whole = [name for name, dim in _SPLIT_OR_WHOLE.items() if getattr(self, name) % num_parts(dim, axes)]
        columns = num_parts("embed_tensor", axes)
        if whole and not problems and self.embed_dim % columns:
            by = product({axis: axes[axis] for axis in axes_of("embed_tensor")})
            problems.append(
                f"model.{whole[0]}: {getattr(self, whole[0])} is not divisible by {over}; then embed_dim={self.embed_dim}"
                f" must be divisible by {by} = {columns}"
            )
        return problems


_SPLIT_OR_WHOLE = {"num_kv_heads": "kv_heads", "vocab_size": "vocab"}
"""What need not divide; matrices are then stored split along `embed_tensor` instead."""


def shortest_round(layers: Sequence[T]) -> tuple[T, ...]:
    """The shortest beginning of `layers` whose repetition gives them all."""
    rounds = (tuple(layers[:period]) for period in range(1, len(layers) + 1))
    return next(own for own in rounds if all(layer == own[n % len(own)] for n, layer in enumerate(layers)))
