"""Hugging Face architectures that differ little from a Llama: their names, fixed settings and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamajax.config.model import Head, ModelConfig
from llamajax.errors import ConfigError

_FIXED = {"hidden_act": "silu", "partial_rotary_factor": 1.0}


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
    fixed: Mapping[str, Any] = field(default_factory=lambda: _FIXED)
    """Settings that change what is computed, each with the one value that is supported."""

    def class_name(self, head: Head) -> str:
        """Returns the entry of `architectures` in `config.json` of a model with this head."""
        return f"{self.name}{_PURPOSES[head]}"


_PURPOSES: dict[Head, str] = {"vocabulary": "ForCausalLM", "score": "ForSequenceClassification"}
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}

LLAMA, MISTRAL, QWEN2, QWEN3 = ARCHITECTURES = (
    Architecture("Llama", "llama", {"max_position_embeddings": 2048} | _ENDS, ("attention_bias", "mlp_bias")),
    Architecture(
        "Mistral", "mistral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096} | _ENDS,
    ),
    Architecture("Qwen2", "qwen2", _QWEN, qkv_bias=True),
    Architecture("Qwen3", "qwen3", _QWEN | {"head_dim": 128}, ("attention_bias",), qk_norm=True),
)  # fmt: skip
_PARTS = ("sliding_window", "layer_types", "qkv_bias", "output_bias", "mlp_bias", "qk_norm")


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
        has = ", ".join(part for part in _PARTS if getattr(config, part))
        raise ConfigError(
            f"model: no architecture of transformers has exactly {has} of the optional parts {', '.join(_PARTS)};"
            " the model cannot be exported"
        )
    return next((architecture for architecture in fitting if architecture.model_type == model_type), fitting[0])


def _fits(architecture: Architecture, config: ModelConfig) -> bool:
    # transformers' Mistral has one window for all layers; without a window it computes the same as a Llama. transformers 5
    # refuses a Llama with a width that its heads do not divide, even if it has its own head_dim. 4.57 accepts it, and both
    # accept the other architectures.
    is_llama = config.sliding_window is None and config.embed_dim % config.num_heads == 0
    attention_bias = "attention_bias" in architecture.biases and config.output_bias
    same_layers = (architecture.qkv_bias or attention_bias, attention_bias, architecture.qk_norm) == (
        config.qkv_bias,
        config.output_bias,
        config.qk_norm,
    )
    same_mlp = "mlp_bias" in architecture.biases or not config.mlp_bias
    same_windows = architecture is not MISTRAL or not config.layer_types
    return same_layers and same_mlp and same_windows and (is_llama or architecture is not LLAMA)
