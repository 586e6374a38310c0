"""The way of tokens to experts and back, against plain loops: no choice is lost, none is sent twice, and weights and counts
arrive to the bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.parallel import dispatch
from llamajax.parallel.dispatch import Block

N, K, E, WIDTH = 150, 3, 8, 16


def choices(seed: int = 0) -> np.ndarray:
    """Experts [N, K] of tokens, the first expert the most often; some choices go nowhere."""
    rng = np.random.default_rng(seed)
    likely = 2.0 ** -np.arange(E)
    chosen = np.stack([rng.choice(E, K, replace=False, p=likely / likely.sum()) for _ in range(N)]).astype(np.int32)
    return np.where(rng.random((N, K)) < 0.1, E, chosen)


def in_turn(chosen: np.ndarray, block: Block, round_: int) -> list[list[tuple[int, int]]]:
    """Choices (token, number) in the slots of each peer: expert by expert, in the order of tokens."""
    found = []
    for peer in range(E // block.experts):
        own = range(peer * block.experts, (peer + 1) * block.experts)
        waiting = [(token, k) for expert in own for token in range(N) for k in range(K) if chosen[token, k] == expert]
        found.append(waiting[round_ * block.slots : (round_ + 1) * block.slots])
    return found


@pytest.mark.parametrize("slots", [8, 100, N * K])
@pytest.mark.parametrize("experts", [1, 4, E])
def test_each_round_takes_the_next_choices_of_every_peer(experts, slots):
    chosen, block = choices(), Block.of(slots, experts, WIDTH, jnp.float32)
    for round_ in range(3):
        route = jax.tree.map(np.asarray, dispatch.route(jnp.asarray(chosen), E, block, round_))
        rows, sources = np.full((N, K), route.source.shape[0] * block.rows), np.full(route.source.shape, N * K)
        counts = np.zeros_like(route.counts)
        for peer, own in enumerate(in_turn(chosen, block, round_)):
            for slot, (token, k) in enumerate(own):
                rows[token, k], sources[peer, slot] = peer * block.rows + block.header + slot, token * K + k
                counts[peer, chosen[token, k] % experts] += 1
        np.testing.assert_array_equal(route.rows, rows)
        np.testing.assert_array_equal(route.source, sources)
        np.testing.assert_array_equal(route.counts, counts)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_weights_and_counts_arrive_as_they_left(dtype):
    block = Block.of(64, 2, WIDTH, dtype)
    route = dispatch.route(jnp.asarray(choices()), E, block)
    x = jax.random.normal(jax.random.key(0), (N, WIDTH), dtype)
    weights = jax.random.uniform(jax.random.key(1), (N, K))
    blocks: Any = dispatch.pack(x, weights, route, block)
    assert blocks.shape == (E // 2 * block.rows, WIDTH)
    assert blocks.dtype == dtype
    rows, own_weights, counts = map(np.asarray, dispatch.unpack(blocks, block))
    np.testing.assert_array_equal(counts, route.counts)
    source = np.asarray(route.source)
    for peer, slot in np.argwhere(source < N * K):
        row, choice = peer * block.rows + block.header + slot, source[peer, slot]
        np.testing.assert_array_equal(rows[row], np.asarray(x)[choice // K])
        assert own_weights[row] == np.asarray(weights)[choice // K, choice % K]


def test_gradients_are_those_of_gathers_and_sums():
    block = Block.of(24, 4, WIDTH, jnp.float32)
    route = dispatch.route(jnp.asarray(choices()), E, block)
    x, y = (jax.random.normal(jax.random.key(key), (size, WIDTH)) for key, size in ((0, N), (1, E // 4 * block.rows)))
    weights = jax.random.uniform(jax.random.key(2), (N, K))
    at, source = route.rows.reshape(-1), jnp.minimum(route.source.reshape(-1), N * K - 1)
    slots = (np.arange(E // 4)[:, None] * block.rows + block.header + np.arange(block.slots)).reshape(-1)
    is_there = route.source.reshape(-1) < N * K

    def sent(x: jax.Array, weights: jax.Array) -> jax.Array:
        came: Any = dispatch.unpack(dispatch.pack(x, weights, route, block), block)
        rows, own, _ = came
        return jnp.where(is_there[:, None], rows[slots] * own[slots, None], 0)

    def gathered(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.where(is_there[:, None], x[source // K] * weights.reshape(-1)[source, None], 0)

    def summed(y: jax.Array) -> jax.Array:
        return jnp.sum(y.at[at].get(mode="fill", fill_value=0).reshape(N, K, WIDTH), axis=1)

    for ours, theirs, args in ((sent, gathered, (x, weights)), (lambda y: dispatch.collect(y, route, block), summed, (y,))):
        result, pull_back = jax.vjp(ours, *args)
        expected, pull_back_expected = jax.vjp(theirs, *args)
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
        d = jax.random.normal(jax.random.key(3), result.shape)
        for own, other in zip(pull_back(d), pull_back_expected(d), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", [choices(), np.zeros((N, 1), np.int32), np.full((N, 2), E, np.int32)])
def test_rows_that_came_are_ordered_by_expert(chosen):
    block = Block.of(N * K, 4, WIDTH, jnp.float32)
    counts = dispatch.route(jnp.asarray(chosen), E, block).counts
    groups = jax.tree.map(np.asarray, dispatch.by_expert(counts, block))
    np.testing.assert_array_equal(groups.sizes, np.asarray(counts).sum(axis=0))
    expected = [
        peer * block.rows + block.header + int(np.sum(counts[peer, :expert])) + number
        for expert in range(4)
        for peer in range(len(counts))
        for number in range(int(counts[peer, expert]))
    ]
    np.testing.assert_array_equal(groups.order[: len(expected)], expected)
    np.testing.assert_array_equal(np.flatnonzero(groups.is_row), sorted(expected))
    np.testing.assert_array_equal(groups.place[expected], np.arange(len(expected)))
