"""Experts in config.json: what is left out, layers without experts, and what is not read."""

from pathlib import Path
from typing import Any

import pytest

from llamajax.config.architectures import architecture_of
from llamajax.config.experts import ExpertsConfig
from llamajax.config.hf_config import hf_config_of, read_hf_config
from llamajax.config.model import ModelConfig
from llamajax.errors import ConfigError
from tests.converters.models import SPECIAL, VARIANTS, tiny

FAMILIES = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek")


def body_of(variant: str, **changes: Any) -> dict[str, Any]:
    return hf_config_of(tiny(**VARIANTS[variant]), SPECIAL, "float32") | changes


def read(body: dict[str, Any]) -> ModelConfig:
    return read_hf_config(body, Path("config.json"), "float32")[0]


@pytest.mark.parametrize("variant", FAMILIES)
def test_there_and_back(variant):
    config = tiny(**VARIANTS[variant])
    body = body_of(variant)
    found = read(body)
    assert found == tiny(**VARIANTS[variant], param_dtype="float32", compute_dtype="float32")
    assert architecture_of(config).model_type == body["model_type"]


@pytest.mark.parametrize("variant", FAMILIES[:-1])
def test_what_transformers_reads_out_of_left_out_settings(variant):
    transformers = pytest.importorskip("transformers")
    kept = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    body = {key: value for key, value in body_of(variant, num_attention_heads=16).items() if key in kept}
    theirs, ours = transformers.AutoConfig.for_model(**body), read(body)
    experts = ours.experts
    assert theirs.num_experts == experts.num_experts
    assert theirs.num_experts_per_tok == experts.top_k
    assert getattr(theirs, "moe_intermediate_size", theirs.intermediate_size) == (experts.mlp_dim or ours.mlp_dim)
    assert getattr(theirs, "shared_expert_intermediate_size", 0) == experts.shared_mlp_dim
    assert getattr(theirs, "norm_topk_prob", True) == experts.normalize
    assert theirs.num_key_value_heads == ours.num_kv_heads
    assert theirs.max_position_embeddings == ours.max_seq_len
    assert theirs.rms_norm_eps == ours.norm_eps
    assert theirs.rope_parameters["rope_theta"] == ours.rope_theta
    assert (theirs.sliding_window or None if hasattr(theirs, "sliding_window") else None) == ours.sliding_window


@pytest.mark.parametrize(
    ("variant", "changes", "expected"),
    [
        ("qwen3-moe", {"num_experts": None, "num_local_experts": 8}, {"num_experts": 8}),
        ("qwen3-moe", {"mlp_only_layers": [0]}, {"first_dense_layers": 1, "layer_step": 1}),
        ("qwen3-moe", {"mlp_only_layers": None, "decoder_sparse_step": 3, "num_hidden_layers": 6},
         {"first_dense_layers": 0, "layer_step": 3}),
        ("qwen2-moe", {"num_hidden_layers": 5, "decoder_sparse_step": 1, "mlp_only_layers": [0, 1, 3], "layer_types": None},
         {"first_dense_layers": 1, "layer_step": 2}),
        ("qwen2-moe", {"num_hidden_layers": 6, "mlp_only_layers": [1, 9], "decoder_sparse_step": 2, "layer_types": None},
         {"first_dense_layers": 2, "layer_step": 2}),
        ("deepseek", {"first_k_dense_replace": 0}, {"first_dense_layers": 0}),
        ("deepseek", {"moe_layer_freq": 2, "first_k_dense_replace": 0, "num_hidden_layers": 5}, None),
        ("deepseek", {"moe_layer_freq": 2, "num_hidden_layers": 5}, {"first_dense_layers": 1, "layer_step": 2}),
        ("deepseek", {"n_shared_experts": None}, {"shared_mlp_dim": 0}),
        ("deepseek", {"num_experts_per_tok": 1, "norm_topk_prob": True}, {"normalize": False}),
        ("deepseek", {"norm_topk_prob": True}, {"normalize": True}),
    ],
)  # fmt: skip
def test_every_way_to_write_experts(variant, changes, expected):
    body = body_of(variant, **changes)
    if expected is None:
        with pytest.raises(ConfigError, match="must have them"):
            read(body)
        return
    experts = read(body).experts
    assert {key: getattr(experts, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("qwen3-moe", {"num_local_experts": 4}, "num_experts: 8 and num_local_experts: 4 contradict each other"),
        ("qwen3-moe", {"num_experts": 0}, "num_experts: must be a positive whole number, not 0"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "top_k: 9 must be at most num_experts=8"),
        ("qwen3-moe", {"norm_topk_prob": 1}, "norm_topk_prob: must be true or false, not 1"),
        ("qwen3-moe", {"mlp_only_layers": [2]}, r"mlp_only_layers, decoder_sparse_step: layers \[0, 1\] of 3 have experts"),
        ("qwen3-moe", {"mlp_only_layers": [0, 1, 2]}, r"layers \[\] of 3 have experts, which is not supported"),
        ("qwen3-moe", {"mlp_only_layers": "0"}, "mlp_only_layers: must list numbers of layers, not 0"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: must be a positive whole"),
        ("mixtral", {"num_hidden_layers": 2**30}, "num_hidden_layers: 1073741824 is more than 10000; download the file"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported; it must be null"),
        ("olmoe", {"head_dim": 16}, "head_dim: 16 x num_attention_heads=4 must be hidden_size=32 in a Olmoe"),
        ("olmoe", {"architectures": ["OlmoeForSequenceClassification"]}, r'must be \["OlmoeForCausalLM"\]'),
        ("deepseek", {"scoring_func": "sigmoid"}, 'scoring_func: sigmoid is not supported; it must be "softmax"'),
        ("deepseek", {"n_routed_experts": None}, "n_routed_experts: must be a positive whole number, not None"),
        ("deepseek", {"first_k_dense_replace": -1}, "first_k_dense_replace: must be a whole number, not -1"),
        ("mixtral", {"model_type": "gpt_oss"}, "model_type: gpt_oss is not supported: its attention has learned sinks"),
        ("deepseek", {"model_type": "deepseek_v2"}, "deepseek_v2 is not supported: its attention keeps keys and values"),
        ("deepseek", {"model_type": "deepseek_v3"}, "deepseek_v3 is not supported: its attention keeps keys and values"),
    ],
)
def test_what_is_not_read(variant, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        read(body_of(variant, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"latent_dim": 8},
        {"gated": False},
        {"scores": "sigmoid"},
        {"weight_scale": 2.5},
        {"num_groups": 2},
        {"bias_update_rate": 0.001},
        {"shared_mlp_dim": 24},
    ],
    ids=str,
)
def test_experts_that_no_architecture_has(changes):
    config = tiny(experts=ExpertsConfig(num_experts=4, mlp_dim=16, **changes))
    with pytest.raises(ConfigError, match="has exactly experts with these settings of the optional parts"):
        architecture_of(config)
