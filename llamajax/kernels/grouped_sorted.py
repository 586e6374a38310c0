"""The products of `llamajax.kernels.grouped` by kernels that need the rows of an expert one after the other. Rows are copied
into that order, and results back.

The plain product takes tiles of an expert's rows one after the other, which suits a CPU. `jax.lax.ragged_dot_general` would
multiply all tokens by all experts there, as on a GPU. tokamax's is written for Hopper.

All functions run on one device, within `shard_map`.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from llamajax.kernels.grouped_gated import Gradients, activated
from llamajax.kernels.grouped_pallas import Named
from llamajax.parallel.dispatch import Groups
from llamajax.parallel.float8 import Factor, Float8, moved

Kernel = Literal["plain", "tokamax"]
_TILE = 64
"""Rows that the plain product takes at once. More of them waste more of each expert's last tile, fewer read matrices more
often."""
_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
_OVER_INPUTS, _OVER_OUTPUTS = (
    jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (dim,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    for dim in (1, 2)
)


def times(
    kernel: Kernel,
    x: Float[Array, "R K"] | Float8,
    w: Float[Array, "E _ _"] | Float8,
    groups: Groups,
    named: Named,
    *,
    transposed: bool = False,
) -> Float[Array, "S N"]:
    """Returns the products of rows with their expert's matrix; see `grouped_pallas.times`. Rows of no expert are zeros."""
    own = _in_order(x, groups) if named == "x" else x
    y = _product(kernel, own, w, groups, _OVER_OUTPUTS if transposed else _OVER_INPUTS)
    if kernel == "tokamax":
        # It leaves rows of no expert unwritten, and where it sums over rows it multiplies these by zero, which NaN survives.
        y = jnp.where(jnp.arange(len(y))[:, None] < jnp.sum(groups.sizes), y, 0)
    return jnp.where(groups.is_row[:, None], y[groups.place], 0) if named == "out" else y


def hidden_layer(
    kernel: Kernel, x: Float[Array, "R I"] | Float8, w: Float[Array, "E I AF"] | Float8, weights: Float32[Array, "R"],
    groups: Groups, *, gates: int,
) -> tuple[Float[Array, "M AF"], Float[Array, "M F"]]:  # fmt: skip
    """Returns gates and inputs of the rows' hidden layers, and these layers; see `grouped_gated.hidden_layer`."""
    h = times(kernel, x, w, groups, "x")
    return h, activated(weights[groups.order], *_parts(h, gates)).astype(h.dtype)


