"""Reading token by token with a cache: the same as reading everything again, written in place, on every mesh."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.experts import ExpertsConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.model import Llama
from llamajax.model.kv_cache import KVCache, copy_rows
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec
from tests.tiny import single_device_mesh

GROUPED = ModelConfig(
    vocab_size=64, embed_dim=32, mlp_dim=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=4,
    compute_dtype="float32",
)  # fmt: skip
VARIANTS = {
    "grouped": GROUPED,
    "multi-head": dataclasses.replace(GROUPED, num_kv_heads=8),
    "tied": dataclasses.replace(GROUPED, tie_embeddings=True),
    "window": dataclasses.replace(GROUPED, sliding_window=3),
    "turns": dataclasses.replace(
        GROUPED, num_layers=4, sliding_window=3, layer_types=("sliding_attention", "full_attention")
    ),
    "upper": dataclasses.replace(
        GROUPED, num_layers=3, sliding_window=3, layer_types=("full_attention", "sliding_attention", "sliding_attention")
    ),
    "bias": dataclasses.replace(GROUPED, qkv_bias=True),
    "qk-norm": dataclasses.replace(GROUPED, qk_norm=True),
    "odd": dataclasses.replace(GROUPED, num_kv_heads=2, vocab_size=61, qkv_bias=True),
    "all": dataclasses.replace(
        GROUPED, sliding_window=5, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, tie_embeddings=True
    ),
}
WITH_EXPERTS = {
    "experts": dataclasses.replace(
        GROUPED,
        qk_norm_across_heads=True,
        experts=ExpertsConfig(num_experts=8, top_k=3, mlp_dim=16, shared_mlp_dim=16, shared_gate=True, normalize=False),
    ),
    "experts among dense": dataclasses.replace(
        GROUPED, num_layers=3, experts=ExpertsConfig(num_experts=8, top_k=2, mlp_dim=16, first_dense_layers=1)
    ),
}
ALL = VARIANTS | WITH_EXPERTS
MESHES = {
    "mixed": MeshConfig(fsdp=2, sequence=2, tensor=2),
    "replicas": MeshConfig(data=2, tensor=4),
    "long": MeshConfig(data=2, sequence=4),
    "fsdp": MeshConfig(fsdp=8),
    "data": MeshConfig(data=8),
    "sequence": MeshConfig(sequence=8),
    "wide": MeshConfig(data=2, fsdp=2, tensor=2),
}
MESHES_OF_EXPERTS = {
    "expert": MeshConfig(fsdp=1, expert=8),
    "expert, fsdp, tensor": MeshConfig(fsdp=2, expert=2, tensor=2),
}
B, T, S = 8, 8, 18
LENGTHS = np.array([8, 1, 5, 7, 3, 2, 6, 4], np.int32)
PROMPTS = np.random.default_rng(2).integers(0, 61, (B, T)).astype(np.int32)
NUM_STEPS = 7

PREFILL: Any = jax.jit(Llama.prefill, donate_argnums=3)  # jax's types hide how many programs there are
DECODE: Any = jax.jit(Llama.decode, donate_argnums=2)


def _llama(config: ModelConfig) -> Llama:
    """A model with random weights on the current mesh, biases and norms included; drawn by numpy, alike on every mesh."""
    rng = np.random.default_rng(1)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        normal = rng.standard_normal(leaf.shape, dtype=np.float32)
        is_norm = "scale" in jax.tree_util.keystr(path)
        return jax.device_put(1 + 0.3 * normal if is_norm else 0.3 * normal, leaf.sharding.spec)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda key: Llama(config, key), jax.random.key(0)))


@functools.cache
def _by_recomputation(variant: str) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens [B, NUM_STEPS] and the logits [B, NUM_STEPS, V] they were chosen by, reading all tokens every time."""
    jax.set_mesh(single_device_mesh())
    model, forward = _llama(ALL[variant]), jax.jit(lambda model, tokens: model(tokens))
    tokens, lengths, logits = np.zeros((B, T + NUM_STEPS), np.int32), LENGTHS.copy(), []
    tokens[:, :T] = PROMPTS
    for _ in range(NUM_STEPS):
        logits.append(np.asarray(forward(model, tokens))[np.arange(B), lengths - 1])
        tokens[np.arange(B), lengths] = logits[-1].argmax(axis=-1)
        lengths += 1
    return np.stack([tokens[b, n : n + NUM_STEPS] for b, n in enumerate(LENGTHS)]), np.stack(logits, axis=1)


