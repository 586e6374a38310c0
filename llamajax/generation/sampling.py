"""Chooses the next token from a model's logits: the likeliest one, or a draw from those that pass the filters.

A draw depends only on the seed, the row's own seed and the position of the token, so the text is the same on every mesh and
in every batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from llamajax.parallel.sharding import spec


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for choosing a token. Filters are applied in the order of the fields, each to the result of the previous
    one."""

    temperature: float = 0.0
    """Divisor of the logits; 0 takes the likeliest token and ignores the filters."""
    top_k: int | None = None
    """Number of likeliest tokens to keep, plus any that are as likely as the last of them."""
    top_p: float | None = None
    """Total probability of the smallest set of likeliest tokens to keep (arXiv:1904.09751)."""
    min_p: float | None = None
    """Minimum probability of tokens to keep, relative to the likeliest one (arXiv:2407.01082)."""


def keep_likely(scores: Float32[Array, "V"], sampling: Sampling) -> Float32[Array, "V"]:
    """Filters one row's scores (logits divided by the temperature): tokens that the filters drop become -inf.

    At least one token remains.
    """
    V = scores.shape[0]
    if sampling.top_k is not None and sampling.top_k < V:
        last_kept = jax.lax.top_k(scores, sampling.top_k)[0][-1]
        scores = jnp.where(scores < last_kept, -jnp.inf, scores)
    if sampling.top_p is not None and sampling.top_p < 1:
        ascending = jnp.sort(scores)
        num_dropped = jnp.sum(jnp.cumsum(jax.nn.softmax(ascending)) <= 1 - sampling.top_p)
        last_kept = ascending[jnp.minimum(num_dropped, V - 1)]
        scores = jnp.where(scores < last_kept, -jnp.inf, scores)
    if sampling.min_p is not None and sampling.min_p > 0:
        scores = jnp.where(scores < jnp.max(scores) + jnp.log(sampling.min_p), -jnp.inf, scores)
    return scores


NUM_TOP = 20
"""Number of likeliest tokens that `Choices` lists."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """Settings of rows that differ in them, as arrays [B]; see `Sampling`."""

    seeds: UInt32[Array, "B"]
    """Seed of each row's key, from which `next_tokens` would draw for all."""
    row_seeds: UInt32[Array, "B"]
    temperature: Float32[Array, "B"]
    top_k: Int32[Array, "B"]
    """0 for all tokens."""
    top_p_dropped: Float32[Array, "B"]
    """1 - `top_p`."""
    min_p: Float32[Array, "B"]

    @staticmethod
    def of(rows: Iterable[tuple[Sampling, int, int]]) -> "RowSampling":
        """Returns the settings of rows, each given with its seed and its row seed; as numpy's arrays."""
        columns = [
            (seed, row_seed, s.temperature, s.top_k or 0, 0.0 if s.top_p is None else 1 - s.top_p, s.min_p or 0.0)
            for s, seed, row_seed in rows
        ]
        kinds = (np.uint32, np.uint32, np.float32, np.int32, np.float32, np.float32)
        arrays: list[Any] = [np.array(x, kind) for x, kind in zip(zip(*columns, strict=True), kinds, strict=True)]
        return RowSampling(*arrays)


class Choices(NamedTuple):
    """Chosen tokens, their log probabilities under the model itself, and those of the likeliest tokens."""

    tokens: Int32[Array, "B"]
    logprobs: Float32[Array, "B"]
    top_tokens: Int32[Array, "B N"]
    """N is `NUM_TOP`, or the number of tokens if that is smaller; zeros unless asked for."""
    top_logprobs: Float32[Array, "B N"]


