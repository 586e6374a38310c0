"""Plain attention: the reference for `llamajax.kernels.attention.attend`; every other kernel is tested against it."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.parallel import axes_of
from llamajax.kernels.tiles import Sight
from llamajax.parallel.sharding import spec

MAX_CHUNK_SCORES = 2**28
"""Limit of the scores that a device holds at once: 1 GiB of fp32."""

Queries = Float[Array, "B T K G H"]
"""Queries grouped by the kv head that they share, sharded ("batch", "seq", "kv_heads", None, "head_dim")."""
Keys = Float[Array, "B T K H"]
"""Keys or values of the same tokens, sharded ("batch", "seq", "kv_heads", "head_dim")."""
LogSumExp = Float32[Array, "B T K G"]
"""Logarithm of the sum of the exponentials of each query's scores."""


@partial(jax.tree_util.register_dataclass, data_fields=["segment_ids", "sight", "starts"], meta_fields=["window"])
@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query sees: the key at its own row index, and the earlier keys that all fields allow."""

    window: int | None = None
    """Number of newest keys that are visible, the query's own included; None: all."""
    segment_ids: Int32[Array, "B T"] | None = None
    """Document of each token, sharded ("batch", "seq"): a query sees keys with its own id. None: every row is one
    document."""
    sight: Sight | None = None
    """The same for a kernel that skips unseen scores; None: the kernel computes it."""
    starts: Int32[Array, "B T"] | None = None
    """The same for a kernel that needs the index at which each token's document begins in its whole row, sharded ("batch",
    None); None: the kernel computes it."""


def attend(
    q: Queries, k: Keys, v: Keys, mask: Mask, scale: float, *, with_lse: bool = False
) -> tuple[Queries, LogSumExp | None]:
    """Same contract as `attention.attend`. Queries stay on their part of the sequence; the keys and values of the whole row
    are gathered."""
    q_spec, kv_spec = spec("batch", "seq", "kv_heads", None, "head_dim"), spec("batch", "seq", "kv_heads", "head_dim")
    out_specs = q_spec, spec("batch", "seq", "kv_heads", None)

    @partial(jax.shard_map, in_specs=(q_spec, kv_spec, kv_spec, spec("batch", "seq")), out_specs=out_specs)
    def on_device(
        q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        k, v, kv_segment_ids = jax.tree.map(whole_rows, (k, v, segment_ids))
        first = jax.lax.axis_index(axes_of("seq")) * q.shape[1]
        own_mask = Mask(window=mask.window, segment_ids=segment_ids)
        return attend_to_rows(q, k, v, own_mask, scale, first=first, kv_segment_ids=kv_segment_ids, with_lse=with_lse)

    return on_device(q, k, v, mask.segment_ids)


def whole_rows(x: jax.Array) -> jax.Array:
    """On one device, within `shard_map`: gathers [b, T, ...] from the [b, t, ...] of each device of the sequence axis."""
    return jax.lax.all_gather(x, axes_of("seq"), axis=1, tiled=True)


def attend_to_rows(
    q: Float[Array, "b t K G H"],
    k: Float[Array, "b S K H"],
    v: Float[Array, "b S K H"],
    mask: Mask,
    scale: float,
    *,
    first: int | Int32[Array, ""],
    kv_segment_ids: Int32[Array, "b S"] | None,
    with_lse: bool,
) -> tuple[Float[Array, "b t K G H"], Float32[Array, "b t K G"] | None]:
    """On one device, within `shard_map`: computes `attend` for queries that begin at index `first` of their rows, over whole
    rows.

    The mask has the queries' segments, and `kv_segment_ids` are the keys' segments; give both or neither.
    """
    # Widened after all collectives and narrowed in every chunk, so that the chunks' gradients add up in fp32.
    wide_k, wide_v = k.astype(jnp.float32), v.astype(jnp.float32)
    (b, t, K, G, _), S = q.shape, k.shape[1]
    rows = jnp.broadcast_to(first + jnp.arange(t), (b, t))

    # Like a fused kernel, the backward pass recomputes the scores from q, k and v instead of keeping them.
    @partial(jax.checkpoint, prevent_cse=False)
    def attend_chunk(chunk: tuple[jax.Array, jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        # Tied to the queries: alone, masks are the same for all layers, and XLA would compute them once and keep them whole.
        q, rows, segment_ids = jax.lax.optimization_barrier(chunk)
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

    whole = q, rows, mask.segment_ids
    parts = num_chunks(b * K * G * S, t)
    if parts == 1:
        return attend_chunk(whole)
    return jax.tree.map(join, jax.lax.map(attend_chunk, jax.tree.map(partial(split, parts=parts), whole)))


def num_chunks(scores_per_query: int, num_queries: int) -> int:
    """Returns the fewest equal chunks of queries with at most `MAX_CHUNK_SCORES` scores each; at most one chunk per
    query."""
    return next(
        n
        for n in range(1, num_queries + 1)
        if num_queries % n == 0 and (scores_per_query * (num_queries // n) <= MAX_CHUNK_SCORES or n == num_queries)
    )


def split(x: jax.Array, parts: int) -> jax.Array:
    """Splits [b, t, ...] into [parts, b, t / parts, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], parts, x.shape[1] // parts, *x.shape[2:]), 1, 0)


def join(x: jax.Array) -> jax.Array:
    """Inverse of `split`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2], *x.shape[3:])
