"""Models with experts made of dense ones compute the same at the beginning, and every expert is a copy or a slice."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from llamajax.config.model import ModelConfig
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from tests.converters.models import VARIANTS, convert, read_weights, refuse, tiny, write_model
from tests.tiny import single_device_mesh

TOKENS = np.random.default_rng(0).integers(4, 96, (2, 12), dtype=np.int32)


def logits(directory) -> tuple[ModelConfig, np.ndarray]:
    with jax.set_mesh(single_device_mesh()):
        found = open_pretrained(directory)
        model = load_model(found, dataclasses.replace(found.config, compute_dtype="float32", remat="none"))
        return found.config, np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, TOKENS))


@pytest.mark.parametrize(
    ("variant", "options", "class_name"),
    [
        pytest.param("llama3", ["--experts", "4", "--top_k", "2"], "MixtralForCausalLM", marks=pytest.mark.slow),
        pytest.param(
            "qwen3", ["--experts", "8", "--top_k", "4", "--mlp_dim", "24", "--seed", "3"], "Qwen3MoeForCausalLM",
            marks=pytest.mark.slow,
        ),
        pytest.param("mistral", ["--experts", "3", "--top_k", "1"], "MixtralForCausalLM", marks=pytest.mark.long),
        pytest.param("qwen3-score", ["--experts", "4"], "Qwen3MoeForSequenceClassification", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_dense_model(variant, options, class_name, tmp_path, capsys):
    weights = write_model(tmp_path / "hf", tiny(**VARIANTS[variant]))
    assert convert("upcycle", tmp_path / "hf", tmp_path / "out", *options, "--verify") == 0
    assert "differ by at most" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == [class_name]
    _, before = logits(tmp_path / "hf")
    config, after = logits(tmp_path / "out")
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.max(np.abs(before)))
    made = read_weights(tmp_path / "out")
    assert {name: made[name].tobytes() for name in weights if name in made} == {
        name: array.tobytes() for name, array in weights.items() if ".mlp." not in name
    }
    routers = [array for name, array in made.items() if name.endswith("gate.weight")]
    assert len(routers) == config.num_layers
    assert len({array[0].tobytes() for array in routers}) == config.num_layers
    assert np.std(routers) == pytest.approx(config.init_std, rel=0.2)


def test_experts_are_slices_in_the_stored_type(tmp_path):
    weights = write_model(tmp_path / "hf", tiny(qk_norm=True), ml_dtypes.bfloat16)
    options = ["--experts", "8", "--top_k", "4", "--mlp_dim", "12", "--no-verify"]
    assert convert("upcycle", tmp_path / "hf", tmp_path / "out", *options) == 0
    made = read_weights(tmp_path / "out")
    for expert in range(8):
        own = slice(expert % 4 * 12, expert % 4 * 12 + 12)
        of_expert = {
            name: made[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
        }
        mlp = {name: weights[f"model.layers.1.mlp.{name}_proj.weight"] for name in of_expert}
        assert np.array_equal(of_expert["gate"], mlp["gate"][own])
        assert np.array_equal(of_expert["up"], mlp["up"][own])
        assert np.array_equal(of_expert["down"].astype(np.float32), 4 * mlp["down"][:, own].astype(np.float32))
    router = made["model.layers.1.mlp.gate.weight"]
    assert np.array_equal(router[0], router[3])
    assert not np.array_equal(router[0], router[4])
    assert convert("upcycle", tmp_path / "hf", tmp_path / "again", *options) == 0
    assert {name: array.tobytes() for name, array in read_weights(tmp_path / "again").items()} == {
        name: array.tobytes() for name, array in made.items()
    }


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("llama3", ["--experts", "2", "--top_k", "3"], "--top_k: 3 must be at most experts=2"),
        ("llama3", ["--experts", "4", "--mlp_dim", "16"], "--mlp_dim: 16 must be the width of the MLP, 48, or a half"),
        ("llama3", ["--experts", "3", "--mlp_dim", "24"], "--experts: 3 must be divisible by the 2 experts"),
        ("llama3", ["--experts", "4", "--top_k", "1", "--mlp_dim", "24"], "--top_k: 1 must be divisible by the 2 experts"),
        ("mixtral", ["--experts", "4"], "has experts already"),
        ("qwen2", ["--experts", "4"], "no architecture of transformers has exactly qkv_bias, experts with these settings"),
    ],
)
def test_what_cannot_be_upcycled(variant, options, message, tmp_path, capsys):
    write_model(tmp_path / "hf", tiny(**VARIANTS[variant]))
    assert message in refuse(capsys, tmp_path, *options, verb="upcycle")
