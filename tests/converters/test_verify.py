"""Right conversions are accepted and wrong ones found, whatever the size of weights and logits."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from converters import convert, verify
from converters.arguments import hf_arguments
from converters.verify import compare_logits
from llamajax.config.model import ModelConfig
from llamajax.errors import CheckpointError
from llamajax.model import rope
from tests.converters.models import tiny, write_model
from tests.tiny import single_device_mesh

pytest.importorskip("torch")

LONG = tiny(
    vocab_size=128, embed_dim=64, mlp_dim=128, num_heads=2, num_kv_heads=1, head_dim=128, max_seq_len=131072,
    rope_theta=1000042.0,
)  # fmt: skip
"""torch's vectorized fp32 power is a bit off in some of its frequencies, and positions reach far."""


@pytest.fixture(autouse=True)
def _mesh():
    with jax.set_mesh(single_device_mesh()):
        yield


def unchanged(model: dict[str, Any]) -> None:
    pass


def import_model(
    directory: Path, config: ModelConfig, std: float, change: Callable[[dict[str, Any]], None] = unchanged, head: float = 1.0
) -> None:
    """`directory / "run"`, imported from `directory / "hf"`, in which `change` then alters weights or the rotary base."""
    weights = write_model(directory / "hf", config)
    model: dict[str, Any] = {
        name: (1 + 0.1 * weight if "norm" in name else std * weight).astype(np.float32) for name, weight in weights.items()
    }
    model["lm_head.weight"] *= np.float32(head)
    path = directory / "hf/model.safetensors"
    safetensors.numpy.save_file(model, path)
    assert convert.main(hf_arguments([str(directory / "hf"), str(directory / "run"), "--no-verify"])) == 0
    body = json.loads((directory / "hf/config.json").read_text())
    model["theta"] = body.pop("rope_theta")
    change(model)
    body["rope_parameters"]["rope_theta"] = model.pop("theta")
    (directory / "hf/config.json").write_text(json.dumps(body))
    safetensors.numpy.save_file(model, path, {"format": "pt"})


@pytest.mark.parametrize(("std", "head"), [(0.01, 1.0), (0.04, 1.0), (0.04, 1e5)], ids=["small", "usual", "large"])
def test_a_right_conversion_is_accepted(std, head, tmp_path):
    import_model(tmp_path, LONG, std, head=head)
    assert "differ by at most" in compare_logits(tmp_path / "hf", tmp_path / "run", 0, LONG, "float32")


def test_a_last_bit_of_a_frequency_is_no_wrong_conversion(tmp_path, monkeypatch):
    """At far positions it moves logits as a wrong weight does."""
    exact = rope.inverse_frequencies

    def off_by_a_bit(config: ModelConfig) -> np.ndarray:
        frequencies = exact(config)
        frequencies[4] = np.nextafter(frequencies[4], np.float32(1))
        return frequencies

    monkeypatch.setattr(rope, "inverse_frequencies", off_by_a_bit)
    config = dataclasses.replace(LONG, num_layers=2, vocab_size=130)  # which no other test has compiled
    import_model(tmp_path, config, 0.3)
    assert "differ by at most" in compare_logits(tmp_path / "hf", tmp_path / "run", 0, config, "float32")
    monkeypatch.setattr(verify, "inverse_frequencies", lambda config: exact(config) * np.float32(1 + 2**-20))
    with pytest.raises(CheckpointError, match="rotary frequencies of transformers differ from ours"):
        compare_logits(tmp_path / "hf", tmp_path / "run", 0, config, "float32")


def swap_heads(model: dict[str, Any]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    model[name] = np.roll(model[name], 128, axis=0)


def transpose(model: dict[str, Any]) -> None:
    name = "lm_head.weight"
    model[name] = np.ascontiguousarray(model[name].reshape(2, 64, 64).swapaxes(1, 2)).reshape(128, 64)


def interleave(model: dict[str, Any]) -> None:
    """As Meta's files pair the dims that turn together."""
    name = "model.layers.2.self_attn.k_proj.weight"
    model[name] = np.ascontiguousarray(model[name].reshape(64, 2, -1).swapaxes(0, 1)).reshape(128, -1)


def turn_faster(model: dict[str, Any]) -> None:
    model["theta"] *= 0.99


@pytest.mark.parametrize("change", [swap_heads, transpose, interleave, turn_faster])
def test_a_wrong_conversion_is_found(change, tmp_path):
    import_model(tmp_path, LONG, 0.01, change)
    with pytest.raises(CheckpointError, match=r"(logits|frequencies) of transformers"):
        compare_logits(tmp_path / "hf", tmp_path / "run", 0, LONG, "float32")


def test_weights_that_are_no_numbers_are_named(tmp_path):
    import_model(tmp_path, LONG, np.nan)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds values that are not finite"):
        compare_logits(tmp_path / "hf", tmp_path / "run", 0, LONG, "float32")