def choose_by_row(
    logits: Float32[Array, "B V"],
    positions: Int32[Array, "B"],
    sampling: RowSampling,
    effort: Int32[Array, ""],
    with_top: Bool[Array, ""],
) -> Choices:
    """Returns one token per row, each chosen by the row's own settings: the token of `next_tokens` with these.

    Args:
        logits: sharded ("batch", None).
        positions: position of the new token in its sequence, sharded ("batch"), as the arrays of `sampling`.
        sampling: the settings.
        effort: 0 if all rows take the likeliest token; 1 if none has filters; otherwise 2, which sorts all logits.
        with_top: whether the likeliest tokens are listed.

    Returns:
        Arrays on every device.
    """
    V = logits.shape[1]

    def keep(scores: jax.Array, row: RowSampling) -> jax.Array:
        """Does what `keep_likely` does, with one sort for any filters."""
        ascending = jnp.sort(scores)
        least = jnp.where(row.top_k > 0, ascending[jnp.clip(V - row.top_k, 0, V - 1)], -jnp.inf)
        mass = jnp.cumsum(jax.nn.softmax(jnp.where(ascending < least, -jnp.inf, ascending)))
        least_by_mass = ascending[jnp.minimum(jnp.sum(mass <= row.top_p_dropped), V - 1)]
        least = jnp.maximum(least, jnp.where(row.top_p_dropped > 0, least_by_mass, -jnp.inf))
        least = jnp.maximum(least, jnp.where(row.min_p > 0, ascending[-1] + jnp.log(row.min_p), -jnp.inf))
        return jnp.where(scores < least, -jnp.inf, scores)

    by_row = spec("batch")
    in_specs = spec("batch", None), by_row, by_row, P(), P()

    @partial(jax.shard_map, in_specs=in_specs, out_specs=(by_row, by_row, *[spec("batch", None)] * 2))
    def choose(
        logits: jax.Array, positions: jax.Array, rows: RowSampling, effort: jax.Array, with_top: jax.Array
    ) -> tuple[jax.Array, ...]:
        likeliest = jnp.argmax(logits, axis=1).astype(jnp.int32)

        def draw() -> jax.Array:
            temperature = jnp.maximum(rows.temperature, jnp.finfo(jnp.float32).tiny)
            scores = (logits - jnp.max(logits, axis=1, keepdims=True)) / temperature[:, None]
            scores = jax.lax.cond(effort > 1, lambda: jax.vmap(keep)(scores, rows), lambda: scores)
            fold_in = jax.vmap(jax.random.fold_in)
            keys = fold_in(fold_in(jax.vmap(jax.random.key)(rows.seeds), rows.row_seeds), positions)
            drawn = jax.vmap(jax.random.categorical)(keys, scores)
            return jnp.where(rows.temperature == 0, likeliest, drawn.astype(jnp.int32))

        tokens = jax.lax.cond(effort > 0, draw, lambda: likeliest)
        return tokens, *token_logprobs(logits, tokens, with_top)

    return Choices(*jax.reshard(choose(logits, positions, sampling, effort, with_top), P(None)))


def token_logprobs(
    logits: Float32[Array, "B V"], tokens: Int32[Array, "B"], with_top: Bool[Array, ""]
) -> tuple[Float32[Array, "B"], Int32[Array, "B N"], Float32[Array, "B N"]]:
    """On one device, within `shard_map`: returns the log probability of a token per row, and those of the likeliest tokens
    as in `Choices`."""
    logprobs = jax.nn.log_softmax(logits)
    N = min(NUM_TOP, logits.shape[1])

    def top() -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(logprobs, N)
        return ids.astype(jnp.int32), values

    def none() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros_like(logprobs[:, :N], jnp.int32), jnp.zeros_like(logprobs[:, :N])

    return jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0], *jax.lax.cond(with_top, top, none)


def next_tokens(
    logits: Float32[Array, "B V"],
    row_seeds: UInt32[Array, "B"],
    positions: Int32[Array, "B"],
    key: jax.Array,
    sampling: Sampling,
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Returns one token per row, and its log probability under the model itself.

    Every device processes its own rows.

    Args:
        logits: sharded ("batch", None).
        row_seeds: sharded ("batch"); rows with equal seeds draw the same.
        positions: sharded ("batch"); position of the new token in its sequence.
        key: a PRNG key, the same on all devices.
        sampling: the settings.

    Returns:
        Both on every device.
    """

    @partial(jax.shard_map, in_specs=(spec("batch", None), spec("batch"), spec("batch"), P()), out_specs=spec("batch"))
    @partial(jax.vmap, in_axes=(0, 0, 0, None))
    def choose(logits: jax.Array, row_seed: jax.Array, position: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        if sampling.temperature == 0:
            token = jnp.argmax(logits)
        else:
            # The maximum becomes 0, and the temperature at least the smallest fp32 number: below that, 0 / 0 remains of all
            # scores.
            temperature = max(sampling.temperature, float(jnp.finfo(jnp.float32).tiny))
            scores = keep_likely((logits - jnp.max(logits)) / temperature, sampling)
            token = jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, row_seed), position), scores)
        return token.astype(jnp.int32), jax.nn.log_softmax(logits)[token]

    return jax.reshard(choose(logits, row_seeds, positions, key), P(None))
