"""`llamajax.kernels.block` by the kernels of `llamajax.kernels.pallas`, for tokens that follow one another in their row."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from llamajax.kernels.block import Gradients, Part, Place
from llamajax.kernels.pallas import attend_part, by_head, by_query, part_gradients, sight
from llamajax.kernels.task import Language
from llamajax.kernels.tiles import Documents, Sight


def attend_block(
    q: Float[Array, "b t K G H"],
    k: Float[Array, "b s K H"],
    v: Float[Array, "b s K H"],
    q_place: Place,
    k_place: Place,
    *,
    window: int | None,
    scale: float,
    interpret: bool,
    language: Language,
) -> Part:
    """See there."""
    seen = _sight(q_place, k_place, q.shape[-1], window)
    how = {"window": window, "scale": scale, "interpret": interpret, "language": language}
    out, lse = attend_part(q, k, v, seen, **how, dtype=jnp.float32)
    return Part(out, by_query(lse, k.shape[2]))


def attend_block_backward(
    q: Float[Array, "b t K G H"],
    k: Float[Array, "b s K H"],
    v: Float[Array, "b s K H"],
    lse: Float32[Array, "b t K G"],
    d_out: Float[Array, "b t K G H"],
    d_lse: Float32[Array, "b t K G"],
    q_place: Place,
    k_place: Place,
    *,
    window: int | None,
    scale: float,
    interpret: bool,
    language: Language,
) -> Gradients:
    """See there."""
    seen = _sight(q_place, k_place, q.shape[-1], window)
    how = {"window": window, "scale": scale, "interpret": interpret, "language": language}
    return Gradients(*part_gradients(q, k, v, by_head(lse), d_out, by_head(d_lse), seen, **how, dtype=jnp.float32))


def _sight(q_place: Place, k_place: Place, head_dim: int, window: int | None) -> Sight:
    documents = None
    if q_place.segment_ids is not None and k_place.segment_ids is not None:
        documents = Documents(q_place.segment_ids, k_place.segment_ids)
    offset = q_place.indices[0, 0] - k_place.indices[0, 0]
    lengths = q_place.indices.shape[1], k_place.indices.shape[1]
    return sight(*lengths, head_dim, offset=offset, window=window, documents=documents)
