"""Sequence parallelism (arXiv:2205.05198): between matmuls that devices share by their outputs or inputs, each device has
only its part of the tokens, so that work on a token there is done once and its results are kept once."""

from typing import Any

import jax
from jax import P
from jaxtyping import Array, Float

from llamajax.config.parallel import axes_of, splits_residual

SHARED = tuple(axis for axis in axes_of("residual_seq") if axis not in axes_of("seq"))
"""Mesh axes with the same tokens on all their devices in a matmul."""


def residual_spec(shape: tuple[int, ...], spec: P) -> P:
    """Returns the sharding of the residual stream of tokens [B, T] with this spec: T is split over `residual_seq` where
    possible, if it is split over `seq`; otherwise it is unchanged."""
    batch, seq = spec
    further = seq is not None and splits_residual(shape[1], jax.sharding.get_abstract_mesh().shape)
    return P(batch, axes_of("residual_seq") if further else seq, None)


def shared_axes(spec: P) -> tuple[str, ...]:
    """Returns the axes that split the tokens of a residual stream with this spec, but not in a matmul."""
    return tuple(axis for axis in SHARED if axis in (spec[1] if isinstance(spec[1], tuple) else ()))


def is_shared(x: Float[Array, "B T D"]) -> bool:
    """Returns whether several devices have the same tokens of this residual stream in a matmul, and different ones here."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return any(sizes[axis] > 1 for axis in shared_axes(jax.typeof(x).sharding.spec))


def gather_tokens(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Gathers the residual stream, or an array computed from it, before a matmul: T is split over `seq` at most.

    The result is marked as reduced over the axes of the devices that share the matmul: each device has only a part of the
    gradient, and the parts are scattered back.
    """
    return jax.reshard(x, P(*_matmul_dims(jax.typeof(x).sharding.spec), reduced=frozenset(SHARED)))


def partial_spec(residual: P) -> P:
    """Returns the spec of a matmul's output [B, T, D] with one summand per device, for `scatter_tokens`."""
    return P(*_matmul_dims(residual), unreduced=frozenset(SHARED))


def scatter_tokens(x: Float[Array, "B T D"], residual: P) -> Float[Array, "B T D"]:
    """Sums the parts into the sharding of the residual stream."""
    return jax.reshard(x, residual)


def token_dims(spec: P) -> tuple[Any, Any]:
    """Returns the partitions of B and T in a matmul of tokens that have this spec before or after it."""
    batch, tokens, *_ = spec
    return batch, axes_of("seq") if shared_axes(spec) else tokens


def _matmul_dims(residual: P) -> tuple[Any, ...]:
    return *token_dims(residual), residual[2]
