"""Grouped-query self-attention (arXiv:2305.13245): causal, and closed between the documents of a packed row."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from llamajax.config import ModelConfig
from llamajax.model.layers import normal, residual_std
from llamajax.model.rope import apply_rope
from llamajax.sharding import TABLE, gather, spec

MAX_CHUNK_SCORES = 2**28
"""Scores alive on a device at once: 1 GiB of fp32."""


class Rows(NamedTuple):
    """What every layer's attention needs to know of the batch's rows; made once, before the layers."""

    cos: jax.Array
    """fp32 [B, T, H/2]: rotary table."""
    sin: jax.Array
    """fp32 [B, T, H/2]: rotary table."""
    segment_ids: jax.Array | None
    """int32 [B, T]: document of each token; None: every row is one document."""


class Attention(nnx.Module):
    """Fused q/k/v projection, rotary positions, attention, output projection.

    `wqkv` is [D, K, G + 2, H]: for each of the K kv heads its G query heads, then its key, then its value, so that
    splitting kv heads over devices keeps a group together. `wo` is [K, G, H, D]. Query head n is k * G + g.
    """

    def __init__(self, config: ModelConfig, key: jax.Array):
        D, K, H, dtype = config.embed_dim, config.num_kv_heads, config.head_dim, config.param_dtype
        G = config.num_heads // K
        qkv_key, o_key = jax.random.split(key)
        self.wqkv = normal(qkv_key, (D, K, G + 2, H), ("embed", "kv_heads", None, "head_dim"), config.init_std, dtype)
        self.wo = normal(o_key, (K, G, H, D), ("kv_heads", None, "head_dim", "embed"), residual_std(config), dtype)

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        """[B, T, D] -> [B, T, D] of x's dtype."""
        wqkv = gather(self.wqkv[...], None, "kv_heads", None, "head_dim", dtype=x.dtype)
        wo = gather(self.wo[...], "kv_heads", None, "head_dim", None, dtype=x.dtype)
        qkv = checkpoint_name(jnp.einsum("BTD,DKCH->BTKCH", x, wqkv), "qkv")
        qk = apply_rope(qkv[:, :, :, :-1], rows.cos, rows.sin)
        q, k, v = qk[:, :, :, :-1], qk[:, :, :, -1], qkv[:, :, :, -1]
        out = checkpoint_name(attend(q, k, v, rows.segment_ids), "attention")
        return jnp.einsum("BTKGH,KGHD->BTD", out, wo, out_sharding=spec("batch", "seq", None))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v over the keys a query may see; the plain form every kernel must agree with.

    A query sees the keys at its own row index and before that carry its segment id, so at least its own. Queries stay
    on their part of the sequence; the keys and values of the whole row come to them.

    Args:
        q: [B, T, K, G, H] queries by the kv head they share, sharded ("batch", "seq", "kv_heads", None, "head_dim").
        k: [B, T, K, H] keys, sharded ("batch", "seq", "kv_heads", "head_dim").
        v: [B, T, K, H] values, likewise.
        segment_ids: int32 [B, T], sharded ("batch", "seq"); None if every row is one document.

    Returns:
        [B, T, K, G, H] of q's dtype and sharding; scores and softmax are fp32.
    """
    q_spec, kv_spec = spec("batch", "seq", "kv_heads", None, "head_dim"), spec("batch", "seq", "kv_heads", "head_dim")
    return jax.shard_map(_attend_on_device, in_specs=(q_spec, kv_spec, kv_spec, spec("batch", "seq")), out_specs=q_spec)(
        q, k, v, segment_ids
    )


def _attend_on_device(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """One device's part of `attend`: q [b, t, k, G, H], k and v [b, t, k, H], segment_ids [b, t]."""

    def whole_rows(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, TABLE.seq, axis=1, tiled=True)

    # Widened behind the collective and narrowed in every chunk, so that the chunks' gradients add up in fp32.
    wide_k, wide_v = whole_rows(k).astype(jnp.float32), whole_rows(v).astype(jnp.float32)
    kv_segment_ids = None if segment_ids is None else whole_rows(segment_ids)
    (b, t, K, G, H), S = q.shape, wide_k.shape[1]
    rows = jnp.broadcast_to(jax.lax.axis_index(TABLE.seq) * t + jnp.arange(t), (b, t))

    # Like a fused kernel, the backward pass recomputes the scores from q, k and v instead of keeping them.
    @partial(jax.checkpoint, prevent_cse=False)
    def attend_chunk(chunk: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        q, rows, segment_ids = chunk
        visible = jnp.arange(S)[None, None, :] <= rows[:, :, None]
        if segment_ids is not None and kv_segment_ids is not None:
            visible = visible & (segment_ids[:, :, None] == kv_segment_ids[:, None, :])
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, wide_k.astype(q.dtype), preferred_element_type=jnp.float32) * H**-0.5
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
