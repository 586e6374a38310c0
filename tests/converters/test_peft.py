"""Adapters leave as a PEFT directory or merged into their base, and come back from either, with the same logits."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from converters.arguments import hf_arguments
from converters.convert import main
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.model import ModelConfig
from llamajax.config.training import CheckpointConfig
from llamajax.parallel.zero import trained_only
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.pretrained import Pretrained
from tests.adapters import ALL, KINDS, base, logits_of, peft, write_adapters, write_base
from tests.converters.models import assert_same_bits, read_weights, tiny
from tests.tiny import single_device_mesh

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 12), dtype=np.int32)
GROUPED = tiny(num_layers=2, num_kv_heads=2)


def ours(found: Pretrained) -> np.ndarray:
    """Our logits of a model, in fp32."""
    config = dataclasses.replace(found.config, param_dtype="float32", compute_dtype="float32", remat="none")
    return np.asarray(jax.jit(lambda model, tokens: model(tokens))(load_model(found, config), TOKENS))


def write_run(directory: Path, found: Pretrained, init_from: Path) -> None:
    """Writes adapters that were opened as the checkpoint of a run: without the weights that they add to."""
    assert found.adapters is not None
    model = load_model(found, dataclasses.replace(found.config, param_dtype="float32"))
    run = {
        "model": dataclasses.asdict(dataclasses.replace(found.config, param_dtype="float32")),
        "adapters": dataclasses.asdict(found.adapters),
        "init_from": str(init_from),
    }
    with Checkpointer(directory, CheckpointConfig(async_save=False)) as checkpointer:
        checkpointer.save(7, {"model": trained_only(model)}, {"config": run, "hf": found.hf, "data": {"tokens": 320}})


def export(*arguments: object) -> int:
    return main(hf_arguments(["export", *map(str, arguments)]))


@pytest.fixture(autouse=True)
def _mesh():
    with jax.set_mesh(single_device_mesh()):
        yield


@pytest.mark.parametrize(
    ("kind", "targets", "config"),
    [
        ("dora", ALL, GROUPED),
        pytest.param("lora", ALL, dataclasses.replace(GROUPED, tie_embeddings=True), marks=pytest.mark.slow),
        pytest.param(
            "rslora", ("q_proj", "v_proj"), dataclasses.replace(GROUPED, qkv_bias=True, mlp_bias=True, output_bias=True),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_adapters_of_a_run_are_those_of_peft_alone_and_merged(kind, targets, config: ModelConfig, tmp_path, capsys):
    write_base(tmp_path / "base", config)
    expected = logits_of(write_adapters(tmp_path / "base", tmp_path / "peft", targets, **KINDS[kind]), TOKENS)
    found = open_pretrained(tmp_path / "peft")
    write_run(tmp_path / "run", found, tmp_path / "base")
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-5 * np.abs(expected).max()}
    np.testing.assert_allclose(ours(open_pretrained(tmp_path / "run")), expected, **close)

    assert export(tmp_path / "run", tmp_path / "back") == 0
    told = capsys.readouterr().out
    assert "logits of transformers with adapters of peft differ by at most" in told
    assert_same_bits(
        *(safetensors.numpy.load_file(tmp_path / name / "adapter_model.safetensors") for name in ("back", "peft"))
    )
    loaded = peft.PeftModel.from_pretrained(base(tmp_path / "base"), str(tmp_path / "back"))
    np.testing.assert_allclose(logits_of(loaded, TOKENS), expected, **close)

    for source, out in (("run", "merged"), ("back", "merged_of_peft")):
        assert export(tmp_path / source, tmp_path / out, "--merge") == 0
        assert "logits of transformers differ by at most" in capsys.readouterr().out
        np.testing.assert_allclose(logits_of(base(tmp_path / out), TOKENS), expected, **close)
    assert_same_bits(read_weights(tmp_path / "merged"), read_weights(tmp_path / "merged_of_peft"))
    np.testing.assert_allclose(ours(open_pretrained(tmp_path / "merged")), expected, **close)