def _read(model: Llama, prompts: np.ndarray, lengths: np.ndarray, cache: KVCache) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens and logits with the cache."""
    logits, cache = PREFILL(model, prompts, lengths, cache)
    written = []
    for _ in range(NUM_STEPS):
        assert jax.typeof(logits).sharding.spec == spec("batch", None)
        assert logits.dtype == jnp.float32
        tokens = np.asarray(logits).argmax(axis=-1).astype(np.int32)
        written.append((tokens, np.asarray(logits)))
        logits, cache = DECODE(model, jax.device_put(tokens, spec("batch")), cache)
    np.testing.assert_array_equal(cache.lengths, lengths + NUM_STEPS)
    tokens, logits = zip(*written, strict=True)
    return np.stack(tokens, axis=1), np.stack(logits, axis=1)


def _cases():
    """A few every day; `slow` has each variant and each mesh once, `long` all pairs."""
    for number, variant in enumerate(VARIANTS):
        for place, axes in enumerate(("one-device", *MESHES)):
            everyday = variant in ("grouped", "all") if axes == "one-device" else variant == "all"
            everyday &= axes in ("one-device", "mixed")
            everyday |= (variant, axes) in (("odd", "replicas"), ("turns", "mixed"))
            sampled = number % (len(MESHES) + 1) == place or place % len(VARIANTS) == number
            yield pytest.param(variant, axes, marks=() if everyday else pytest.mark.slow if sampled else pytest.mark.long)
    for variant in WITH_EXPERTS:
        for axes in ("one-device", *MESHES, *MESHES_OF_EXPERTS):
            everyday = (variant, axes) == ("experts", "expert, fsdp, tensor")
            sampled = (variant, axes) in (("experts", "fsdp"), ("experts", "expert"), ("experts among dense", "mixed"))
            yield pytest.param(variant, axes, marks=() if everyday else pytest.mark.slow if sampled else pytest.mark.long)


@pytest.mark.parametrize(("variant", "axes"), list(_cases()))
def test_greedy_decoding_equals_reading_everything_again(variant: str, axes: str):
    """Prompts of eight lengths, each padded with tokens of its own."""
    expected_tokens, expected_logits = _by_recomputation(variant)
    sizes = (MESHES | MESHES_OF_EXPERTS).get(axes)
    jax.set_mesh(single_device_mesh() if sizes is None else mesh.make_mesh(sizes))
    model = _llama(ALL[variant])
    tokens, logits = _read(model, PROMPTS, LENGTHS, KVCache.empty(model.config, B, S))
    assert np.std(expected_logits) > 0.3
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(logits, expected_logits, atol=1e-4)


@pytest.mark.parametrize("variant", ["all", *(pytest.param(name, marks=pytest.mark.long) for name in ("turns", "experts"))])
@pytest.mark.parametrize(
    "axes", ["mixed", pytest.param("sequence", marks=pytest.mark.slow), pytest.param("wide", marks=pytest.mark.long)]
)
def test_rows_read_in_parts_in_any_order_are_read_as_whole(axes: str, variant: str):
    """Each device that has rows of its own reads a part of one of them at a time; a copied row continues like its source."""
    rng = np.random.default_rng(3)
    _, expected = _by_recomputation(variant)
    sizes = mesh.make_mesh(MESHES[axes])
    jax.set_mesh(sizes)
    model = _llama(ALL[variant])
    num_shards = sizes.shape["data"] * sizes.shape["fsdp"]
    first, own = np.arange(num_shards) * (B // num_shards), B // num_shards

    @functools.partial(jax.jit, donate_argnums=2)
    def read(model: Llama, tokens: jax.Array, cache: KVCache, counts: jax.Array, rows: jax.Array) -> Any:
        states, cache = model.extend(tokens, cache, counts, rows)
        return jax.reshard(model.read_out(states), jax.P(None)), cache

    cache, logits, num_read = KVCache.empty(model.config, B, S), np.zeros_like(expected[:, 0]), np.zeros(B, int)
    while (num_read < LENGTHS).any():
        rows = (first + rng.integers(own, size=num_shards)).astype(np.int32)
        counts = np.minimum(rng.integers(0, 4, num_shards), (LENGTHS - num_read)[rows]).astype(np.int32)
        tokens = np.full((num_shards, 3), 60, np.int32)
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            tokens[place, :count] = PROMPTS[row, num_read[row] : num_read[row] + count]
        by_row = [jax.device_put(x, spec("batch")) for x in (counts, rows)]
        found, cache = read(model, jax.device_put(tokens, spec("batch", None)), cache, *by_row)
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count:
                num_read[row], logits[row] = num_read[row] + count, np.asarray(found)[place, count - 1]
    np.testing.assert_array_equal(cache.lengths, LENGTHS)
    np.testing.assert_allclose(logits, expected[:, 0], atol=1e-4)

    sources, targets = (first + own - 1).astype(np.int32), first.astype(np.int32)
    copied = jax.jit(copy_rows, donate_argnums=0)(cache, *(jax.device_put(x, spec("batch")) for x in (sources, targets)))
    tokens = np.asarray(logits).argmax(axis=-1).astype(np.int32)
    tokens[targets] = tokens[sources]
    logits, cache = DECODE(model, jax.device_put(tokens, spec("batch")), copied)
    origin = np.arange(B)
    origin[targets] = sources
    np.testing.assert_array_equal(cache.lengths, LENGTHS[origin] + 1)
    np.testing.assert_allclose(logits, expected[origin, 1], atol=1e-4)


def test_a_row_alone_is_decoded_as_among_others():
    """A dim of one entry keeps its sharding when layers are regrouped by rounds."""
    expected_tokens, expected_logits = _by_recomputation("upper")
    jax.set_mesh(single_device_mesh())
    model = _llama(VARIANTS["upper"])
    tokens, logits = _read(model, PROMPTS[:1], LENGTHS[:1], KVCache.empty(model.config, 1, S))
    np.testing.assert_array_equal(tokens, expected_tokens[:1])
    np.testing.assert_allclose(logits, expected_logits[:1], atol=1e-4)


def test_padding_changes_nothing_and_the_steps_compile_once():
    """Bit for bit: other padding, a cache that held other texts. And to rounding: without padding."""
    jax.set_mesh(mesh.make_mesh(MESHES["mixed"]))
    model = _llama(VARIANTS["all"])
    tokens, logits = _read(model, PROMPTS, LENGTHS, KVCache.empty(model.config, B, S))
    sizes = PREFILL._cache_size(), DECODE._cache_size()

    _, used = PREFILL(model, PROMPTS[::-1].copy(), np.full(B, T, np.int32), KVCache.empty(model.config, B, S))
    used = DECODE(model, jax.device_put(PROMPTS[:, 0], spec("batch")), used)[1]
    otherwise_padded = np.where(np.arange(T) < LENGTHS[:, None], PROMPTS, 63).astype(np.int32)
    for ours, theirs in zip(_read(model, otherwise_padded, LENGTHS, used), (tokens, logits), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (PREFILL._cache_size(), DECODE._cache_size()) == sizes

    alone, _ = PREFILL(model, PROMPTS[:, :6], np.full(B, 6, np.int32), KVCache.empty(model.config, B, S))
    np.testing.assert_allclose(np.asarray(alone)[6], logits[6, 0], atol=1e-5)


@pytest.mark.parametrize("variant", ["grouped", "turns"])
@pytest.mark.parametrize("axes", [pytest.param("one-device", marks=pytest.mark.slow), "mixed"])
def test_the_cache_is_written_where_it_lies(axes: str, variant: str):
    """The steps hold the cache once, and beside it no more than a few layers' part."""
    jax.set_mesh(single_device_mesh() if axes == "one-device" else mesh.make_mesh(MESHES[axes]))
    config = dataclasses.replace(VARIANTS[variant], num_layers=8)
    model = jax.jit(Llama, static_argnums=0).eval_shape(config, jax.random.key(0))
    cache = jax.jit(KVCache.empty, static_argnums=(0, 1, 2)).eval_shape(config, B, 1024)
    num_bytes = 2 * cache.keys.size * cache.keys.dtype.itemsize // jax.sharding.get_mesh().size

    tokens = jax.device_put(PROMPTS, spec("batch", "seq"))
    lengths = jax.device_put(LENGTHS, spec("batch"))
    for step in (PREFILL.lower(model, tokens, lengths, cache), DECODE.lower(model, lengths, cache)):
        memory = step.compile().memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= num_bytes
        assert memory.temp_size_in_bytes < num_bytes / 2


