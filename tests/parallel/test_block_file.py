"""A file without a name has every byte that was written to it, and gives space away once."""

import os

import numpy as np
import pytest

from llamajax.parallel import block_file
from llamajax.parallel.block_file import BLOCK, BlockFile, Space, padded


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 77])
def test_bytes_come_back_beside_others(tmp_path, monkeypatch, num_bytes):
    """Of a block, of several system calls, and of any length; from memory at any address."""
    monkeypatch.setattr(block_file, "CHUNK", 2 * BLOCK)
    file, rng = BlockFile(tmp_path), np.random.default_rng(num_bytes)
    assert os.listdir(tmp_path) == []
    parts = [rng.integers(0, 256, num_bytes + place, np.uint8)[place:] for place in range(3)]
    offsets = [file.space.take(num_bytes) for _ in parts]
    for part, offset in zip(parts, offsets, strict=True):
        file.write(part, offset)
    for part, offset in reversed(list(zip(parts, offsets, strict=True))):
        np.testing.assert_array_equal(file.read(num_bytes, offset), part)
    os.close(file.file)
    os.close(file.read_file)


@pytest.mark.parametrize("seed", range(3))
def test_no_two_values_share_a_byte(seed):
    """Of 2,000 random extents; all space is one extent when all is given back."""
    rng, space, taken = np.random.default_rng(seed), Space(), {}
    for _ in range(2000):
        if taken and rng.random() < 0.48:
            start = list(taken)[rng.integers(len(taken))]
            space.give_back(start, taken.pop(start))
            continue
        size = int(rng.integers(1, 20 * BLOCK))
        start = space.take(size)
        assert start % BLOCK == 0
        assert all(start + size <= other or other + length <= start for other, length in taken.items())
        assert start + padded(size) <= space.end
        taken[start] = size
    for start, size in taken.items():
        space.give_back(start, size)
    assert space._free == [(0, space.end)]