def hidden_gradients(
    kernel: Kernel, dy: Float[Array, "R I"] | Float8, w: Float[Array, "E F I"] | Float8, h: Float[Array, "M AF"],
    weights: Float32[Array, "R"], groups: Groups,
) -> Gradients:  # fmt: skip
    """Returns the gradients of `hidden_layer`; see `grouped_gated.hidden_gradients`."""
    d_hidden = times(kernel, dy, w, groups, "x", transposed=True)
    hidden, pull_back = jax.vjp(activated, weights[groups.order], *_parts(h, h.shape[1] // w.shape[1]))
    d_weights, *d_h = pull_back(d_hidden.astype(jnp.float32))
    return Gradients(jnp.concatenate(d_h, axis=1).astype(h.dtype), hidden.astype(h.dtype), d_weights)


def _parts(h: Float[Array, "M AF"], gates: int) -> list[Float32[Array, "M F"]]:
    return jnp.split(h.astype(jnp.float32), gates, axis=1)


def weight_gradients(
    kernel: Kernel, x: Float[Array, "R K"] | Float8, dy: Float[Array, "S N"] | Float8, groups: Groups, named: Named
) -> Float[Array, "E K N"]:
    """Returns x^T dy of each expert's rows; see `grouped_pallas.weight_gradients`."""
    x, dy = (_in_order(x, groups), dy) if named == "x" else (x, _in_order(dy, groups))
    return _product(kernel, x, dy, groups, _OVER_ROWS)


def _in_order(x: Factor, groups: Groups) -> Factor:
    return moved(lambda rows: rows[groups.order], x)


def _product(kernel: Kernel, x: Factor, y: Factor, groups: Groups, dims: jax.lax.RaggedDotDimensionNumbers) -> jax.Array:
    if isinstance(x, Float8) and isinstance(y, Float8):
        # `dtype` holds every number of the formats.
        exact = _product(kernel, x.values.astype(x.dtype), y.values.astype(x.dtype), groups, dims)
        return exact * (x.scale.reshape(()) * y.scale.reshape(())).astype(x.dtype)
    assert isinstance(x, jax.Array), "both are in float8, or neither"
    assert isinstance(y, jax.Array), "both are in float8, or neither"
    if kernel == "tokamax":
        from tokamax import config, ragged_dot_general  # pyright: ignore[reportMissingImports]  # an extra

        with config.ignore_autotuning_cache(True):  # see `tokamax_kernel`
            made: Any = ragged_dot_general(x, y, groups.sizes, dims, preferred_element_type=x.dtype, implementation="mosaic")
        # tokamax's calls do not say over which axes their results vary.
        return _varying_like(x, made)
    if dims is _OVER_ROWS:
        return _tiled_gradients(x, y, groups)
    return _tiled_products(x, y.mT if dims is _OVER_OUTPUTS else y, groups)


def _varying_like(x: jax.Array, made: jax.Array) -> jax.Array:
    return jax.lax.pcast(made, tuple(jax.typeof(x).manual_axis_type.varying), to="varying")


def _tiled_products(x: Float[Array, "M K"], w: Float[Array, "E K N"], groups: Groups) -> Float[Array, "M N"]:
    num_tiles, tile = _tiles(groups)
    rows = jnp.pad(x, ((0, _TILE), (0, 0)))

    def multiply(number: jax.Array, y: jax.Array) -> jax.Array:
        expert, start, is_own = tile(number)
        of_expert = jax.lax.dynamic_index_in_dim(w, expert, keepdims=False)
        product = jax.lax.dynamic_slice_in_dim(rows, start, _TILE) @ of_expert
        # Rows beyond the expert's are those of tiles to come, or of none.
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(is_own, product, 0), start, axis=0)

    y = _varying_like(x, jnp.zeros((len(rows), w.shape[2]), x.dtype))
    return jax.lax.fori_loop(0, num_tiles, multiply, y)[: len(x)]


def _tiled_gradients(x: Float[Array, "M K"], dy: Float[Array, "M N"], groups: Groups) -> Float[Array, "E K N"]:
    num_tiles, tile = _tiles(groups)
    x, dy = (jnp.pad(rows, ((0, _TILE), (0, 0))) for rows in (x, dy))

    def add(number: jax.Array, sums: jax.Array) -> jax.Array:
        expert, start, is_own = tile(number)
        own, d = (jnp.where(is_own, jax.lax.dynamic_slice_in_dim(rows, start, _TILE), 0) for rows in (x, dy))
        product = jnp.dot(own.T, d, preferred_element_type=jnp.float32)
        total = jax.lax.dynamic_index_in_dim(sums, expert, keepdims=False) + product
        return jax.lax.dynamic_update_index_in_dim(sums, total, expert, axis=0)

    sums = jnp.zeros((len(groups.sizes), x.shape[1], dy.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, num_tiles, add, _varying_like(x, sums)).astype(x.dtype)


def _tiles(groups: Groups) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]]:
    """Returns the number of tiles, and a function from the number of one to its expert, its first row, and for each of its
    rows [tile, 1] whether it is the expert's."""
    counts = -(-groups.sizes // _TILE)
    until = jnp.cumsum(counts)
    first = jnp.cumsum(groups.sizes) - groups.sizes

    def tile(number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        expert = jnp.sum(number >= until, dtype=jnp.int32)
        before = (number - until[expert] + counts[expert]) * _TILE
        return expert, first[expert] + before, jnp.arange(_TILE)[:, None] < groups.sizes[expert] - before

    return until[-1], tile
