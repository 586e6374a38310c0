"""Filters keep what transformers keeps; draws follow the probabilities and depend on seeds and position alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.generation.sampling import NUM_TOP, RowSampling, Sampling, choose_by_row, keep_likely, next_tokens
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec

V = 100


def kept_by_reference(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The filters as their papers put them, over one row; bool [V]."""
    kept = np.ones(V, bool)

    def probabilities() -> np.ndarray:
        weights = np.where(kept, np.exp(scores.astype(np.float64)), 0)
        return weights / weights.sum()

    if sampling.top_k:
        kept &= scores >= np.sort(scores)[::-1][: sampling.top_k][-1]
    if sampling.top_p:
        order = np.argsort(-probabilities())
        mass_before = np.cumsum(probabilities()[order]) - probabilities()[order]
        kept &= np.isin(np.arange(V), order[(mass_before < sampling.top_p) | (np.arange(V) == 0)])
    if sampling.min_p:
        kept &= probabilities() >= sampling.min_p * probabilities().max()
    return kept


SETTINGS = [
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.0, top_k=1000),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, top_p=0.01),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=0.5, top_k=20, top_p=0.9, min_p=0.1),
    Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.1),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_filters_keep_what_their_definitions_say(sampling):
    logits = np.random.default_rng(0).normal(0, 3, (8, V)).astype(np.float32)
    scores = logits / sampling.temperature
    kept = np.isfinite(jax.vmap(lambda row: keep_likely(row, sampling))(scores))
    np.testing.assert_array_equal(kept, [kept_by_reference(row, sampling) for row in scores])
    assert kept.sum(axis=1).min() >= 1


@pytest.mark.parametrize("sampling", SETTINGS)
def test_filters_keep_what_transformers_keeps(sampling):
    torch = pytest.importorskip("torch")
    from transformers import GenerationConfig, LogitsProcessorList
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )
    from transformers.generation.utils import GenerationMixin

    class Mixin(GenerationMixin):
        """Only to ask for the processors, in the order that `generate` applies them."""

        config = type("Config", (), {"is_encoder_decoder": False})()

    settings = {"top_k": sampling.top_k or 0, "top_p": sampling.top_p, "min_p": sampling.min_p}
    generation_config = GenerationConfig(do_sample=True, temperature=sampling.temperature, **settings)
    generation_config._eos_token_tensor = None
    mixin: Any = Mixin()
    processors = mixin._get_logits_processor(generation_config, logits_processor=LogitsProcessorList())
    warpers = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
    assert processors
    assert all(isinstance(processor, warpers) for processor in processors)
    logits = np.random.default_rng(1).normal(0, 3, (16, V)).astype(np.float32)
    theirs = processors(torch.zeros((16, 1), dtype=torch.long), torch.tensor(logits)).numpy()
    ours = jax.vmap(lambda row: keep_likely(row / sampling.temperature, sampling))(logits)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_equally_likely_tokens_stay_together():
    scores = jnp.asarray([2.0, 1.0, 1.0, 0.0])
    assert np.isfinite(keep_likely(scores, Sampling(temperature=1.0, top_k=2))).tolist() == [True, True, True, False]
    assert np.isfinite(keep_likely(scores, Sampling(temperature=1.0, top_p=0.6))).tolist() == [True, True, True, False]


def draw(logits: np.ndarray, sampling: Sampling, *, row_seeds=None, positions=None, seed: int = 0):
    B = len(logits)
    row_seeds, positions = np.arange(B) if row_seeds is None else row_seeds, np.zeros(B) if positions is None else positions
    placed = [
        jax.device_put(np.asarray(x, dtype), spec("batch", *[None] * (np.ndim(x) - 1)))
        for x, dtype in ((logits, np.float32), (row_seeds, np.uint32), (positions, np.int32))
    ]
    return [np.asarray(x) for x in jax.jit(next_tokens, static_argnums=4)(*placed, jax.random.key(seed), sampling)]


def test_greedy_takes_the_likeliest_and_tells_its_probability():
    logits = np.random.default_rng(2).normal(0, 3, (8, V)).astype(np.float32)
    tokens, logprobs = draw(logits, Sampling())
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    probabilities = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(logprobs, np.log(probabilities.max(axis=1)), rtol=1e-5)


def test_draws_follow_the_probabilities_that_are_left():
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    tokens, _ = draw(np.tile(np.log(probabilities), (8000, 1)), Sampling(temperature=1.0, top_k=3))
    counts = np.bincount(tokens, minlength=4)
    expected = 8000 * probabilities[:3] / 0.9
    assert counts[3] == 0
    assert ((counts[:3] - expected) ** 2 / expected).sum() < 13.8  # chi-squared, two degrees of freedom: p = 0.001
    hot, _ = draw(np.tile(np.log(probabilities), (8000, 1)), Sampling(temperature=0.5))
    assert abs((hot == 0).mean() - 0.16 / 0.30) < 0.03


