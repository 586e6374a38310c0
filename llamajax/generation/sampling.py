"""Chooses the next token from a model's logits: the likeliest one, or a draw from those that pass the filters.

A draw depends only on the seed, the row's own seed and the position of the token, so the text is the same on every mesh and
in every batch.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float32, Int32, UInt32

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
