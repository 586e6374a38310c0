"""Tiny models of every variant as other programs write them, shared by the tests of the converters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from converters.arguments import hf_arguments
from converters.convert import main
from llamajax.config.experts import ExpertsConfig
from llamajax.config.hf_config import hf_config_of
from llamajax.config.model import ModelConfig, RopeScalingConfig

TINY = ModelConfig(
    vocab_size=96, embed_dim=32, mlp_dim=48, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8,
    max_seq_len=16384, init_std=0.2,
)  # fmt: skip
LLAMA3 = RopeScalingConfig(kind="llama3", factor=8.0, original_max_seq_len=8192)
YARN = RopeScalingConfig(kind="yarn", factor=4.0, original_max_seq_len=4096, beta_fast=16.0, attention_factor=1.25)
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama1": {"norm_eps": 1e-6},
    "llama2-70b": {"num_heads": 8, "num_kv_heads": 2},
    "llama3": {"num_kv_heads": 2, "rope_theta": 5e5},
    "llama3.1": {"num_kv_heads": 1, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama3.2": {"num_kv_heads": 2, "rope_theta": 5e5, "rope_scaling": LLAMA3, "tie_embeddings": True},
    "linear-scaling": {"rope_scaling": RopeScalingConfig(kind="linear", factor=4.0)},
    "yarn": {"rope_scaling": YARN},
    "dynamic": {"rope_scaling": RopeScalingConfig(kind="dynamic", factor=2.0, original_max_seq_len=16384)},
    "biases": {"num_kv_heads": 2, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "separate-head-dim": {"head_dim": 20, "num_kv_heads": 2},
    "mistral": {"num_kv_heads": 2, "sliding_window": 8},
    "qwen2": {"num_kv_heads": 2, "qkv_bias": True, "tie_embeddings": True},
    "qwen2-window": {"num_kv_heads": 1, "qkv_bias": True, "sliding_window": 8},
    "qwen2-turns": {
        "num_kv_heads": 1, "qkv_bias": True, "sliding_window": 8, "layer_types": ("sliding_attention", "full_attention"),
    },
    "qwen3-upper": {
        "num_kv_heads": 2, "head_dim": 16, "qk_norm": True, "sliding_window": 8,
        "layer_types": ("full_attention", "sliding_attention", "sliding_attention"),
    },
    "llama-score": {"num_kv_heads": 2, "head": "score", "tie_embeddings": True},
    "mistral-score": {"num_kv_heads": 2, "head": "score", "sliding_window": 8},
    "qwen2-score": {"num_kv_heads": 2, "head": "score", "qkv_bias": True},
    "qwen3-score": {"num_kv_heads": 2, "head": "score", "head_dim": 16, "qk_norm": True},
    "qwen3": {"num_kv_heads": 2, "head_dim": 16, "qk_norm": True},
    "qwen3-biases": {"num_kv_heads": 2, "head_dim": 16, "qk_norm": True, "qkv_bias": True, "output_bias": True},
    "mixtral": {"num_kv_heads": 2, "sliding_window": 8, "rope_theta": 1e6, "experts": ExpertsConfig(num_experts=4)},
    "qwen2-moe": {
        "num_kv_heads": 2, "qkv_bias": True, "num_layers": 4,
        "experts": ExpertsConfig(
            num_experts=6, top_k=3, mlp_dim=16, shared_mlp_dim=24, shared_gate=True, normalize=False, layer_step=2,
        ),
    },
    "qwen3-moe": {
        "num_kv_heads": 2, "head_dim": 16, "qk_norm": True, "experts": ExpertsConfig(num_experts=8, mlp_dim=16),
    },
    "olmoe": {
        "num_kv_heads": 2, "qk_norm_across_heads": True, "experts": ExpertsConfig(num_experts=4, normalize=False),
    },
    "deepseek": {
        "num_kv_heads": 2,
        "experts": ExpertsConfig(num_experts=4, mlp_dim=16, shared_mlp_dim=32, normalize=False, first_dense_layers=1),
    },
}  # fmt: skip
WITHOUT_CLASS = ("deepseek",)
"""Variants of which transformers has no class."""


def tiny(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**vars(TINY), **changes})


def write_model(directory: Path, config: ModelConfig, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """A model directory as others write it, of random weights, through the safetensors library; returns the weights."""
    rng = np.random.default_rng(0)
    D, F, H, kv = config.embed_dim, config.mlp_dim, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "self_attn.q_proj": (H, D), "self_attn.k_proj": (kv, D), "self_attn.v_proj": (kv, D), "self_attn.o_proj": (D, H),
        "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
        "input_layernorm": (D,), "post_attention_layernorm": (D,),
    }  # fmt: skip
    layer = {f"{name}.weight": shape for name, shape in layer.items()}
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (H,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.output_bias:
        layer |= {"self_attn.o_proj.bias": (D,)}
    if config.mlp_bias:
        layer |= {"mlp.gate_proj.bias": (F,), "mlp.up_proj.bias": (F,), "mlp.down_proj.bias": (D,)}
    if config.qk_norm_across_heads:
        layer |= {"self_attn.q_norm.weight": (H,), "self_attn.k_norm.weight": (kv,)}
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    shapes = {"model.embed_tokens.weight": (config.vocab_size, D), "model.norm.weight": (D,)}
    body, experts, dense = hf_config_of(config, SPECIAL, ""), config.experts, config.experts.dense_layers(config.num_layers)
    for i in range(config.num_layers):
        own = layer
        if experts.enabled and i not in dense:
            own = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")}
            own |= _experts(body["model_type"], experts.num_experts, D, experts.mlp_dim or F, experts.shared_mlp_dim)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    if config.has_own_head:
        shapes |= {"score.weight" if config.head == "score" else "lm_head.weight": (config.head_rows, D)}
    weights = {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}
    directory.mkdir()
    safetensors.numpy.save_file(weights, directory / "model.safetensors", {"format": "pt"})
    name = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16"}.get(np.dtype(dtype), "bfloat16")
    (directory / "config.json").write_text(json.dumps(hf_config_of(config, SPECIAL, name)))
    return weights


def _experts(model_type: str, num_experts: int, D: int, F: int, shared: int) -> dict[str, tuple[int, ...]]:
    """A layer's experts in the names of published checkpoints."""
    room, gate, up, down = ("block_sparse_moe", "w1", "w3", "w2") if model_type == "mixtral" else (
        "mlp", "gate_proj", "up_proj", "down_proj"
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {f"{room}.gate.weight": (num_experts, D)}
    for i in range(num_experts):
        mlp = {gate: (F, D), up: (F, D), down: (D, F)}
        shapes |= {f"{room}.experts.{i}.{name}.weight": shape for name, shape in mlp.items()}
    if shared:
        name = {"qwen2_moe": "mlp.shared_expert", "deepseek": "mlp.shared_experts"}[model_type]
        mlp = {"gate_proj": (shared, D), "up_proj": (shared, D), "down_proj": (D, shared)}
        shapes |= {f"{name}.{part}.weight": shape for part, shape in mlp.items()}
    return shapes | ({"mlp.shared_expert_gate.weight": (1, D)} if model_type == "qwen2_moe" else {})


def shard(directory: Path) -> None:
    """Turns the one file of a model directory into three with an index."""
    weights = safetensors.numpy.load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    files = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    for i, file in enumerate(files):
        safetensors.numpy.save_file({name: weights[name] for name in names[i::3]}, directory / file)
    index = {"metadata": {}, "weight_map": {name: files[i % 3] for i, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def read_weights(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor, through the safetensors library."""
    files = directory.glob("*.safetensors")
    return {name: array for file in files for name, array in safetensors.numpy.load_file(file).items()}


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name


def convert(*arguments: object) -> int:
    return main(hf_arguments([str(argument) for argument in arguments]))


def refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path, *options: str, verb: str = "import", code: int = 2) -> str:
    """The line with which the conversion of `tmp_path / "hf"` is refused, after which nothing but it is there."""
    assert convert(verb, tmp_path / "hf", tmp_path / "out", "--no-verify", *options) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}
    return error
