"""Hugging Face architectures that differ little from a Llama: their names, fixed settings and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llamajax.config.model import Head, ModelConfig
from llamajax.errors import ConfigError

_FIXED = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
Windows = Literal["none", "everywhere", "everywhere_on_request", "by_layer_on_request", "alternating_on_request"]


@dataclass(frozen=True)
class ExpertFamily:
    """Experts of an architecture: their settings in `config.json`, and the names of their tensors."""

    num_experts: tuple[str, ...]
    """Setting with the number of experts, and other names of it that are read; the first is written."""
    default_num: int | None
    """Number of experts where no setting says it."""
    mlp_dim: str = "moe_intermediate_size"
    """Setting with the width of an expert's hidden layer."""
    normalize: Literal["always", "on_request"] = "on_request"
    """Whether weights of a token's experts add up to one: always, or if `norm_topk_prob` says so."""
    shared: Literal["none", "gated", "several"] = "none"
    """Shared expert: none; one with a gate, of width `shared_expert_intermediate_size`; or one of the width of
    `n_shared_experts` experts."""
    dense_layers: Literal["none", "listed", "counted"] = "none"
    """Layers without experts: none; those of `mlp_only_layers` and between those of `decoder_sparse_step`; or those before
    `first_k_dense_replace` and between those of `moe_layer_freq`."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of tensor names that differ from Qwen's, and what the architecture has in their place, in the order in which
    they are replaced."""

    def fits(self, config: ModelConfig) -> bool:
        """Returns whether the architecture computes what the experts of a model compute."""
        own = config.experts
        plain = own.gated and own.latent_dim is None and own.weight_scale == 1 and own.top_groups == own.num_groups
        plain = plain and own.scores == "softmax" and own.bias_update_rate is None and not config.mlp_bias
        # DeepSeek's router does not divide by the sum where a token has one expert.
        one = self.shared == "several" and own.top_k == 1
        normalize = own.normalize if self.normalize == "always" else not (one and own.normalize)
        shared = {
            "none": own.shared_mlp_dim == 0,
            "gated": own.shared_mlp_dim > 0 and own.shared_gate,
            "several": own.shared_mlp_dim % (own.mlp_dim or config.mlp_dim) == 0 and not own.shared_gate,
        }[self.shared]
        dense = {
            "none": not own.dense_layers(config.num_layers),
            "listed": True,
            "counted": (own.first_dense_layers - 1) % own.layer_step == 0,
        }[self.dense_layers]
        return plain and normalize and shared and dense


@dataclass(frozen=True)
class Architecture:
    """One of transformers' families of model classes."""

    name: str
    """Name as people write it, with which the names of its classes begin."""
    model_type: str
    """`model_type` in `config.json`."""
    defaults: Mapping[str, Any]
    """Values that transformers gives to settings that are left out."""
    biases: tuple[str, ...] = ()
    """Settings of `config.json` that switch biases on; they are always written, because readers look for them."""
    qkv_bias: bool = False
    """Value of `ModelConfig.qkv_bias` where no setting of `config.json` sets it."""
    qk_norm: bool = False
    """Value of `ModelConfig.qk_norm`."""
    qk_norm_across_heads: bool = False
    """Value of `ModelConfig.qk_norm_across_heads`."""
    windows: Windows = "none"
    """Layers that have a sliding window: none, all, or those that settings name; the latter two may be on request."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies where no setting of `config.json` sets it."""
    experts: ExpertFamily | None = None
    """Experts in place of MLPs."""
    heads: tuple[Head, ...] = ("vocabulary", "score")
    """Heads with which the family has a class."""
    own_head_dim: bool = True
    """Whether heads may have a width other than `hidden_size / num_attention_heads`."""
    in_transformers: bool = True
    """Whether transformers has its classes; otherwise the model's own code on the Hub has them."""
    fixed: Mapping[str, Any] = field(default_factory=lambda: _FIXED)
    """Settings that change what is computed, each with the one value that is supported."""

    def class_name(self, head: Head) -> str:
        """Returns the entry of `architectures` in `config.json` of a model with this head."""
        return f"{self.name}{_PURPOSES[head]}"

    def own_name(self, tensor: str) -> str:
        """Returns the name of a tensor in files of this architecture; `tensor` is that of a Llama or Qwen."""
        for part, own in self._renamed.items():
            tensor = tensor.replace(part, own)
        return tensor

    def common_name(self, tensor: str) -> str:
        """Reverts `own_name`; names that are common already stay as they are."""
        for part, own in self._renamed.items():
            tensor = tensor.replace(own, part)
        return tensor

    @property
    def _renamed(self) -> Mapping[str, str]:
        return {} if self.experts is None else self.experts.renamed


_PURPOSES: dict[Head, str] = {"vocabulary": "ForCausalLM", "score": "ForSequenceClassification"}
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_MIXTRAL_NAMES = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}

