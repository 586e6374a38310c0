"""Any single bit that differs between devices is found and its device named, on every mesh and form; nothing else is."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.file import load_config
from llamajax.config.parallel import MeshConfig, ParallelConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.planning.xla.compile import planned_mesh
from llamajax.step.checksum import checksums, differing, holders, replicated
from llamajax.step.state import abstract_state, init_state
from llamajax.step.step import train_step
from tests.faults.flips import Flip, expected, flipped, found, missed
from tests.tiny import random_rows, resolved, tiny_config, to_device

SITES = [
    (MeshConfig(data=8), ParallelConfig()),
    (MeshConfig(data=4, fsdp=2), ParallelConfig()),
    (MeshConfig(data=2, fsdp=2, tensor=2), ParallelConfig(zero=1)),
    (MeshConfig(data=4, fsdp=2), ParallelConfig(zero_data=1)),
]


def checksum(x) -> int:
    table = np.asarray(checksums([x]))
    assert len(set(table[:, 0])) == 1
    return int(table[0, 0])


def on_all(x) -> jax.Array:
    return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), jax.P()))


@pytest.mark.parametrize(("sizes", "parallel"), SITES)
def test_every_flipped_bit_is_found_and_its_device_named(sizes, parallel):
    jax.set_mesh(make_mesh(sizes))
    config = tiny_config(mesh=sizes, parallel=parallel)
    assert not missed(init_state(config), 8)


@pytest.mark.parametrize(("sizes", "parallel"), [SITES[1], pytest.param(*SITES[2], marks=pytest.mark.slow)])
def test_what_differs_before_a_step_differs_after_it(sizes, parallel):
    """Gradients are averaged: the others learn from the spoilt weight too, but the device does not become equal to them."""
    jax.set_mesh(make_mesh(sizes))
    config = tiny_config(mesh=sizes, parallel=parallel)
    state, _ = train_step(resolved(config), init_state(config), to_device(config, random_rows(config, 0)))
    flip = Flip("model.layers.mlp.w_down", place=5, bit=22)
    state = flipped(state, flip)
    for step in range(1, 4):
        state, _ = train_step(resolved(config), state, to_device(config, random_rows(config, step)))
    names = found(state)
    assert names[flip.array] == expected(state, flip)[flip.array]
    assert all(flip.place in places for places in names.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "uint8", "bool"])
def test_every_bit_of_every_word_counts_whatever_its_type(dtype):
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 12 * jnp.dtype(dtype).itemsize, np.uint8)
    sums = {checksum(on_all(bits.view(jnp.dtype(dtype))))}
    num_bits = 1 if dtype == "bool" else 8
    for byte in range(len(bits)):
        for bit in range(num_bits):
            other = bits.copy()
            other[byte] ^= 1 << bit
            sums.add(checksum(on_all(other.view(jnp.dtype(dtype)))))
    assert len(sums) == 1 + num_bits * len(bits)


def test_words_that_change_places_change_the_sum():
    """Also such as differ in their upper bits alone, far from each other: weights of a sum would lose these."""
    x = np.arange(2**16, dtype=np.uint32) << 16
    sums = {checksum(on_all(x))}
    for left, right in [(0, 1), (0, 2**15), (1, 2**15 + 1), (3, 2**16 - 1)]:
        swapped = x.copy()
        swapped[[left, right]] = swapped[[right, left]]
        sums.add(checksum(on_all(swapped)))
    assert len(sums) == 5


def test_a_flip_is_one_bit():
    state = {"a": on_all(np.zeros(3, np.uint32)), "b": on_all(np.arange(12, dtype=np.float32).reshape(3, 4))}
    other = flipped(state, Flip("b", place=3, bit=77))
    assert other["a"] is state["a"]
    for place, (before, after) in enumerate(zip(state["b"].addressable_shards, other["b"].addressable_shards, strict=True)):
        changed = np.asarray(before.data).view(np.uint32) ^ np.asarray(after.data).view(np.uint32)
        assert np.flatnonzero(changed).tolist() == ([77 // 32] if place == 3 else [])
        assert changed.sum() == (1 << 77 % 32 if place == 3 else 0)


def test_who_holds_the_same_part():
    jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    mesh = jax.sharding.get_mesh()
    for dims in [("mlp", "embed"), ("embed", None), ("mlp", None), (None, None)]:
        array = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=jax.NamedSharding(mesh, spec(*dims)))
        by_part: dict[str, list[int]] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            by_part.setdefault(str(index), []).append(list(mesh.devices.flat).index(device))
        assert sorted(holders(array).tolist()) == sorted(by_part.values())


def test_one_device_has_nothing_to_compare():
    jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1]))
    assert not replicated(abstract_state(tiny_config()))


def test_the_most_are_right_and_of_two_nobody_knows():
    held_by = {"a": np.array([[0, 1, 2, 3]]), "b": np.array([[0, 2], [1, 3]]), "c": np.array([[0, 1, 2, 3]])}
    table = np.array([[7, 1, 5], [7, 2, 5], [7, 1, 5], [7, 2, 5]], np.uint32)
    assert not differing(table, held_by)
    table[2] = [8, 9, 5]
    assert differing(table, held_by) == {"a": [2], "b": [0, 2]}
    table[1, 0] = 8
    assert differing(table, held_by)["a"] == [0, 1, 2, 3]


def test_only_parts_that_differ_are_looked_at_one_by_one(monkeypatch):
    """A large run has many parts of each array."""
    places = np.arange(4096).reshape(-1, 4)
    table = np.repeat(np.arange(1024, dtype=np.uint32), 4)[:, None]
    table[4001] += 1
    looked, unique = [], np.unique
    monkeypatch.setattr(np, "unique", lambda *args, **kwargs: looked.append(args) or unique(*args, **kwargs))
    assert differing(table, {"a": places}) == {"a": [4001]}
    assert len(looked) == 1


def test_the_state_is_read_once_and_nothing_is_copied(gpu_compiler):
    """Compiled by XLA for 256 H100: beside the state it needs partial sums only, and each array has one reader."""
    config = load_config(Path(__file__).parents[2] / "configs/llama3_1_70b_256xh100.yaml")
    with jax.set_mesh(planned_mesh(config)):
        arrays = replicated(abstract_state(config))
        assert len(arrays) == 33
        compiled = checksums.lower(list(arrays.values())).compile()
    memory, program = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert program is not None
    assert memory.temp_size_in_bytes < memory.argument_size_in_bytes / 10_000
    entry = program[program.index("\nENTRY") :]
    parameters = re.findall(r"(%param\S*) = \S+\[\d+\S* parameter\(", entry)
    assert len(parameters) == 28
    for name in parameters:
        (reader,) = re.findall(rf"= (.*)\({re.escape(name)}\)", entry)
        assert reader.endswith("fusion")
    assert len(re.findall(r" all-gather(?:-start)?\(", entry)) == 1  # jax 0.12 does not split it
