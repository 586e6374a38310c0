"""Attention of one new token per row to the row's earlier tokens, for decoding."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from llamajax.config.parallel import axes_of
from llamajax.kernels.plain import Keys, LogSumExp, Queries
from llamajax.parallel.sharding import spec


class Past(NamedTuple):
    """Cached keys and values of one layer; the token of row b at position p is in slot p."""

    keys: Float[Array, "B K S H"]
    """Sharded ("batch", "kv_heads", "seq", "head_dim")."""
    values: Float[Array, "B K S H"]
    """Sharded like `keys`."""
    lengths: Int32[Array, "B"]
    """Slots in use, sharded ("batch")."""


def attend(
    q: Queries, k: Keys, v: Keys, past: Past, window: int | None, scale: float, *, with_lse: bool = False
) -> tuple[Queries, LogSumExp | None]:
    """Computes `llamajax.kernels.attention.attend` over each row's past and its newest token, which the past does not
    contain yet."""
    q_spec, kv_spec = spec("batch", None, "kv_heads", None, "head_dim"), spec("batch", None, "kv_heads", "head_dim")
    past_spec, out_specs = spec("batch", "kv_heads", "seq", "head_dim"), (q_spec, spec("batch", None, "kv_heads", None))
    in_specs = (q_spec, kv_spec, kv_spec, past_spec, past_spec, spec("batch"))

    @partial(jax.shard_map, in_specs=in_specs, out_specs=out_specs)
    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array):
        """Each device of the sequence axis sums over its own slots; then the sums are reduced."""
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
        own_slots = keys.shape[2]
        slots = jax.lax.axis_index(axes_of("seq")) * own_slots + jnp.arange(own_slots)
        visible = slots[None, :] < lengths[:, None]
        if window is not None:
            visible = visible & (slots[None, :] > lengths[:, None] - window)
        scores = jnp.einsum("BKGH,BKSH->BKGS", q, keys, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
        newest = jnp.einsum("BKGH,BKH->BKG", q, k, preferred_element_type=jnp.float32) * scale

        largest = jnp.maximum(jax.lax.pmax(jnp.max(scores, axis=-1), axes_of("seq")), newest)
        exps, newest_exp = jnp.exp(scores - largest[..., None]), jnp.exp(newest - largest)
        total = jax.lax.psum(jnp.sum(exps, axis=-1), axes_of("seq")) + newest_exp
        weights, newest_weight = (exps / total[..., None]).astype(q.dtype), (newest_exp / total).astype(q.dtype)
        out = jnp.einsum("BKGS,BKSH->BKGH", weights, values, preferred_element_type=jnp.float32)
        out = jax.lax.psum(out, axes_of("seq")) + newest_weight[..., None] * v[:, :, None, :].astype(jnp.float32)
        return out.astype(q.dtype)[:, None], (jnp.log(total) + largest)[:, None] if with_lse else None

    return on_device(q, k, v, *past)