ARCHITECTURES = (
    Architecture("Llama", "llama", {"max_position_embeddings": 2048} | _ENDS, ("attention_bias", "mlp_bias")),
    Architecture(
        "Mistral", "mistral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096} | _ENDS,
        windows="everywhere",
    ),
    Architecture("Qwen2", "qwen2", _QWEN, qkv_bias=True, windows="by_layer_on_request"),
    Architecture(
        "Qwen3", "qwen3", _QWEN | {"head_dim": 128}, ("attention_bias",), qk_norm=True, windows="by_layer_on_request"
    ),
    Architecture(
        "Mixtral", "mixtral",
        {
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2,
            **_ENDS,
        },
        windows="everywhere",
        rope_theta=1e6,
        experts=ExpertFamily(
            ("num_local_experts", "num_experts"), 8, "intermediate_size", normalize="always", renamed=_MIXTRAL_NAMES
        ),
    ),
    Architecture(
        "Qwen2Moe", "qwen2_moe",
        {
            "num_key_value_heads": 16, "max_position_embeddings": 32768, "qkv_bias": True, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        },
        ("qkv_bias",),
        windows="alternating_on_request",
        experts=ExpertFamily(("num_experts", "num_local_experts"), 60, shared="gated", dense_layers="listed"),
    ),
    Architecture(
        "Qwen3Moe", "qwen3_moe",
        {
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        ("attention_bias",),
        qk_norm=True,
        windows="everywhere_on_request",
        experts=ExpertFamily(("num_experts", "num_local_experts"), 128, dense_layers="listed"),
    ),
    Architecture(
        "Olmoe", "olmoe", {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8},
        ("attention_bias",),
        qk_norm_across_heads=True,
        experts=ExpertFamily(("num_experts", "num_local_experts"), 64, "intermediate_size"),
        heads=("vocabulary",),
        own_head_dim=False,
        fixed=_FIXED | {"clip_qkv": None},
    ),
    Architecture(
        "Deepseek", "deepseek", {"max_position_embeddings": 2048, "moe_intermediate_size": 1407},
        ("attention_bias",),
        experts=ExpertFamily(
            ("n_routed_experts",), None, shared="several", dense_layers="counted",
            renamed={".shared_expert.": ".shared_experts."},
        ),
        own_head_dim=False,
        in_transformers=False,
        fixed=_FIXED | {"scoring_func": "softmax"},
    ),
)  # fmt: skip
"""All architectures; of several that fit a model, the first is written."""
LLAMA = ARCHITECTURES[0]
REFUSED = {
    "gpt_oss": "its attention has learned sinks, and its experts have biases and another activation",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), "its attention keeps keys and values in a latent (MLA)"),
}
"""Models of which people ask most, and what they have that no setting of ours expresses."""
_PARTS = ("sliding_window", "layer_types", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "qk_norm_across_heads")


def architecture_of(config: ModelConfig, model_type: str | None = None) -> Architecture:
    """Returns the architecture that a model has for transformers.

    Args:
        config: the model.
        model_type: that of the architecture from which the model was imported. The model keeps it if it computes the same.
            None: a Llama, unless something in the model excludes that.

    Raises:
        ConfigError: no architecture has all parts of the model.
    """
    fitting = [architecture for architecture in ARCHITECTURES if _fits(architecture, config)]
    if not fitting:
        has = [part for part in _PARTS if getattr(config, part)]
        has += ["experts with these settings"] if config.experts.enabled else []
        raise ConfigError(
            f"model: no architecture of transformers has exactly {', '.join(has)} of the optional parts"
            f" {', '.join(_PARTS)}, experts; the model cannot be exported"
        )
    return next((architecture for architecture in fitting if architecture.model_type == model_type), fitting[0])


def _fits(architecture: Architecture, config: ModelConfig) -> bool:
    # transformers' Mistral has one window for all layers; without a window it computes the same as a Llama. transformers 5
    # refuses a Llama with a width that its heads do not divide, even if it has its own head_dim. 4.57 accepts it, and both
    # accept the other architectures.
    is_llama = config.embed_dim % config.num_heads == 0
    attention_bias = "attention_bias" in architecture.biases and config.output_bias
    qkv_bias = config.qkv_bias if "qkv_bias" in architecture.biases else architecture.qkv_bias or attention_bias
    same_layers = (qkv_bias, attention_bias, architecture.qk_norm, architecture.qk_norm_across_heads) == (
        config.qkv_bias,
        config.output_bias,
        config.qk_norm,
        config.qk_norm_across_heads,
    )
    same_mlp = "mlp_bias" in architecture.biases or not config.mlp_bias
    family, has_experts = architecture.experts, config.experts.enabled
    same_experts = not has_experts if family is None else has_experts and family.fits(config)
    same_windows = {
        "none": config.sliding_window is None,
        "everywhere": not config.layer_types,
        "everywhere_on_request": not config.layer_types,
    }.get(architecture.windows, True)
    same_heads = architecture.own_head_dim or config.num_heads * config.head_dim == config.embed_dim
    has_class = config.head in architecture.heads
    same = same_layers and same_mlp and same_experts and same_windows and same_heads and has_class
    return same and (is_llama or architecture is not LLAMA)
