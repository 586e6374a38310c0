"""Parts of our arrays, read from no more rows of their tensors than they need."""

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from converters.blocks import boxes
from llamajax.config.experts import ExpertsConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.errors import ConfigError
from llamajax.model.experts import Experts
from llamajax.parallel.mesh import make_mesh
from llamajax.weights import names
from llamajax.weights.hf_files import open_model
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.safetensors import Stored
from tests.converters.models import VARIANTS, tiny, write_model

CONFIG = tiny(num_heads=16, num_kv_heads=4, qkv_bias=True, num_layers=1)
WITH_EXPERTS = tiny(
    num_kv_heads=2, qkv_bias=True, num_layers=1,
    experts=ExpertsConfig(num_experts=4, mlp_dim=16, shared_mlp_dim=24, shared_gate=True),
)  # fmt: skip


def open_tensors(directory: Path, config: ModelConfig) -> dict[str, Stored]:
    return names.tensors_for(config, open_model(directory), directory)


@pytest.mark.parametrize(
    ("config", "slab_bytes"),
    [(CONFIG, 1), (CONFIG, 1000), (CONFIG, 1 << 20), (WITH_EXPERTS, 1000)],
    ids=["rows", "some rows", "whole", "experts"],
)
def test_every_part_of_every_array_is_the_same_as_in_the_whole(config, slab_bytes, tmp_path, monkeypatch):
    write_model(tmp_path / "hf", config)
    monkeypatch.setattr(names, "_SLAB_BYTES", slab_bytes)
    tensors = open_tensors(tmp_path / "hf", config)
    for array, stacked_shape in names.our_shapes(config).items():
        shape = stacked_shape[1:] if names.is_stacked(array) else stacked_shape
        whole = np.empty(shape, np.float32)
        names.from_hf(array, 0, tensors, shape, tuple(slice(0, size) for size in shape), whole, config)
        for divisions in ((2,) * len(shape), (1,) * (len(shape) - 1) + (2,), (2,) + (1,) * (len(shape) - 1)):
            # Dims of two (gate and up) and of six or four (queries, key, value of a group) are never divided over devices.
            steps = [
                size if size in (1, 2, 6) or (size == 4 and "qkv" in array) else size // n
                for size, n in zip(shape, divisions, strict=True)
            ]
            for box in boxes(shape, tuple(steps)):
                part = np.empty([dim.stop - dim.start for dim in box], np.float32)
                names.from_hf(array, 0, tensors, shape, box, part, config)
                assert np.array_equal(part, whole[box]), (array, box)


def test_only_the_rows_that_are_needed_are_read(tmp_path, monkeypatch):
    write_model(tmp_path / "hf", CONFIG)
    tensors, read, rows = open_tensors(tmp_path / "hf", CONFIG), Stored.read, []

    def record(self: Stored, start: int = 0, stop: int | None = None) -> np.ndarray:
        rows.append((start, stop))
        return read(self, start, stop)

    monkeypatch.setattr(Stored, "read", record)
    box = (slice(0, 16), slice(1, 3), slice(0, 6), slice(0, 8))  # half of the embedding's width, kv heads 1 and 2
    names.from_hf("model.layers.attention.wqkv", 0, tensors, (32, 4, 6, 8), box, np.empty((16, 2, 6, 8), np.float32), CONFIG)
    assert rows == [(32, 96), (8, 24), (8, 24)]
    rows.clear()
    box = (slice(0, 32), slice(0, 2), slice(12, 24))
    names.from_hf("model.layers.mlp.w_gate_up", 0, tensors, (32, 2, 48), box, np.empty((32, 2, 12), np.float32), CONFIG)
    assert rows == [(12, 24), (12, 24)]


