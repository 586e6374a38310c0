"""Attention of each row's newest tokens to each other and to its earlier tokens, to decode or to read a prompt in parts."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from llamajax.config.parallel import axes_of
from llamajax.kernels.plain import Keys, LogSumExp, Queries, join, num_chunks, split
from llamajax.parallel.sharding import spec


class Past(NamedTuple):
    """Cached keys and values of one layer; the token of row b at position p is in slot p."""

    keys: Float[Array, "B K S H"]
    """Sharded ("batch", "kv_heads", "seq", "head_dim")."""
    values: Float[Array, "B K S H"]
    """Sharded like `keys`."""
    lengths: Int32[Array, "B"]
    """Slots in use, sharded ("batch")."""
    rows: Int32[Array, "R"] | None = None
    """Row of the cache that each row of queries continues, sharded ("batch"): on each device, one of the device's own rows.
    None: there are as many queries as rows, in the same order."""


def attend(
    q: Queries, k: Keys, v: Keys, past: Past, window: int | None, scale: float, *, with_lse: bool = False
) -> tuple[Queries, LogSumExp | None]:
    """Computes `llamajax.kernels.attention.attend` over each row's past and its newest tokens, which the past does not
    contain yet and of which each sees those before it. Rows are not split."""
    q_spec, kv_spec = spec("batch", None, "kv_heads", None, "head_dim"), spec("batch", None, "kv_heads", "head_dim")
    past_spec, out_specs = spec("batch", "kv_heads", "seq", "head_dim"), (q_spec, spec("batch", None, "kv_heads", None))
    in_specs = (q_spec, kv_spec, kv_spec, past_spec, past_spec, spec("batch"), spec("batch"))

    @partial(jax.shard_map, in_specs=in_specs, out_specs=out_specs)
    def on_device(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        lengths: jax.Array,
        rows: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Each device of the sequence axis sums over its own slots; then the sums are reduced."""
        if rows is not None:
            own = rows - jax.lax.axis_index(axes_of("batch")) * keys.shape[0]
            keys, values, lengths = keys[own], values[own], lengths[own]
        (b, T, K, G, _), own_slots = q.shape, keys.shape[2]
        slots = jax.lax.axis_index(axes_of("seq")) * own_slots + jnp.arange(own_slots)

        def attend_chunk(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            q, index = chunk
            positions = lengths[:, None] + index
            visible = jnp.broadcast_to(slots[None, None, :] < lengths[:, None, None], (*index.shape, own_slots))
            visible_new = jnp.arange(T)[None, None, :] <= index[:, :, None]
            if window is not None:
                visible = visible & (slots[None, None, :] > positions[:, :, None] - window)
                visible_new = visible_new & (jnp.arange(T)[None, None, :] > index[:, :, None] - window)
            scores = jnp.einsum("BTKGH,BKSH->BKGTS", q, keys, preferred_element_type=jnp.float32) * scale
            scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
            new_scores = jnp.einsum("BTKGH,BNKH->BKGTN", q, k, preferred_element_type=jnp.float32) * scale
            new_scores = jnp.where(visible_new[:, None, None], new_scores, -jnp.inf)

            largest = jax.lax.pmax(jnp.max(scores, axis=-1), axes_of("seq"))
            largest = jnp.maximum(largest, jnp.max(new_scores, axis=-1))
            exps, new_exps = jnp.exp(scores - largest[..., None]), jnp.exp(new_scores - largest[..., None])
            total = jax.lax.psum(jnp.sum(exps, axis=-1), axes_of("seq")) + jnp.sum(new_exps, axis=-1)
            weights, new_weights = ((x / total[..., None]).astype(q.dtype) for x in (exps, new_exps))
            # In this order of dimensions, since XLA for CPUs has no products of bfloat16 that it would have to transpose.
            out = jnp.einsum("BKGTS,BKSH->BKGTH", weights, values, preferred_element_type=jnp.float32)
            out = jax.lax.psum(out, axes_of("seq"))
            out = out + jnp.einsum("BKGTN,BNKH->BKGTH", new_weights, v, preferred_element_type=jnp.float32)
            return jnp.moveaxis(out, 3, 1).astype(q.dtype), jnp.moveaxis(jnp.log(total) + largest, -1, 1)

        whole = q, jnp.broadcast_to(jnp.arange(T), (b, T))
        parts = num_chunks(b * K * G * (own_slots + T), T)
        if parts == 1:
            out, lse = attend_chunk(whole)
        else:
            out, lse = jax.tree.map(join, jax.lax.map(attend_chunk, jax.tree.map(partial(split, parts=parts), whole)))
        return out, lse if with_lse else None

    return on_device(q, k, v, *past)
