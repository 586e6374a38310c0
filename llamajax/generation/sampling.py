"""The next token from a model's logits: the likeliest, or one drawn from what the filters leave.

A draw depends on the seed, the row's own seed and the token's position alone, so that the same text is written on
every mesh and whatever else is in the batch.
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
    """How a token is chosen; filters are applied in the order of the fields, each to what the one before left."""

    temperature: float = 0.0
    """Logits are divided by it; 0 takes the likeliest token and ignores the filters."""
    top_k: int | None = None
    """Keep this many of the likeliest tokens, and those that are as likely as the last of them."""
    top_p: float | None = None
    """Keep the fewest of the likeliest tokens that have this probability together (arXiv:1904.09751)."""
    min_p: float | None = None
    """Keep tokens that are at least this share as likely as the likeliest (arXiv:2407.01082)."""


def keep_likely(scores: Float32[Array, "V"], sampling: Sampling) -> Float32[Array, "V"]:
    """One row's scores (logits divided by the temperature), with -inf for tokens that the filters drop.

    At least one token is left.
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
    """One token per row, and the logarithm of the probability that the model itself gives it.

    Every device works on its own rows.

    Args:
        logits: sharded ("batch", None).
        row_seeds: sharded ("batch"): rows with equal numbers draw alike.
        positions: sharded ("batch"): place of the new token in its sequence.
        key: a PRNG key, the same on all devices.
        sampling: how to choose.

    Returns:
        Both on every device.
    """

    @partial(jax.shard_map, in_specs=(spec("batch", None), spec("batch"), spec("batch"), P()), out_specs=spec("batch"))
    @partial(jax.vmap, in_axes=(0, 0, 0, None))
    def choose(logits: jax.Array, row_seed: jax.Array, position: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        if sampling.temperature == 0:
            token = jnp.argmax(logits)
        else:
            # The likeliest at 0, and no temperature below what fp32 holds: colder still, 0 / 0 would be left of all scores.
            temperature = max(sampling.temperature, float(jnp.finfo(jnp.float32).tiny))
            scores = keep_likely((logits - jnp.max(logits)) / temperature, sampling)
            token = jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, row_seed), position), scores)
        return token.astype(jnp.int32), jax.nn.log_softmax(logits)[token]

    return jax.reshard(choose(logits, row_seeds, positions, key), P(None))