def test_only_the_last_token_of_a_prompt_meets_the_head():
    jax.set_mesh(mesh.make_mesh(MESHES["mixed"]))
    V = 1000  # a size that nothing else has
    config = dataclasses.replace(GROUPED, vocab_size=V)
    model = jax.jit(Llama, static_argnums=0).eval_shape(config, jax.random.key(0))
    program = jax.make_jaxpr(
        lambda model: model.prefill(jnp.asarray(PROMPTS), jnp.asarray(LENGTHS), KVCache.empty(config, B, S))
    )(model)
    shapes = re.findall(r"f32\[([^]]*)]", re.sub(r"@(\w+|\([^)]*\))", "", str(program)))
    assert {shape for shape in shapes if str(V) in shape.split(",")} == {f"{V},{config.embed_dim}", f"{B},{V}"}


def test_an_empty_cache_is_sharded_and_rounded_up_to_the_sequence_axis():
    jax.set_mesh(mesh.make_mesh(MESHES["long"]))
    config = dataclasses.replace(GROUPED, compute_dtype="bfloat16")
    for cache in (KVCache.empty(config, 4, 18), jax.jit(lambda: KVCache.empty(config, 4, 18))()):
        for slots in (cache.keys, cache.values):
            assert slots.shape == (2, 4, 4, 20, 4)
            assert slots.dtype == jnp.bfloat16
            assert jax.typeof(slots).sharding.spec == spec(None, "batch", "kv_heads", "seq", "head_dim")
        assert jax.typeof(cache.lengths).sharding.spec == spec("batch")
        np.testing.assert_array_equal(cache.lengths, np.zeros(4))


def test_a_full_row_disturbs_no_other():
    _, expected = _by_recomputation("all")
    jax.set_mesh(mesh.make_mesh(MESHES["long"]))
    model = _llama(VARIANTS["all"])
    _, logits = _read(model, PROMPTS, LENGTHS, KVCache.empty(model.config, B, 12))
    fits = LENGTHS + NUM_STEPS <= 12
    assert fits.any()
    assert not fits.all()
    np.testing.assert_allclose(logits[fits], expected[fits], atol=1e-4)
