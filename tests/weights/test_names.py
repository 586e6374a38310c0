"""Parts of our arrays, read from no more rows of their tensors than they need."""

import jax
import numpy as np
import pytest

from converters.blocks import boxes
from llamajax.weights import names
from llamajax.weights.hf_files import open_model
from llamajax.weights.safetensors import Stored
from tests.converters.models import tiny, write_model

CONFIG = tiny(num_heads=16, num_kv_heads=4, qkv_bias=True, num_layers=1)


@pytest.mark.parametrize("slab_bytes", [1, 1000, 1 << 20])
def test_every_part_of_every_array_is_the_same_as_in_the_whole(slab_bytes, tmp_path, monkeypatch):
    write_model(tmp_path / "hf", CONFIG)
    monkeypatch.setattr(names, "_SLAB_BYTES", slab_bytes)
    tensors = open_model(tmp_path / "hf")
    for array, stacked_shape in names.our_shapes(CONFIG).items():
        shape = stacked_shape[1:] if names.is_stacked(array) else stacked_shape
        whole = np.empty(shape, np.float32)
        names.from_hf(array, 0, tensors, shape, tuple(slice(0, size) for size in shape), whole, CONFIG)
        for divisions in ((2,) * len(shape), (1,) * (len(shape) - 1) + (2,), (2,) + (1,) * (len(shape) - 1)):
            # Dims of two (gate and up) and of six (queries, key, value of a group) are never divided over devices.
            steps = [size if size in (2, 6) else size // n for size, n in zip(shape, divisions, strict=True)]
            for box in boxes(shape, tuple(steps)):
                part = np.empty([dim.stop - dim.start for dim in box], np.float32)
                names.from_hf(array, 0, tensors, shape, box, part, CONFIG)
                assert np.array_equal(part, whole[box]), (array, box)


def test_only_the_rows_that_are_needed_are_read(tmp_path, monkeypatch):
    write_model(tmp_path / "hf", CONFIG)
    tensors, read, rows = open_model(tmp_path / "hf"), Stored.read, []

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


def test_values_are_converted_to_the_wanted_type(tmp_path):
    weights = write_model(tmp_path / "hf", CONFIG)
    scale = np.empty(32, jax.numpy.bfloat16)
    names.from_hf("model.final_norm.scale", 0, open_model(tmp_path / "hf"), (32,), (slice(0, 32),), scale, CONFIG)
    assert np.array_equal(scale, weights["model.norm.weight"].astype(jax.numpy.bfloat16))
