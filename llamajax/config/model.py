"""The model: its shape, and the parts of its mathematics that differ between families."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from llamajax.config.experts import ExpertsConfig
from llamajax.config.layer_weights import MATRICES, Matrix
from llamajax.config.parallel import axes_of, num_parts, product
from llamajax.config.rules import Bound, PositiveFloat, PositiveFloatOrUnset, PositiveInt, PositiveIntOrUnset, Section

T = TypeVar("T")
DType = Literal["float32", "bfloat16"]
MatmulDType = Literal["compute_dtype", "float8", "float8_unrounded"]
AttentionKernel = Literal["auto", "pallas", "triton", "cudnn", "tokamax", "plain"]
LayerType = Literal["sliding_attention", "full_attention"]
Head = Literal["vocabulary", "score"]
InitChange = Literal["rope_theta", "rope_scaling", "sliding_window", "layer_types", "norm_eps"]
"""Settings that change what weights compute, but no shape of a weight."""
Preset = Literal[
    "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3.1-8b", "llama-3.1-70b",
    "llama-3.1-405b", "llama-3.2-1b", "llama-3.2-3b", "llama-530b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b",
    "deepseek-moe-16b",
]  # fmt: skip
"""Models that `configs/models` describes."""
Remat = Literal["auto", "none", "save_attention_qkv_mlp", "save_attention_qkv", "save_attention", "full"]
REMATS: tuple[Remat, ...] = ("none", "save_attention_qkv_mlp", "save_attention_qkv", "save_attention", "full")
"""Every choice but `auto`, from the one that keeps most to the one that keeps least."""
SAVED_BY_REMAT: dict[Remat, tuple[str, ...] | None] = {
    "none": None,
    "full": (),
    "save_attention": ("residual", "attention"),
    "save_attention_qkv": ("residual", "attention", "qkv"),
    "save_attention_qkv_mlp": ("residual", "attention", "qkv", "gate_up", "dispatched", "expert_output"),
}
"""Named values of a layer (`checkpoint_name`) that the forward pass keeps beside the layer's input; None: all."""
EvenInt = Annotated[PositiveInt, Bound(lambda value: value % 2 == 0, "must be even: rotary positions turn pairs")]


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig(Section):
    """Scaling of the rotary frequencies for sequences beyond the original training length."""

    kind: Literal["none", "linear", "llama3", "yarn", "dynamic"] = "none"
    """Kind of scaling. `none`: plain RoPE. `linear`: divide all frequencies by `factor`. `llama3` and `yarn`: scale only the
    long wavelengths; `yarn` also sharpens attention. `dynamic`: plain RoPE up to `original_max_seq_len`. Beyond that length,
    transformers scales by the length of the whole sequence, so longer sequences are refused here."""
    factor: Annotated[float, Bound(lambda value: value >= 1, "must be at least 1.0")] = 1.0
    """Factor by which long wavelengths are stretched."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above `original_max_seq_len / low_freq_factor` are fully stretched."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths below `original_max_seq_len / high_freq_factor` are left unchanged."""
    original_max_seq_len: PositiveInt = 8192
    """`llama3`, `yarn`, `dynamic`: tokens per sequence in the pretraining that precedes the scaling."""
    beta_fast: PositiveFloat = 32.0
    """`yarn`: wavelengths that fit this many times or more into the original length are left unchanged."""
    beta_slow: PositiveFloat = 1.0
    """`yarn`: wavelengths that fit this many times or fewer into the original length are fully stretched."""
    attention_factor: PositiveFloatOrUnset = None
    """`yarn`: factor that multiplies queries and keys; unset: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """`yarn`: round the two bounds outwards to whole pairs of head dims."""

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
    """LLaMA decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Settings below add what Mistral and Qwen
    change."""

    preset: Preset | None = None
    """Released model whose description fills in the settings of the model that a file and its bases leave out. The complete
    configuration has the settings themselves, and no preset."""
    vocab_size: PositiveInt
    """Rows of the embedding table; at least the tokenizer's number of pieces."""
    embed_dim: PositiveInt
    """Width of the residual stream."""
    mlp_dim: PositiveInt
    """Width of the SwiGLU hidden layer."""
    num_layers: PositiveInt
    """Number of decoder layers."""
    num_heads: PositiveInt
    """Query heads per layer."""
    num_kv_heads: PositiveInt
    """Key/value heads per layer; `num_heads` for multi-head attention, fewer for grouped-query attention."""
    head_dim: EvenInt
    """Width of one head; it need not be `embed_dim / num_heads`."""
    max_seq_len: PositiveInt = 4096
    """Longest sequence that the model supports, in tokens."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """Scaling of the rotary frequencies."""
    norm_eps: PositiveFloat = 1e-5
    """Number added to the mean square inside RMSNorm."""
    sliding_window: PositiveIntOrUnset = None
    """Number of newest tokens that a token sees, itself included (Mistral); unset: all tokens before it."""
    layer_types: tuple[LayerType, ...] = ()
    """Layers that have the window, by the names of config.json, in the order in which they repeat: [sliding_attention,
    full_attention] for every other layer; empty: all layers."""
    attend_across_documents: bool = False
    """A token sees all tokens before it in its row, whatever their document, as in the training of Llama 2 and GPT-3.
    Otherwise it sees only its own document, as in the training of Llama 3."""
    qkv_bias: bool = False
    """Add learned biases to queries, keys and values (Qwen2)."""
    output_bias: bool = False
    """Add a learned bias to attention's output. Llamas with `attention_bias` have it beside `qkv_bias`."""
    mlp_bias: bool = False
    """Add learned biases to gate, input and output of the MLP, as Llamas with `mlp_bias` have."""
    qk_norm: bool = False
    """Apply RMSNorm to every head's queries and keys before the rotary positions (Qwen3)."""
    qk_norm_across_heads: bool = False
    """Apply RMSNorm to the queries of all heads at once, and to the keys of all heads, before the rotary positions (OLMoE).
    It takes the place of `qk_norm`."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """Experts in place of each layer's MLP."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head."""
    head: Head = "vocabulary"
    """Last matrix of the model. `vocabulary`: a row for each token, which gives the logits of the next one. `score`: a
    single row, which gives a text its score; then `tie_embeddings` has no effect. A file with `objective.kind: reward` may
    leave it out."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights; residual outputs use `init_std / sqrt(2 * num_layers)`."""
    param_dtype: DType = "float32"
    """Type of the master weights. `bfloat16` halves them, but loses every update below 1/512 of its weight, which are most
    updates of fine-tuning. Gradients are summed in float32 either way."""
    compute_dtype: DType = "bfloat16"
    """Type of activations, matmuls and the weight copies that collectives carry."""
    matmul_dtype: MatmulDType = "compute_dtype"
    """Type of the inputs of layers' matmuls in training, forward and backward. `float8` doubles their rate on GPUs of
    compute capability 8.9 and newer, and halves the weights that collectives carry in bfloat16: activations and weights are
    rounded to e4m3, gradients to e5m2, and each tensor is scaled by its current largest entry; sums are float32, results
    `compute_dtype`. Embedding, head, attention scores, norms, evaluation and generation are unchanged. `float8_unrounded` is
    the same program without the rounding; `llamajax.verify` compares it."""
    float8_exempt: tuple[Matrix, ...] = ()
    """Matrices of every layer that `matmul_dtype: float8` leaves in `compute_dtype`, such as [wo, w_down]."""
    attention_kernel: AttentionKernel = "auto"
    """Kernel that computes attention. `cudnn`: NVIDIA's fused kernel, for rows that are not split (mesh.sequence 1, or
    parallel.sequence ulysses), with documents that see each other. `pallas`: llamajax's own kernel, for all rows; it skips
    what documents and windows hide. Both need GPUs and 16-bit types. `tokamax` (extra `tokamax`, Python 3.12): written for
    Hopper, for the rows of `cudnn` and for closed documents too. `triton` (extra `triton`): `pallas` in Triton's own
    language. `plain`: runs everywhere. `auto`: the first that can of `cudnn`, `pallas` and `plain`, with a warning if that
    is `plain` on a GPU. `tokamax` and `triton` are not measured yet, so they are used only by name. A kernel that is named
    and cannot run is an error."""
    remat: Remat = "full"
    """Values that the backward pass recomputes to save memory. `none` keeps everything; `full` keeps only each layer's
    input; `save_*` also keeps what is added to the residual stream after attention, and the named matmul outputs. `auto`
    takes the fastest that fits `hardware.gpu` according to the plan, which compiles the step with each."""

    def broken_rules(self) -> Iterator[str]:
        if self.preset is not None:
            yield f"preset: {self.preset} means something in files and on command lines only; remove it, or use load_config"
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
        if self.qk_norm and self.qk_norm_across_heads:
            yield "qk_norm_across_heads: excludes qk_norm; remove one of them"
        yield from self.experts.undivided_layers(self.num_layers)
        if len(set(self.float8_exempt)) == len(MATRICES):
            yield "float8_exempt: leaves no matmul in float8; set matmul_dtype to compute_dtype, or name fewer matrices"

    @property
    def has_own_head(self) -> bool:
        """Whether the head is a weight of its own, and not the embedding table."""
        return self.head == "score" or not self.tie_embeddings

    @property
    def head_rows(self) -> int:
        """Number of rows of the head."""
        return 1 if self.head == "score" else self.vocab_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in the shortest round that the layers repeat; None: the layer sees all tokens
        before."""
        kinds = itertools.cycle(self.layer_types or ["sliding_attention"])
        windows = {"sliding_attention": self.sliding_window, "full_attention": None}
        return shortest_round([windows[kind] for kind in itertools.islice(kinds, self.num_layers)])

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a dense MLP where others have experts; they are stored in a stack of their own."""
        return self.experts.dense_layers(self.num_layers) if self.experts.enabled else ()

    @property
    def float8_weights(self) -> tuple[str, ...]:
        """Matrices of a layer, among `MATRICES`, that training multiplies in float8."""
        exempt = MATRICES if self.matmul_dtype == "compute_dtype" else self.float8_exempt
        return tuple(name for name in MATRICES if name not in exempt)

    def computed_kv_heads(self, axes: Mapping[str, int]) -> int:
        """Returns the number of key/value heads with which devices on axes of these sizes compute. Where more devices split
        the heads than heads exist, every device has a copy of one, with its share of the query heads."""
        return max(self.num_kv_heads, num_parts("kv_heads", axes))

    def undivided(self, axes: Mapping[str, int]) -> list[str]:
        """Returns one line for each part of the model that does not divide over mesh axes of these sizes."""
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
        problems += self.experts.undivided(axes)
        rows = {"num_kv_heads": self.num_kv_heads, "vocab_size": self.vocab_size, "head": self.head_rows}
        whole = [name for name, dim in _SPLIT_OR_WHOLE.items() if rows[name] % num_parts(dim, axes)]
        columns = num_parts("embed_tensor", axes)
        if whole and not problems and self.embed_dim % columns:
            by = product({axis: axes[axis] for axis in axes_of("embed_tensor")})
            problems.append(
                f"model.{whole[0]}: {rows[whole[0]]} is not divisible by {over}; then embed_dim={self.embed_dim}"
                f" must be divisible by {by} = {columns}"
            )
        return problems


_SPLIT_OR_WHOLE = {"num_kv_heads": "kv_heads", "vocab_size": "vocab", "head": "vocab"}
"""Settings whose number of heads or rows need not divide; matrices are then stored split along `embed_tensor` instead."""


def shortest_round(layers: Sequence[T]) -> tuple[T, ...]:
    """Returns the shortest beginning of `layers` that repeats to give all of them."""
    rounds = (tuple(layers[:period]) for period in range(1, len(layers) + 1))
    return next(own for own in rounds if all(layer == own[n % len(own)] for n, layer in enumerate(layers)))
