"""Hugging Face directories that are not imported: each is refused in one line, and nothing is left behind."""

import json
import os
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.converters.models import (
    TINY,
    refuse,
    shard,
    write_model,
)

CONFIG_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma"}, "model_type: gemma is not one of llama, mistral, qwen2, qwen3"),
    ({"model_type": "mistral"}, "architectures: ['LlamaForCausalLM'] must be [\"MistralForCausalLM\"]"),
    ({"hidden_act": "gelu"}, 'hidden_act: gelu is not supported; it must be "silu"'),
    ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias is missing, and 11 more"),
    ({"mlp_bias": "yes"}, "mlp_bias: must be true or false, not yes"),
    ({"quantization_config": {"bits": 4}}, "quantization_config: None is not read; supported are weights in float32"),
    (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "bitsandbytes is not read; supported are",
    ),
    (
        {"quantization_config": {"quant_method": "compressed-tensors", "transform_config": {"R1": {}}}},
        "transform_config:",
    ),
    ({"model_type": "gpt_oss"}, "model_type: gpt_oss is not supported: its attention has learned sinks"),
    ({"model_type": "gpt2"}, "model_type: gpt2 is not one of llama"),
    ({"architectures": ["LlamaForTokenClassification"]}, 'must be ["LlamaForCausalLM"]'),
    ({"architectures": ["LlamaForSequenceClassification"]}, "id2label: has 2 labels; only models with a single score"),
    ({"hidden_size": "32"}, "hidden_size: must be a positive whole number"),
    ({"num_key_value_heads": 3}, "num_kv_heads: 3 must divide num_heads=4"),
    ({"intermediate_size": 64}, "gate_proj.weight is [48, 32], but config.json asks for [64, 32]"),
    ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight is missing, and 8 more"),
    ({"num_hidden_layers": 2}, "model.layers.2.input_layernorm.weight is no tensor of a Llama, and 8 more"),
    ({"num_hidden_layers": 2**30}, "describes"),
    ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ({"rope_theta": 5e5}, "rope_theta: 500000.0 contradicts rope_parameters.rope_theta, 10000.0"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling: contradicts rope_parameters"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters.rope_type: longrope is not one of"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor: is missing, but rope_type=yarn needs it"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate: must be true or false"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}}, "beta_slow: 1.0 must be below"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5 is not"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_parameters.low_freq_factor: is missing"),
    ({"rope_parameters": {"rope_type": "default", "beta_fast": 2.0}}, "rope_parameters.beta_fast: has no meaning"),
    ({"eos_token_id": 96}, "eos_token_id: 96 must be below vocab_size=96"),
]


@pytest.mark.parametrize(("change", "message"), CONFIG_MISTAKES, ids=lambda value: str(value)[:40])
def test_config_that_is_not_read(change, message, tmp_path, capsys):
    write_model(tmp_path / "hf", TINY)
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in refuse(capsys, tmp_path)


def test_files_that_are_not_read(tmp_path, capsys):
    hf_dir, model = tmp_path / "hf", tmp_path / "hf/model.safetensors"
    write_model(hf_dir, TINY)
    whole = model.read_bytes()
    model.unlink()
    (hf_dir / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert "pickles can run code and are not read" in refuse(capsys, tmp_path)
    for damaged in (whole[:-1], whole + b"\0", whole[:100], b"", b"\xff" * 8 + whole):
        model.write_bytes(damaged)
        assert "model.safetensors: " in refuse(capsys, tmp_path)
    weights = safetensors.numpy.load(whole)
    safetensors.numpy.save_file(weights | {"model.norm.weight": np.zeros(32, np.int8)}, model)
    assert "model.norm.weight is stored as I8" in refuse(capsys, tmp_path)
    (hf_dir / "config.json").unlink()
    assert "config.json: No such file" in refuse(capsys, tmp_path)


def test_pipes_and_links_that_leave_the_model_are_not_read(tmp_path, capsys):
    hf_dir = tmp_path / "hf"
    write_model(hf_dir, TINY)
    (hf_dir / "LICENSE").symlink_to("/proc/self/environ")
    assert "LICENSE: is a link to /proc/" in refuse(capsys, tmp_path)
    (hf_dir / "LICENSE").unlink()
    shard(hf_dir)
    (hf_dir / "model-00002-of-00003.safetensors").unlink()
    os.mkfifo(hf_dir / "model-00002-of-00003.safetensors")
    assert "model-00002-of-00003.safetensors: is not a regular file" in refuse(capsys, tmp_path)


def test_shards_that_do_not_agree_with_their_index(tmp_path, capsys):
    write_model(tmp_path / "hf", TINY)
    shard(tmp_path / "hf")
    index, second = tmp_path / "hf/model.safetensors.index.json", tmp_path / "hf/model-00002-of-00003.safetensors"
    text, weights = index.read_text(), safetensors.numpy.load_file(second)
    for place in ("../hf/model-00002-of-00003.safetensors", "/etc/passwd", "..", "x/y.safetensors", "a.bin"):
        index.write_text(text.replace(second.name, place))
        assert "must name a .safetensors file of this directory" in refuse(capsys, tmp_path)
    index.write_text(text.replace('"weight_map": {', '"weight_map": {"model.extra": "' + second.name + '", '))
    assert "model.extra of model.safetensors.index.json is missing" in refuse(capsys, tmp_path)
    index.write_text(text)
    safetensors.numpy.save_file(weights | {"lm_head.weight": np.zeros(1, np.float32)}, second)
    assert "lm_head.weight" in refuse(capsys, tmp_path)
    second.unlink()
    assert "No such file" in refuse(capsys, tmp_path)
