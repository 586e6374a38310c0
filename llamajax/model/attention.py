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
from llamajax.sharding import gather, spec


class Rows(NamedTuple):
    """What every layer's attention needs to know of the batch's rows; made once, before the layers."""

    cos: jax.Array
    """fp32 [B, T, H/2]: rotary table."""
    sin: jax.Array
    """fp32 [B, T, H/2]: rotary table."""
    segment_ids: jax.Array | None
    """int32 [B, T]: document of each query; None: every row is one document."""
    kv_segment_ids: jax.Array | None
    """int32 [B, S]: document of each key, whole rows on every device."""


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
        # Queries stay on their part of the sequence; keys and values of the whole row come to them.
        k = jax.reshard(k, spec("batch", None, "kv_heads", "head_dim"))
        v = jax.reshard(v, spec("batch", None, "kv_heads", "head_dim"))
        out = checkpoint_name(attend(q, k, v, rows.segment_ids, rows.kv_segment_ids), "attention")
        return jnp.einsum("BTKGH,KGHD->BTD", out, wo, out_sharding=spec("batch", "seq", None))


# Like a fused kernel, the backward pass recomputes the [T, S] scores from q, k and v instead of keeping them.
@partial(jax.checkpoint, prevent_cse=False)
def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, kv_segment_ids: jax.Array | None
) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v over the keys a query may see; the plain form every kernel must agree with.

    A query sees the keys at its own row index and before that carry its segment id, so at least its own.

    Args:
        q: [B, T, K, G, H] queries, grouped by the kv head they share.
        k: [B, S, K, H] keys, S = T.
        v: [B, S, K, H] values.
        segment_ids: int32 [B, T], or None if every row is one document.
        kv_segment_ids: int32 [B, S], or None as well.

    Returns:
        [B, T, K, G, H] of q's dtype; scores and softmax are fp32.
    """
    T, S, H = q.shape[1], k.shape[1], q.shape[-1]
    query_rows = jax.lax.broadcasted_iota(jnp.int32, (T, 1), 0, out_sharding=spec("seq", None))
    visible = (jnp.arange(S, dtype=jnp.int32)[None, :] <= query_rows)[None]
    if segment_ids is not None and kv_segment_ids is not None:
        visible = visible & (segment_ids[:, :, None] == kv_segment_ids[:, None, :])
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32) * H**-0.5
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v)