@pytest.mark.parametrize("axes", [{"data": 8, "fsdp": 1}, {"fsdp": 2, "sequence": 2, "tensor": 2}])
def test_a_draw_is_the_same_on_every_mesh_and_in_every_batch(axes):
    logits = np.random.default_rng(3).normal(0, 1, (16, V)).astype(np.float32)
    row_seeds, positions = np.arange(16) % 4, np.arange(16) + 5
    sampling = Sampling(temperature=1.0, top_p=0.95)
    expected, _ = draw(logits, sampling, row_seeds=row_seeds, positions=positions)
    jax.set_mesh(make_mesh(MeshConfig(**axes)))
    order = np.random.default_rng(4).permutation(16)
    tokens, _ = draw(logits[order], sampling, row_seeds=row_seeds[order], positions=positions[order])
    np.testing.assert_array_equal(tokens, expected[order])


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-30])
def test_the_coldest_draws_are_the_likeliest(temperature):
    logits = np.random.default_rng(2).normal(0, 3, (8, V)).astype(np.float32)
    for filters in ({}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}):
        tokens, logprobs = draw(logits, Sampling(temperature=temperature, **filters))
        np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
        assert np.isfinite(logprobs).all()


def test_seed_row_seed_and_position_each_change_the_draws():
    flat, sampling = np.zeros((16, V)), Sampling(temperature=1.0)
    ones = np.ones(16)
    draws = [
        draw(flat, sampling, row_seeds=ones, positions=np.arange(16))[0].tolist(),
        draw(flat, sampling, row_seeds=2 * ones, positions=np.arange(16))[0].tolist(),
        draw(flat, sampling, row_seeds=ones, positions=np.arange(16), seed=1)[0].tolist(),
    ]
    assert len({tuple(tokens) for tokens in draws}) == 3
    assert min(len(set(tokens)) for tokens in draws) > 8


def test_rows_with_settings_of_their_own_choose_as_they_would_among_their_like():
    """The very tokens of `next_tokens`, bit for bit, on a mesh whose devices have some of the rows each."""
    jax.set_mesh(make_mesh(MeshConfig(data=4, tensor=2)))
    several = [Sampling(), *SETTINGS]
    B = len(several)
    rng = np.random.default_rng(3)
    logits = jax.device_put(rng.normal(0, 3, (B, V)).astype(np.float32), spec("batch", None))
    row_seeds, positions = rng.integers(0, 2**32, B, dtype=np.uint32), rng.integers(1, 100, B, dtype=np.int32)
    alike = (jax.device_put(row_seeds, spec("batch")), jax.device_put(positions, spec("batch")))
    choose: Any = jax.jit(choose_by_row)

    def chosen(several, effort, with_top=True):
        rows = RowSampling.of((sampling, 7, int(seed)) for sampling, seed in zip(several, row_seeds, strict=True))
        rows = jax.tree.map(lambda x: jax.device_put(x, spec("batch")), rows)
        return [np.asarray(x) for x in choose(logits, alike[1], rows, np.int32(effort), np.bool_(with_top))]

    expected = [
        [np.asarray(x) for x in jax.jit(next_tokens, static_argnums=4)(logits, *alike, jax.random.key(7), sampling)]
        for sampling in several
    ]
    found = chosen(several, 2)
    assert len({tokens.tobytes() for tokens, _ in expected}) > 3
    np.testing.assert_array_equal(found[0], [expected[row][0][row] for row in range(B)])
    np.testing.assert_array_equal(found[1], [expected[row][1][row] for row in range(B)])
    logprobs = np.asarray(jax.nn.log_softmax(np.asarray(logits)))
    np.testing.assert_array_equal(found[2], np.argsort(-logprobs, axis=1, kind="stable")[:, :NUM_TOP])
    np.testing.assert_allclose(found[3], -np.sort(-logprobs, axis=1)[:, :NUM_TOP], rtol=1e-6)

    np.testing.assert_array_equal(chosen([Sampling()] * B, 0)[0], expected[0][0])
    plain = Sampling(temperature=0.9)
    drawn = np.asarray(jax.jit(next_tokens, static_argnums=4)(logits, *alike, jax.random.key(7), plain)[0])
    for effort in (1, 2):
        np.testing.assert_array_equal(chosen([plain] * B, effort)[0], drawn)
    assert not chosen(several, 2, with_top=False)[3].any()
