"""Attention of some queries to a block of keys, as a part of attention to more keys. The log-sum-exp merges parts into a
whole, and the backward pass of a part is the whole's backward pass restricted to its keys (FlashAttention, arXiv:2205.14135,
appendix B).

Everything here runs on one device, within `shard_map`. Like a fused kernel, it keeps no scores from forward to backward.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from llamajax.kernels.pallas import attend_part, by_head, by_query, part_gradients, sight
from llamajax.kernels.plain import join, num_chunks, split
from llamajax.kernels.task import Language
from llamajax.kernels.tiles import Documents, Sight


class How(NamedTuple):
    """Static arguments of attention to a block."""

    window: int | None
    scale: float
    interpret: bool
    language: Language | None
    """Language of the kernel in `llamajax.kernels.pallas`, which skips scores that no query sees and needs tokens that are
    consecutive in their row. None: compute without that kernel."""


class Place(NamedTuple):
    """Positions and documents of tokens."""

    indices: Int32[Array, "b t"]
    """Index of each token in its row."""
    segment_ids: Int32[Array, "b t"] | None
    """Document of each token; None: every row is one document."""


class Part(NamedTuple):
    """Attention to a part of the keys."""

    out: Float32[Array, "b t K G H"]
    """Mean of the values, weighted by the exponentials of the scores; where no key is seen, zero."""
    lse: Float32[Array, "b t K G"]
    """Logarithm of the sum of the exponentials; where no key is seen, -inf."""


class Gradients(NamedTuple):
    """Contributions of a part to the gradients."""

    q: Float32[Array, "b t K G H"]
    k: Float32[Array, "b s K H"]
    v: Float32[Array, "b s K H"]


def merge(part: Part, other: Part) -> Part:
    """Returns attention to the keys of both parts; every query must see a key of the first."""
    lse = jnp.logaddexp(part.lse, other.lse)
    share, other_share = (jnp.exp(one.lse - lse)[..., None] for one in (part, other))
    return Part(share * part.out + other_share * other.out, lse)


def attend_block(
    q: Float[Array, "b t K G H"],
    k: Float[Array, "b s K H"],
    v: Float[Array, "b s K H"],
    q_place: Place,
    k_place: Place,
    how: How,
) -> Part:
    """Returns softmax(scale * q k^T) v over the keys that a query sees, see `llamajax.kernels.plain.Mask`.

    Scores, softmax and results are fp32.
    """
    if how.language is not None:
        seen = _sight(q_place, k_place, q.shape[-1], how.window)
        out, lse = attend_part(q, k, v, seen, **how._asdict(), dtype=jnp.float32)
        return Part(out, by_query(lse, k.shape[2]))

    def attend_chunk(chunk: tuple[jax.Array, Place]) -> Part:
        # Tied to the queries: alone, masks are the same for all layers, and XLA would compute them once and keep them whole.
        q, place = jax.lax.optimization_barrier(chunk)
        scores = _scores(q, k, _visible(place, k_place, how.window), how.scale)
        with jax.named_scope("scores"):
            largest = jnp.maximum(jnp.max(scores, axis=-1), jnp.finfo(jnp.float32).min)  # -inf - -inf is NaN
            exps = jnp.exp(scores - largest[..., None])
            total = jnp.sum(exps, axis=-1)
        out = jnp.einsum("BKGTS,BSKH->BTKGH", exps.astype(q.dtype), v, preferred_element_type=jnp.float32)
        return Part(out / _by_query(jnp.maximum(total, 1.0))[..., None], _by_query(jnp.log(total) + largest))

    parts = _num_chunks(q, k)
    if parts == 1:
        return attend_chunk((q, q_place))
    return jax.tree.map(join, jax.lax.map(attend_chunk, jax.tree.map(partial(split, parts=parts), (q, q_place))))


def attend_block_backward(
    q: Float[Array, "b t K G H"],
    k: Float[Array, "b s K H"],
    v: Float[Array, "b s K H"],
    lse: Float32[Array, "b t K G"],
    d_out: Float[Array, "b t K G H"],
    d_lse: Float32[Array, "b t K G"],
    q_place: Place,
    k_place: Place,
    how: How,
) -> Gradients:
    """Returns the block's contribution to the gradients of attention to all keys; scores and sums are fp32.

    Args:
        q: queries of the block.
        k: keys of the block.
        v: values of the block.
        lse: log-sum-exp over all keys that the queries see, in every block.
        d_out: gradient of the whole output, in q's dtype.
        d_lse: gradient of the logarithms of the weights' sums: the gradient of `lse` minus the product of `d_out` and the
            output.
        q_place: positions of the queries.
        k_place: positions of the keys.
        how: same as in the forward pass.
    """
    if how.language is not None:
        seen = _sight(q_place, k_place, q.shape[-1], how.window)
        return Gradients(
            *part_gradients(q, k, v, by_head(lse), d_out, by_head(d_lse), seen, **how._asdict(), dtype=jnp.float32)
        )

    def add_chunk(
        sums: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array, jax.Array, jax.Array, Place]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        q, lse, d_out, d_lse, place = jax.lax.optimization_barrier(chunk)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores = _scores(q, k, _visible(place, k_place, how.window), how.scale)
        with jax.named_scope("scores"):
            weights = jnp.exp(scores - _by_head(lse)[..., None])
            d_weights = product("BTKGH,BSKH->BKGTS", d_out, v)
            d_scores = (how.scale * weights * (d_weights + _by_head(d_lse)[..., None])).astype(q.dtype)
        d_k = product("BKGTS,BTKGH->BSKH", d_scores, q)
        d_v = product("BKGTS,BTKGH->BSKH", weights.astype(q.dtype), d_out)
        return (sums[0] + d_k, sums[1] + d_v), product("BKGTS,BSKH->BTKGH", d_scores, k)

    parts = _num_chunks(q, k)
    zeros = jnp.zeros_like(k, jnp.float32), jnp.zeros_like(v, jnp.float32)
    whole = q, lse, d_out, d_lse, q_place
    if parts == 1:
        (d_k, d_v), d_q = add_chunk(zeros, whole)
    else:
        (d_k, d_v), d_q = jax.lax.scan(add_chunk, zeros, jax.tree.map(partial(split, parts=parts), whole))
        d_q = join(d_q)
    return Gradients(d_q, d_k, d_v)


def _sight(q_place: Place, k_place: Place, head_dim: int, window: int | None) -> Sight:
    documents = None
    if q_place.segment_ids is not None and k_place.segment_ids is not None:
        documents = Documents(q_place.segment_ids, k_place.segment_ids)
    offset = q_place.indices[0, 0] - k_place.indices[0, 0]
    lengths = q_place.indices.shape[1], k_place.indices.shape[1]
    return sight(*lengths, head_dim, offset=offset, window=window, documents=documents)


def _visible(q_place: Place, k_place: Place, window: int | None) -> Bool[Array, "b t s"]:
    distance = q_place.indices[:, :, None] - k_place.indices[:, None, :]
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    if q_place.segment_ids is not None and k_place.segment_ids is not None:
        visible = visible & (q_place.segment_ids[:, :, None] == k_place.segment_ids[:, None, :])
    return visible


def _scores(q: jax.Array, k: jax.Array, visible: jax.Array, scale: float) -> Float32[Array, "b K G t s"]:
    with jax.named_scope("scores"):
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
        return jnp.where(visible[:, None, None], scores * scale, -jnp.inf)


def _num_chunks(q: jax.Array, k: jax.Array) -> int:
    (b, t, K, G, _), s = q.shape, k.shape[1]
    return num_chunks(b * K * G * s, t)


def _by_query(x: Float32[Array, "b K G t"]) -> Float32[Array, "b t K G"]:
    return jnp.moveaxis(x, -1, 1)


def _by_head(x: Float32[Array, "b t K G"]) -> Float32[Array, "b K G t"]:
    return jnp.moveaxis(x, 1, -1)
