"""The Hugging Face architectures that are a Llama with few changes: what each calls itself, fixes and leaves out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamajax.config.model import ModelConfig
from llamajax.errors import ConfigError

_FIXED = {"hidden_act": "silu", "quantization_config": None, "partial_rotary_factor": 1.0}


@dataclass(frozen=True)
class Architecture:
    """One of transformers' model classes."""

    name: str
    """As people write it."""
    model_type: str
    """In `config.json`, with `<class_name>` as the architecture."""
    class_name: str
    """In `config.json`."""
    fixed: Mapping[str, Any]
    """Settings that change what is computed, and the one value that ours computes."""
    defaults: Mapping[str, Any]
    """Values that transformers gives to settings that are left out."""
    qkv_bias: bool = False
    """As in `ModelConfig`."""
    qk_norm: bool = False
    """As in `ModelConfig`."""
    written: Mapping[str, Any] | None = None
    """Settings that are written because readers look for them."""


_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}

LLAMA, MISTRAL, QWEN2, QWEN3 = ARCHITECTURES = (
    Architecture(
        "Llama", "llama", "LlamaForCausalLM", _FIXED | _BIASES, {"max_position_embeddings": 2048} | _ENDS, written=_BIASES
    ),
    Architecture(
        "Mistral", "mistral", "MistralForCausalLM", _FIXED,
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096} | _ENDS,
    ),
    Architecture("Qwen2", "qwen2", "Qwen2ForCausalLM", _FIXED, _QWEN, qkv_bias=True),
    Architecture(
        "Qwen3", "qwen3", "Qwen3ForCausalLM", _FIXED | {"attention_bias": False}, _QWEN | {"head_dim": 128},
        qk_norm=True, written={"attention_bias": False},
    ),
)  # fmt: skip


def architecture_of(config: ModelConfig, model_type: str | None = None) -> Architecture:
    """What a model is for transformers.

    Args:
        config: the model.
        model_type: of the architecture that it came as, which it stays where that computes the same; None: a Llama, unless
            something in it says otherwise.

    Raises:
        ConfigError: no architecture has what the model has.
    """
    if config.qkv_bias and config.qk_norm:
        raise ConfigError(
            "model.qkv_bias: no architecture of transformers has qk_norm too; a model with both cannot be exported"
        )
    fitting = [architecture for architecture in ARCHITECTURES if _fits(architecture, config)]
    return next((architecture for architecture in fitting if architecture.model_type == model_type), fitting[0])


def _fits(architecture: Architecture, config: ModelConfig) -> bool:
    # A Mistral without a window computes what a Llama does. transformers 5 refuses a Llama whose width its heads do not
    # divide, even if it has its own head_dim (4.57 does not, nor does either refuse the others).
    is_llama = config.sliding_window is None and config.embed_dim % config.num_heads == 0
    same_layers = (architecture.qkv_bias, architecture.qk_norm) == (config.qkv_bias, config.qk_norm)
    return same_layers and (is_llama or architecture is not LLAMA)
