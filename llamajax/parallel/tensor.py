"""Sequence parallelism (arXiv:2205.05198): between matmuls that devices share by their outputs or inputs, each device has
its part of the tokens only, so that what is done to a token there is done once and kept once."""

from typing import Any

import jax
from jax import P
from jaxtyping import Array, Float

from llamajax.config.parallel import axes_of, splits_residual

SHARED = tuple(axis for axis in axes_of("residual_seq") if axis not in axes_of("seq"))
"""Mesh axes whose devices have the same tokens in a matmul."""


def residual_spec(shape: tuple[int, ...], spec: P) -> P:
    """How the residual stream of tokens [B, T] with this spec lies: T split over `residual_seq` where that can be, if it is
    split over `seq`; else as it was."""
    batch, seq = spec
    further = seq is not None and splits_residual(shape[1], jax.sharding.get_abstract_mesh().shape)
    return P(batch, axes_of("residual_seq") if further else seq, None)


def shared_axes(spec: P) -> tuple[str, ...]:
    """The axes that split the tokens of a residual stream with this spec, and do not in a matmul."""
    return tuple(axis for axis in SHARED if axis in (spec[1] if isinstance(spec[1], tuple) else ()))


def is_shared(x: Float[Array, "B T D"]) -> bool:
    """Whether several devices have the same tokens of this residual stream in a matmul, and different ones here."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return any(sizes[axis] > 1 for axis in shared_axes(jax.typeof(x).sharding.spec))


def gather_tokens(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The residual stream, or what was made of it, before a matmul: T split over `seq` at most.

    Marked as reduced over the axes whose devices share the matmul: each has only a part of the gradient, and these are
    scattered back.
    """
    return jax.reshard(x, P(*_matmul_dims(jax.typeof(x).sharding.spec), reduced=frozenset(SHARED)))


def partial_spec(residual: P) -> P:
    """Of a matmul's output [B, T, D] that is a sum over devices, each of which has a part, for `scatter_tokens`."""
    return P(*_matmul_dims(residual), unreduced=frozenset(SHARED))


def scatter_tokens(x: Float[Array, "B T D"], residual: P) -> Float[Array, "B T D"]:
    """The sum of the parts, as the residual stream lies."""
    return jax.reshard(x, residual)


def token_dims(spec: P) -> tuple[Any, Any]:
    """How B and T are split in a matmul of tokens that lie as `spec` says before it or behind."""
    batch, tokens, *_ = spec
    return batch, axes_of("seq") if shared_axes(spec) else tokens


def _matmul_dims(residual: P) -> tuple[Any, ...]:
    return *token_dims(residual), residual[2]
