"""Weights in float8 and float64: what is read is each number times its scale, as transformers reads them where it can."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from llamajax.config.experts import ExpertsConfig
from llamajax.config.model import ModelConfig
from llamajax.errors import ConfigError
from llamajax.weights.float8 import with_scales
from llamajax.weights.hf_files import open_model
from llamajax.weights.open_model import open_directory
from tests.converters.models import assert_same_bits, convert, read_weights, tiny, write_model

CONFIG = tiny(embed_dim=160, mlp_dim=192, num_heads=5, num_kv_heads=5, head_dim=32, num_layers=1)
"""Sizes with smaller blocks than 128 at both ends."""
WITH_EXPERTS = replace(CONFIG, qk_norm=True, experts=ExpertsConfig(num_experts=4, mlp_dim=144))
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}
Weights = dict[str, np.ndarray]


def quantize(
    directory: Path,
    quantization: dict[str, Any] | None,
    kind: str,
    suffix: str = "weight_scale",
    config: ModelConfig = CONFIG,
) -> Weights:
    """Rewrites the layers' matrices of a model in float8 with scales of a `kind`; the values that they stand for."""
    weights = write_model(directory, config)
    stored, rng = dict(weights), np.random.default_rng(1)
    for name, values in weights.items():
        if "_proj" not in name:
            continue
        rows, columns = values.shape
        grid = {"tensor": (1,), "row": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}[kind]
        scale = rng.uniform(0.01, 0.1, grid).astype(np.float32)
        narrow = (values * 20).astype(ml_dtypes.float8_e4m3fn)
        stored |= {name: narrow, name.removesuffix("weight") + suffix: scale}
        stored[name.removesuffix("weight") + "input_scale"] = np.ones(1, np.float32)
        spread = np.kron(scale.reshape(grid if len(grid) == 2 else (1, 1)), np.ones((128, 128)))[:rows, :columns]
        weights[name] = narrow.astype(np.float32) * {"tensor": scale, "row": scale, "block": spread.astype(np.float32)}[kind]
    safetensors.numpy.save_file(stored, directory / "model.safetensors", {"format": "pt"})
    body = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(body | {"quantization_config": quantization}))
    return weights


@pytest.mark.parametrize(
    ("quantization", "kind", "suffix"),
    [
        (BLOCKS, "block", "weight_scale_inv"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}, "block", "weight_scale"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "tensor", "weight_scale"),
        ({"quant_method": "fbgemm_fp8"}, "row", "weight_scale"),
    ],
)
def test_float8_is_read_with_its_scales(quantization, kind, suffix, tmp_path):
    expected = quantize(tmp_path / "hf", quantization, kind, suffix)
    found = open_directory(tmp_path / "hf")
    assert found.config.param_dtype == "float32"
    assert found.tensors is not None
    assert_same_bits({name: stored.read() for name, stored in found.tensors.items()}, expected)
    rows = found.tensors["model.layers.0.mlp.gate_proj.weight"].read(120, 140)
    np.testing.assert_array_equal(rows, expected["model.layers.0.mlp.gate_proj.weight"][120:140])


@pytest.mark.parametrize("config", [CONFIG, pytest.param(WITH_EXPERTS, marks=pytest.mark.slow)], ids=["dense", "experts"])
def test_float8_goes_out_wide_and_computes_as_transformers_does(config, tmp_path, capsys):
    pytest.importorskip("torch")
    expected = quantize(tmp_path / "hf", BLOCKS, "block", "weight_scale_inv", config)
    assert convert("import", tmp_path / "hf", tmp_path / "run") == 0
    assert (
        "logits of transformers (with float8 weights that llamajax dequantized) differ by at most" in capsys.readouterr().out
    )
    assert convert("export", tmp_path / "run", tmp_path / "back", "--no-verify") == 0
    assert_same_bits(read_weights(tmp_path / "back"), expected)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


def test_float8_is_to_the_bit_what_transformers_makes_of_it(tmp_path):
    """The model has whole blocks, as transformers requires; loading one this way needs further packages."""
    torch = pytest.importorskip("torch")
    dequantize = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)._dequantize_one
    rng = np.random.default_rng(0)
    narrow = (30 * rng.standard_normal((256, 384), np.float32)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.001, 0.1, (2, 3)).astype(np.float32)
    tensors = {"w.weight": narrow, "w.weight_scale_inv": scales}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ours = with_scales(open_model(tmp_path), BLOCKS)["w.weight"].read()
    as_torch = torch.from_numpy(narrow.view(np.uint8)).view(torch.float8_e4m3fn)
    theirs = dequantize(as_torch, torch.from_numpy(scales), torch.float32).numpy()
    assert ours.tobytes() == theirs.tobytes()


def test_float64_is_read_as_float32(tmp_path):
    weights = write_model(tmp_path / "hf", CONFIG)
    wide = {name: values.astype(np.float64) * (1 + 1e-9) for name, values in weights.items()}
    safetensors.numpy.save_file(wide, tmp_path / "hf/model.safetensors", {"format": "pt"})
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--no-verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "back", "--no-verify") == 0
    assert_same_bits(read_weights(tmp_path / "back"), {name: values.astype(np.float32) for name, values in wide.items()})


def test_scales_that_do_not_belong(tmp_path):
    quantize(tmp_path / "hf", BLOCKS, "block", "weight_scale_inv")
    path, scale = tmp_path / "hf/model.safetensors", "model.layers.0.mlp.gate_proj.weight_scale_inv"
    stored = {name: tensor.read() for name, tensor in open_model(tmp_path / "hf").items()}
    cases = {
        "in float8 with 0 scales, not a matrix with one": {name: v for name, v in stored.items() if name != scale},
        r"the scale of .*gate_proj.weight is \[7, 2\], which does not divide": stored | {scale: np.ones((7, 2), np.float32)},
    }
    for message, tensors in cases.items():
        safetensors.numpy.save_file(tensors, path, {"format": "pt"})
        with pytest.raises(ConfigError, match=message) as error:
            open_directory(tmp_path / "hf")
        assert "\n" not in str(error.value)