def test_only_the_experts_that_are_needed_are_read(tmp_path, monkeypatch):
    weights = write_model(tmp_path / "hf", WITH_EXPERTS)
    tensors, read, found = open_tensors(tmp_path / "hf", WITH_EXPERTS), Stored.read, []

    def record(self: Stored, start: int = 0, stop: int | None = None) -> np.ndarray:
        name = next(name for name, stored in tensors.items() if stored is self)
        found.append((name.removeprefix("model.layers.0.mlp.experts."), start, stop))
        return read(self, start, stop)

    monkeypatch.setattr(Stored, "read", record)
    box, block = (slice(2, 4), slice(0, 32), slice(0, 2), slice(4, 8)), np.empty((2, 32, 2, 4), np.float32)
    names.from_hf("model.layers.mlp.w_gate_up", 0, tensors, (4, 32, 2, 16), box, block, WITH_EXPERTS)
    kinds = ("gate_proj", "up_proj")
    assert sorted(found) == [(f"{expert}.{kind}.weight", 4, 8) for expert in (2, 3) for kind in kinds]
    assert np.array_equal(block[1, :, 1], weights["model.layers.0.mlp.experts.3.up_proj.weight"][4:8].T)


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe"])
def test_experts_in_one_tensor_are_those_in_many(variant, tmp_path):
    """As transformers 5 holds them: gates below inputs, all experts of a layer in one tensor."""
    config = tiny(**VARIANTS[variant])
    weights = write_model(tmp_path / "many", config)
    write_model(tmp_path / "one", config)
    num, stacked = config.experts.num_experts, dict(weights)
    for layer in range(config.num_layers):
        room = f"model.layers.{layer}.{'block_sparse_moe' if variant == 'mixtral' else 'mlp'}"
        gate, up, down = ("w1", "w3", "w2") if variant == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        own = {kind: [stacked.pop(f"{room}.experts.{n}.{kind}.weight") for n in range(num)] for kind in (gate, up, down)}
        both = [np.concatenate(pair) for pair in zip(own[gate], own[up], strict=True)]
        experts = f"model.layers.{layer}.mlp.experts"
        stacked |= {f"{experts}.gate_up_proj": np.stack(both), f"{experts}.down_proj": np.stack(own[down])}
        stacked[f"model.layers.{layer}.mlp.gate.weight"] = stacked.pop(f"{room}.gate.weight")
    safetensors.numpy.save_file(stacked, tmp_path / "one/model.safetensors")
    one, many = (open_tensors(tmp_path / name, config) for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert all(np.array_equal(one[name].read(), many[name].read()) for name in many)


def test_every_expert_is_read_onto_its_device(tmp_path):
    config = tiny(**VARIANTS["deepseek"])
    weights = write_model(tmp_path / "hf", config)
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2)))
    model = load_model(open_pretrained(tmp_path / "hf"), config)
    assert isinstance(model.layers.mlp, Experts)
    assert model.dense_layers is not None
    gate_up, down = np.asarray(model.layers.mlp.w_gate_up[...]), np.asarray(model.layers.mlp.w_down[...])
    for layer, expert in itertools.product((0, 1), range(4)):
        name = f"model.layers.{layer + 1}.mlp.experts.{expert}"
        assert np.array_equal(gate_up[layer, expert, :, 0], weights[f"{name}.gate_proj.weight"].T)
        assert np.array_equal(gate_up[layer, expert, :, 1], weights[f"{name}.up_proj.weight"].T)
        assert np.array_equal(down[layer, expert], weights[f"{name}.down_proj.weight"].T)
    dense = np.asarray(model.dense_layers.mlp.w_down[...])
    assert np.array_equal(dense[0], weights["model.layers.0.mlp.down_proj.weight"])


def test_tensors_are_missing_by_the_names_in_files(tmp_path):
    weights = write_model(tmp_path / "hf", config := tiny(**VARIANTS["mixtral"]))
    del weights["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    safetensors.numpy.save_file(weights, tmp_path / "hf/model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight is missing"):
        open_tensors(tmp_path / "hf", config)


def test_values_are_converted_to_the_wanted_type(tmp_path):
    weights = write_model(tmp_path / "hf", CONFIG)
    scale = np.empty(32, jax.numpy.bfloat16)
    names.from_hf("model.final_norm.scale", 0, open_model(tmp_path / "hf"), (32,), (slice(0, 32),), scale, CONFIG)
    assert np.array_equal(scale, weights["model.norm.weight"].astype(jax.numpy.bfloat16))
