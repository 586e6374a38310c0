"""Attention in plain form: the truth behind `llamajax.kernels.attention.attend`, which every kernel must agree with."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.parallel import axes_of
from llamajax.parallel.sharding import spec

MAX_CHUNK_SCORES = 2**28
"""Scores alive on a device at once: 1 GiB of fp32."""

Queries = Float[Array, "B T K G H"]
"""By the kv head they share, sharded ("batch", "seq", "kv_heads", None, "head_dim")."""
Keys = Float[Array, "B T K H"]
"""Of the same tokens; or their values. Sharded ("batch", "seq", "kv_heads", "head_dim")."""
LogSumExp = Float32[Array, "B T K G"]
"""Logarithm of the sum of the exponentials of each query's scores."""


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query sees: that at its own row index, and those before it that all of these leave."""

    window: int | None = None
    """The newest keys, its own included; None: all."""
    segment_ids: Int32[Array, "B T"] | None = None
    """Those with its own id, sharded ("batch", "seq"); None: every row is one document."""


def attend(
    q: Queries, k: Keys, v: Keys, mask: Mask, scale: float, *, with_lse: bool = False
) -> tuple[Queries, LogSumExp | None]:
    """As the door. Queries stay on their part of the sequence; the keys and values of the whole row come to them."""
    q_spec, kv_spec = spec("batch", "seq", "kv_heads", None, "head_dim"), spec("batch", "seq", "kv_heads", "head_dim")
    out_specs = q_spec, spec("batch", "seq", "kv_heads", None)

    @partial(jax.shard_map, in_specs=(q_spec, kv_spec, kv_spec, spec("batch", "seq")), out_specs=out_specs)
    def on_device(
        q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        def whole_rows(x: jax.Array) -> jax.Array:
            return jax.lax.all_gather(x, axes_of("seq"), axis=1, tiled=True)

        # Widened behind the collective and narrowed in every chunk, so that the chunks' gradients add up in fp32.
        wide_k, wide_v = whole_rows(k).astype(jnp.float32), whole_rows(v).astype(jnp.float32)
        kv_segment_ids = None if segment_ids is None else whole_rows(segment_ids)
        (b, t, K, G, _), S = q.shape, wide_k.shape[1]
        rows = jnp.broadcast_to(jax.lax.axis_index(axes_of("seq")) * t + jnp.arange(t), (b, t))

        # Like a fused kernel, the backward pass recomputes the scores from q, k and v instead of keeping them.
        @partial(jax.checkpoint, prevent_cse=False)
        def attend_chunk(chunk: tuple[jax.Array, jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
            q, rows, segment_ids = chunk
            visible = jnp.arange(S)[None, None, :] <= rows[:, :, None]
            if mask.window is not None:
                visible = visible & (jnp.arange(S)[None, None, :] > rows[:, :, None] - mask.window)
            if segment_ids is not None and kv_segment_ids is not None:
                visible = visible & (segment_ids[:, :, None] == kv_segment_ids[:, None, :])
            with jax.named_scope("scores"):
                scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, wide_k.astype(q.dtype), preferred_element_type=jnp.float32)
                scores = jnp.where(visible[:, None, None], scores * scale, jnp.finfo(jnp.float32).min)
                weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
            lse = jnp.moveaxis(jax.nn.logsumexp(scores, axis=-1), -1, 1) if with_lse else None
            return jnp.einsum("BKGTS,BSKH->BTKGH", weights, wide_v.astype(q.dtype)), lse

        num_chunks = next(
            n for n in range(1, t + 1) if t % n == 0 and (b * K * G * (t // n) * S <= MAX_CHUNK_SCORES or n == t)
        )
        if num_chunks == 1:
            return attend_chunk((q, rows, segment_ids))

        def split(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(b, num_chunks, t // num_chunks, *x.shape[2:]), 1, 0)

        def join(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x, 0, 1).reshape(b, t, *x.shape[3:])

        return jax.tree.map(join, jax.lax.map(attend_chunk, jax.tree.map(split, (q, rows, segment_ids))))

    return on_device(q, k, v, mask.segment_ids)
