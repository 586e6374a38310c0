"""Matmuls that devices share: split by outputs, with tokens gathered first; or split by inputs, with sums scattered
afterwards.

In the form of a ring (arXiv:2305.06942), a device multiplies its current tokens while it passes them on, or adds to a sum
that passes by, so that the links work while the device computes. It sends as many bytes as the collectives. With a weight in
float8 all three products are in float8, tokens and their gradients travel in float8, and sums travel unrounded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float

from llamajax.config.parallel import TensorForm
from llamajax.parallel.float8 import (
    Factor,
    Float8,
    as_factor,
    as_gradient,
    differentiable,
    moved,
    own_layer,
    own_product,
    product,
    specs,
    values,
)
from llamajax.parallel.stages import is_staged
from llamajax.parallel.tensor import (
    gather_tokens,
    is_shared,
    partial_spec,
    scatter_tokens,
    shared_axes,
    token_dims,
)


def gathered_matmul(
    x: Float[Array, "B T D"], w: Float[Array, "D *N"] | Float8, form: TensorForm, *, frozen: bool = False
) -> Float[Array, "B T *N"]:
    """Computes x w for all tokens of a residual stream x, in x's dtype; w is split along one of its last dims, like the
    result.

    Args:
        x: residual stream, or an array computed from it.
        w: weight in x's dtype, or in float8; gathered (`llamajax.parallel.zero`). With one layer per stage of a pipeline it
            is [p, D, *N].
        form: how the devices get the tokens.
        frozen: whether the weight gets no gradient.
    """
    rings, residual = form == "ring" and is_shared(x), jax.typeof(x).sharding.spec
    if rings or isinstance(w, Float8) or is_staged(_spec(w)):
        return _gathered(rings, residual, x, *differentiable(w, frozen=frozen))
    return jnp.einsum("BTD,D...->BT...", gather_tokens(x), w)


def tokenwise_matmul(x: Float[Array, "B T D"], w: Float[Array, "*D N"], *, rows: bool = False) -> Float[Array, "B T N"]:
    """Computes x w, or x w^T if `rows`, each device for its own tokens, in x's dtype.

    Args:
        x: residual stream, or an array computed from it.
        w: weight in x's dtype that every device has whole; with one layer per stage of a pipeline [p, D, N].
        rows: whether w is multiplied from its last dim.
    """
    if jax.sharding.get_abstract_mesh().size > 1:
        # Devices that share a matmul have different tokens here, so the weight's gradient is summed over them too.
        lies = _spec(w)
        w = jax.reshard(w, P(*lies.partitions, reduced=lies.reduced.union(shared_axes(_spec(x)))))
    if is_staged(_spec(w)):
        return _tokenwise(rows, x, w)
    return jnp.einsum("BTD,ND->BTN" if rows else "BTD,DN->BTN", x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tokenwise(rows: bool, x: jax.Array, w: jax.Array) -> jax.Array:
    dims = ((2,), (1 if rows else 0,)), ((), ())
    return product(x, w, dims, P(*_spec(x)[:2], None))


def _tokenwise_backward(rows: bool, kept: tuple[jax.Array, jax.Array], d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    d_x: Any = _tokenwise(not rows, d_y, w)
    return d_x, _weight_gradient(d_y, x, w) if rows else _weight_gradient(x, d_y, w)


_tokenwise.defvjp(lambda rows, x, w: (_tokenwise(rows, x, w), (x, w)), _tokenwise_backward)


class Made(NamedTuple):
    """Functions that compute a factor from another array; the backward pass keeps the other array and recomputes the
    factor."""

    of: Callable[[Array], Array]
    with_gradient: Callable[[Array, Array], tuple[Array, Array]]
    """From the other array and the factor's gradient to the factor and the other array's gradient."""


def scattered_matmul(
    y: Float[Array, "B T *N"],
    w: Float[Array, "D *N"] | Float8,
    residual: P,
    form: TensorForm,
    *,
    made: Made | None = None,
    frozen: bool = False,
) -> Float[Array, "B T D"]:
    """Computes y w^T, summed over the devices that share it, for a residual stream with the sharding `residual`; in y's
    dtype.

    Args:
        y: split along one of its last dims.
        w: as for `gathered_matmul`.
        residual: sharding of the result.
        form: how the devices get the sums.
        made: computes the factor from y.
        frozen: as for `gathered_matmul`.
    """
    rings = form == "ring" and _size(shared_axes(residual)) > 1
    if made is not None and (rings or isinstance(w, Float8)):
        # Computed separately: XLA's kernels read the parts that a ring brings in place, and round their own results to eight
        # bits.
        y, made = made.of(y), None
    if rings or made is not None or isinstance(w, Float8) or is_staged(_spec(w)):
        return _scattered(rings, residual, made, y, *differentiable(w, frozen=frozen))
    outputs = "NMO"[: w.ndim - 1]
    parts = jnp.einsum(f"BT{outputs},D{outputs}->BTD", y, w, out_sharding=partial_spec(residual))
    return scatter_tokens(parts, residual)


_OVER_TOKENS = ((0, 1), (0, 1)), ((), ())


def _over_embed(x: Factor) -> Any:
    return ((x.ndim - 1,), (0,)), ((), ())


def _over_outputs(y: Factor) -> Any:
    return ((tuple(range(2, y.ndim)), tuple(range(1, y.ndim - 1))), ((), ()))


def _size(axes: tuple[str, ...]) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return max((sizes[axis] for axis in axes), default=1)


# `w` is the factor and has no gradient; `stand_in` receives the weight's gradient.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(rings: bool, residual: P, x: jax.Array, w: Factor, stand_in: jax.Array | None) -> jax.Array:
    return _gather(rings, as_factor(x, w), w)[0]


def _gathered_forward(rings: bool, residual: P, x: jax.Array, w: Factor, stand_in: Any) -> tuple[jax.Array, Any]:
    y, whole = _gather(rings, as_factor(x, w), w)
    return y, (None if stand_in is None else whole, w)


def _gathered_backward(rings: bool, residual: P, kept: Any, d_y: jax.Array) -> tuple[jax.Array, None, jax.Array | None]:
    whole, w = kept
    factor = as_gradient(d_y, w)
    return _scatter(rings, residual, factor, w), None, None if whole is None else _weight_gradient(whole, factor, w)


_gathered.defvjp(_gathered_forward, _gathered_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scattered(
    rings: bool, residual: P, made: Made | None, y: jax.Array, w: Factor, stand_in: jax.Array | None
) -> jax.Array:
    return _scattered_forward(rings, residual, made, y, w, stand_in)[0]


def _scattered_forward(
    rings: bool, residual: P, made: Made | None, y: jax.Array, w: Factor, stand_in: Any
) -> tuple[jax.Array, Any]:
    factor = as_factor(y if made is None else made.of(y), w)
    kept = y if made is not None else None if stand_in is None else factor
    return _scatter(rings, residual, factor, w), (kept, w, None if stand_in is None else w)


def _scattered_backward(
    rings: bool, residual: P, made: Made | None, kept: Any, d_x: jax.Array
) -> tuple[jax.Array, None, jax.Array | None]:
    y, w, trained = kept
    d_y, whole = _gather(rings, as_gradient(d_x, w), w)
    if made is not None:
        y, d_y = made.with_gradient(y, d_y)
    return d_y, None, None if trained is None else _weight_gradient(whole, y, trained)


_scattered.defvjp(_scattered_forward, _scattered_backward)


def _gather(rings: bool, x: Factor, w: Factor) -> tuple[jax.Array, Factor]:
    """Computes x w for all tokens, [B, T, *N], and gathers all of x, [B, T, D]."""
    x_spec, staged = _spec(x), is_staged(_spec(w))
    outputs = _spec(w).partitions[1 + staged :]
    tokens, dim = token_dims(x_spec), x_spec[2]
    if not rings:
        whole = moved(gather_tokens, x)
        return product(whole, w, _over_embed(x), P(*tokens, *outputs)), whole
    (axis,) = shared_axes(x_spec)

    # jax cannot infer that `whole` is the same on all devices in the end.
    @partial(
        jax.shard_map,
        in_specs=(specs(x), specs(w)),
        out_specs=(P(*tokens, *outputs), P(*tokens, dim)),
        check_vma=False,
    )
    def on_device(x: Factor, w: Factor) -> tuple[jax.Array, jax.Array]:
        n, own = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
        w = own_layer(w) if staged else w
        B, length, D = x.shape
        whole = jnp.zeros((B, n * length, D), values(x).dtype)
        y = jnp.zeros((B, n * length, *w.shape[1:]), x.dtype)
        for step in range(n):
            start = (own - step) % n * length
            part, passed = own_product(x, w, _over_embed(x)), x
            if step < n - 1:
                # Otherwise the scheduler would pass everything on before it multiplies anything.
                part, passed = jax.lax.optimization_barrier((part, moved(partial(_pass_on, axis=axis), x)))
            y = jax.lax.dynamic_update_slice_in_dim(y, part, start, axis=1)
            whole = jax.lax.dynamic_update_slice_in_dim(whole, values(x), start, axis=1)
            x = passed
        return y, whole

    y, whole = on_device(x, w)
    return y, moved(lambda _: whole, x)


def _scatter(rings: bool, residual: P, y: Factor, w: Factor) -> Float[Array, "B T D"]:
    """Computes y w^T, summed over the devices that share it; each device keeps its own tokens."""
    if not rings:
        return scatter_tokens(product(y, w, _over_outputs(y), partial_spec(residual)), residual)
    (axis,), staged = shared_axes(residual), is_staged(_spec(w))

    @partial(jax.shard_map, in_specs=(specs(y), specs(w)), out_specs=residual)
    def on_device(y: Factor, w: Factor) -> jax.Array:
        w = own_layer(w) if staged else w
        n, own = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
        length = y.shape[1] // n

        def part(y: Factor, step: int) -> jax.Array:
            start = (own - 1 - step) % n * length
            own_tokens = moved(lambda y: jax.lax.dynamic_slice_in_dim(y, start, length, axis=1), y)
            return own_product(own_tokens, w, _over_outputs(y))

        total = part(y, 0)
        for step in range(1, n):
            # Otherwise the scheduler would multiply everything before it passes anything on.
            total, y = jax.lax.optimization_barrier((total, y))
            total = _pass_on(total, axis) + part(y, step)
        return total

    return on_device(y, w)


def _weight_gradient(x: Factor, y: Factor, w: Factor) -> Float[Array, "D *N"]:
    """Computes x^T y; the sum over devices with other tokens is left open, as w's type requires."""
    sharding = _spec(w)
    return product(x, y, _OVER_TOKENS, P(*sharding.partitions, unreduced=sharding.reduced))


def _pass_on(x: jax.Array, axis: str) -> jax.Array:
    n = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(device, (device + 1) % n) for device in range(n)])


def _spec(x: Factor) -> P:
    return jax.typeof(values(x)).sharding.spec
