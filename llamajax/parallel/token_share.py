"""Runs a function of single tokens for a share of each device's tokens and for the rest, so that the backward pass can find
the values of that share saved and recompute the others (MEMO, arXiv:2407.12117, section 4.1).

Tokens are parted before the products. Parted after them, the backward pass would repeat all products for the rest.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from llamajax.config.offload import saved_tokens
from llamajax.parallel.sharding import as_tuple


def by_share(run: Callable[[Any, bool], Any], x: Any, share: float) -> Any:
    """Returns `run(x, True)` for the first tokens of every device, joined with `run(x, False)` for its other tokens; nothing
    is sent.

    Args:
        run: function from some tokens, and whether their values are saved, to a tree of arrays [B, T, ...], one entry per
            token and in their order.
        x: all tokens, an array [B, T, ...] or a tree of such arrays.
        share: share of the tokens whose values are saved; see `saved_tokens`.
    """
    first_array = jax.tree.leaves(x)[0]
    (B, T, *_), lies = first_array.shape, jax.typeof(first_array).sharding.spec
    sizes = jax.sharding.get_abstract_mesh().shape
    parts = 1
    for axis in as_tuple(lies[1]):
        parts *= sizes[axis]
    length = T // parts
    first = saved_tokens(share, length)
    if first in (0, length):
        return run(x, first > 0)

    def by_part(x: jax.Array) -> jax.Array:
        own = jax.typeof(x).sharding.spec
        partitions = (*own.partitions[:2], None, *own.partitions[2:])
        shape = (B, parts, x.shape[1] // parts, *x.shape[2:])
        return jax.lax.reshape(x, shape, out_sharding=own.update(partitions=partitions))

    def merged(x: jax.Array, like: jax.Array) -> jax.Array:
        return jax.lax.reshape(x, (B, parts * x.shape[2], *x.shape[3:]), out_sharding=jax.typeof(like).sharding.spec)

    def some(tokens: slice) -> Any:
        return jax.tree.map(lambda x: merged(by_part(x)[:, :, tokens], x), x)

    saved, others = run(some(slice(first)), True), run(some(slice(first, None)), False)
    return jax.tree.map(lambda a, b: merged(jnp.concatenate([by_part(a), by_part(b)], axis=2), a), saved, others)
