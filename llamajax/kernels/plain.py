"""Attention in plain form: what every kernel must agree with."""

import math
from functools import partial

import jax
import jax.numpy as jnp

from llamajax.config.parallel import axes_of
from llamajax.parallel.sharding import spec

MAX_CHUNK_SCORES = 2**28
"""Scores alive on a device at once: 1 GiB of fp32."""


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, window: int | None = None) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v over the keys a query may see; the plain form every kernel must agree with.

    A query sees the keys at its own row index and before that carry its segment id, so at least its own; with a window
    only those at its index and the `window - 1` before. Queries stay on their part of the sequence; the keys and values
    of the whole row come to them.

    Args:
        q: [B, T, K, G, H] queries by the kv head they share, sharded ("batch", "seq", "kv_heads", None, "head_dim").
        k: [B, T, K, H] keys, sharded ("batch", "seq", "kv_heads", "head_dim").
        v: [B, T, K, H] values, likewise.
        segment_ids: int32 [B, T], sharded ("batch", "seq"); None if every row is one document.
        window: newest keys, its own included, that a query sees; None: all.

    Returns:
        [B, T, K, G, H] of q's dtype and sharding; scores and softmax are fp32.
    """
    q_spec, kv_spec = spec("batch", "seq", "kv_heads", None, "head_dim"), spec("batch", "seq", "kv_heads", "head_dim")
    return jax.shard_map(
        partial(_attend_on_device, window=window),
        in_specs=(q_spec, kv_spec, kv_spec, spec("batch", "seq")),
        out_specs=q_spec,
    )(q, k, v, segment_ids)


def _attend_on_device(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, *, window: int | None
) -> jax.Array:
    """One device's part of `attend`: q [b, t, k, G, H], k and v [b, t, k, H], segment_ids [b, t]."""

    def whole_rows(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, axes_of("seq"), axis=1, tiled=True)

    # Widened behind the collective and narrowed in every chunk, so that the chunks' gradients add up in fp32.
    wide_k, wide_v = whole_rows(k).astype(jnp.float32), whole_rows(v).astype(jnp.float32)
    kv_segment_ids = None if segment_ids is None else whole_rows(segment_ids)
    (b, t, K, G, H), S = q.shape, wide_k.shape[1]
    scale = 1 / math.sqrt(H)
    rows = jnp.broadcast_to(jax.lax.axis_index(axes_of("seq")) * t + jnp.arange(t), (b, t))

    # Like a fused kernel, the backward pass recomputes the scores from q, k and v instead of keeping them.
    @partial(jax.checkpoint, prevent_cse=False)
    def attend_chunk(chunk: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        q, rows, segment_ids = chunk
        visible = jnp.arange(S)[None, None, :] <= rows[:, :, None]
        if window is not None:
            visible = visible & (jnp.arange(S)[None, None, :] > rows[:, :, None] - window)
        if segment_ids is not None and kv_segment_ids is not None:
            visible = visible & (segment_ids[:, :, None] == kv_segment_ids[:, None, :])
        with jax.named_scope("scores"):
            scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, wide_k.astype(q.dtype), preferred_element_type=jnp.float32) * scale
            scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
            weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("BKGTS,BSKH->BTKGH", weights, wide_v.astype(q.dtype))

    num_chunks = next(n for n in range(1, t + 1) if t % n == 0 and (b * K * G * (t // n) * S <= MAX_CHUNK_SCORES or n == t))
    if num_chunks == 1:
        return attend_chunk((q, rows, segment_ids))

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(b, num_chunks, t // num_chunks, *x.shape[2:]), 1, 0)

    out = jax.lax.map(attend_chunk, jax.tree.map(split, (q, rows, segment_ids)))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)
