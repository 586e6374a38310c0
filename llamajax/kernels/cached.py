"""Attention of one new token per row to those that were read before it, for decoding."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.parallel import axes_of
from llamajax.parallel.sharding import spec


class Past(NamedTuple):
    """What one layer keeps of the tokens that each row has read; row b's token at position p lies in slot p."""

    keys: Float[Array, "B K S H"]
    """Sharded ("batch", "kv_heads", "seq", "head_dim")."""
    values: Float[Array, "B K S H"]
    """Likewise."""
    lengths: Int32[Array, "B"]
    """Slots in use, sharded ("batch")."""


def attend(
    q: Float[Array, "B 1 K G H"],
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    past: Past,
    window: int | None,
    scale: float,
    *,
    with_lse: bool = False,
) -> tuple[Float[Array, "B 1 K G H"], Float32[Array, "B 1 K G"] | None]:
    """As `llamajax.kernels.attention.attend`, over each row's past and its newest token, which is not in it yet."""
    q_spec, kv_spec = spec("batch", None, "kv_heads", None, "head_dim"), spec("batch", None, "kv_heads", "head_dim")
    past_spec = spec("batch", "kv_heads", "seq", "head_dim")
    return jax.shard_map(
        partial(_attend_on_device, window=window, scale=scale, with_lse=with_lse),
        in_specs=(q_spec, kv_spec, kv_spec, past_spec, past_spec, spec("batch")),
        out_specs=(q_spec, spec("batch", None, "kv_heads", None)),
    )(q, k, v, *past)


def _attend_on_device(
    q: Float[Array, "b 1 K G H"],
    k: Float[Array, "b 1 K H"],
    v: Float[Array, "b 1 K H"],
    past_keys: Float[Array, "b K s H"],
    past_values: Float[Array, "b K s H"],
    lengths: Int32[Array, "b"],
    *,
    window: int | None,
    scale: float,
    with_lse: bool,
) -> tuple[Float[Array, "b 1 K G H"], Float32[Array, "b 1 K G"] | None]:
    """One device's part of `attend`; every device of the sequence axis sums over its slots, then they meet."""
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    own_slots = past_keys.shape[2]
    slots = jax.lax.axis_index(axes_of("seq")) * own_slots + jnp.arange(own_slots)
    visible = slots[None, :] < lengths[:, None]
    if window is not None:
        visible = visible & (slots[None, :] > lengths[:, None] - window)
    scores = jnp.einsum("BKGH,BKSH->BKGS", q, past_keys, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    newest = jnp.einsum("BKGH,BKH->BKG", q, k, preferred_element_type=jnp.float32) * scale

    largest = jnp.maximum(jax.lax.pmax(jnp.max(scores, axis=-1), axes_of("seq")), newest)
    exps, newest_exp = jnp.exp(scores - largest[..., None]), jnp.exp(newest - largest)
    total = jax.lax.psum(jnp.sum(exps, axis=-1), axes_of("seq")) + newest_exp
    weights, newest_weight = (exps / total[..., None]).astype(q.dtype), (newest_exp / total).astype(q.dtype)
    out = jnp.einsum("BKGS,BKSH->BKGH", weights, past_values, preferred_element_type=jnp.float32)
    out = jax.lax.psum(out, axes_of("seq")) + newest_weight[..., None] * v[:, :, None, :].astype(jnp.float32)
    return out.astype(q.dtype)[:, None], (jnp.log(total) + largest)[:, None] if with_lse else None
