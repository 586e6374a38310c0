"""The products of `llamajax.kernels.grouped` in Pallas, compiled by Triton for NVIDIA GPUs.

Rows are multiplied in tiles of consecutive places, where they lie expert after expert. A tile is visited once for every
expert that has rows in it, and a visit stores that expert's rows alone. Loads and stores follow `Groups.order`, as in
ScatterMoE (arXiv:2403.08245): rows are read, or written, where they are. The gradient of a matrix is summed by one program
for each of its tiles, over its expert's rows, so sums have one order.

All functions run on one device, within `shard_map`.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int32

from llamajax.parallel.dispatch import Groups

Named = Literal["x", "out", "dy"]
"""The array whose rows lie at `order`; those of the others lie expert after expert."""
_ROWS, _COLUMNS, _INNER = 128, 128, 64
"""Tile of rows and columns that a program computes, and the inner entries that it adds up at a time."""
_WARPS, _STAGES = 8, 3


class Visits(NamedTuple):
    """Tiles that programs compute, V of them."""

    expert: Int32[Array, "V"]
    tile: Int32[Array, "V"]
    bounds: Int32[Array, "E+1"]
    """First place of each expert's rows, and the end of all."""
    count: Int32[Array, "1"]
    """Number of visits; those beyond it compute nothing."""


def visits(sizes: Int32[Array, "E"], num_places: int) -> Visits:
    """Returns the visits for experts with so many rows."""
    E, ends = len(sizes), jnp.cumsum(sizes)
    starts = ends - sizes
    tiles = jnp.where(sizes > 0, (ends - 1) // _ROWS - starts // _ROWS + 1, 0)
    until = jnp.cumsum(tiles)
    number = jnp.arange(pl.cdiv(num_places, _ROWS) + E - 1, dtype=jnp.int32)
    expert = jnp.sum(number[:, None] >= until[None], axis=1, dtype=jnp.int32)
    is_one, expert = expert < E, jnp.minimum(expert, E - 1)
    tile = jnp.where(is_one, starts[expert] // _ROWS + number - (until - tiles)[expert], 0)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends.astype(jnp.int32)])
    return Visits(expert, tile.astype(jnp.int32), bounds, until[-1:].astype(jnp.int32))


def times(
    x: Float[Array, "R K"],
    w: Float[Array, "E _ _"],
    groups: Groups,
    named: Named,
    *,
    transposed: bool = False,
    num_rows: int | None = None,
    interpret: bool = False,
) -> Float[Array, "S N"]:
    """Returns the products of rows with their expert's matrix. Rows of no expert are left unwritten.

    Args:
        x: rows.
        w: matrices; [E, N, K] if transposed.
        groups: rows of each expert.
        named: `x` or `out`.
        transposed: whether rows are multiplied by the transposed matrices.
        num_rows: rows of the result if it is `named`; otherwise there is one for each place.
        interpret: compute with jax, on any device and slowly, instead of compiling with Triton.
    """
    K, N = x.shape[1], w.shape[1 if transposed else 2]
    columns, inner = _divisor(N, _COLUMNS), _divisor(K, _INNER)
    order = padded(groups.order)
    of_visits = visits(groups.sizes, len(order))
    if transposed:
        of_w = pl.BlockSpec((len(w), columns, K), lambda column, _: (0, column, 0))
    else:
        of_w = pl.BlockSpec((len(w), K, columns), lambda column, _: (0, 0, column))
    num_rows = len(order) if num_rows is None else num_rows
    return pl.pallas_call(
        partial(_times, inner=inner, transposed=transposed, named=named, precision=_precision(x)),
        grid=(N // columns, len(of_visits.tile)),
        in_specs=[*[pl.no_block_spec] * 6, of_w],
        out_specs=pl.BlockSpec((num_rows, columns), lambda column, _: (0, column)),
        out_shape=_like((num_rows, N), x, w, *of_visits),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name="grouped_rows",
    )(*of_visits, order, x, w)


def weight_gradients(
    x: Float[Array, "R K"], dy: Float[Array, "S N"], groups: Groups, named: Named, *, interpret: bool = False
) -> Float[Array, "E K N"]:
    """Returns x^T dy of each expert's rows; arguments as for `times`, `named` is `x` or `dy`."""
    (K, N), E = (x.shape[1], dy.shape[1]), len(groups.sizes)
    height, width = _divisor(K, _COLUMNS), _divisor(N, _COLUMNS)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(groups.sizes, dtype=jnp.int32)])
    order = padded(groups.order)
    return pl.pallas_call(
        partial(_weight_gradients, named=named, precision=_precision(x)),
        grid=(N // width, K // height, E),
        in_specs=[
            *[pl.no_block_spec] * 2,
            pl.BlockSpec((len(x), height), lambda column, row, expert: (0, row)),
            pl.BlockSpec((len(dy), width), lambda column, row, expert: (0, column)),
        ],
        out_specs=pl.BlockSpec((None, height, width), lambda column, row, expert: (expert, row, column)),
        out_shape=_like((E, K, N), x, dy, *groups),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name="grouped_weights",
    )(bounds, order, x, dy)


def _times(
    expert: Any,
    tile: Any,
    bounds: Any,
    count: Any,
    order: Any,
    x: Any,
    w: Any,
    out: Any,
    *,
    inner: int,
    transposed: bool,
    named: Named,
    precision: jax.lax.Precision | None,
) -> None:
    visit = pl.program_id(1)

    @pl.when(visit < count[0])
    def _() -> None:
        own, first = expert[visit], tile[visit] * _ROWS
        columns = w.shape[1 if transposed else 2]
        rows = triton.load(order.at[pl.ds(first, _ROWS)])

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            entries = pl.ds(step * inner, inner)
            if named == "x":
                a = triton.load(x.at[rows[:, None], (step * inner + jnp.arange(inner))[None, :]])
            else:
                a = triton.load(x.at[pl.ds(first, _ROWS), entries])
            b = triton.load(w.at[(own, pl.ds(0, columns), entries) if transposed else (own, entries, pl.ds(0, columns))])
            return total + _dot(a, b.T if transposed else b, precision)

        zeros = jnp.zeros((_ROWS, columns), jnp.float32)
        total = jax.lax.fori_loop(0, x.shape[1] // inner, add, zeros).astype(out.dtype)
        place = first + jnp.arange(_ROWS)
        is_own = (place >= bounds[own]) & (place < bounds[own + 1])
        mask = jnp.broadcast_to(is_own[:, None], total.shape)
        if named == "out":
            triton.store(out.at[rows[:, None], jnp.arange(columns)[None, :]], total, mask=mask)
        else:
            triton.store(out.at[pl.ds(first, _ROWS), pl.ds(0, columns)], total, mask=mask)


def _weight_gradients(
    bounds: Any, order: Any, x: Any, dy: Any, out: Any, *, named: Named, precision: jax.lax.Precision | None
) -> None:
    own = pl.program_id(2)
    begin, end = bounds[own], bounds[own + 1]
    height, width = out.shape[-2:]

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        first = step * _INNER
        place = first + jnp.arange(_INNER)
        is_own = ((place >= begin) & (place < end))[:, None]
        rows = triton.load(order.at[pl.ds(first, _INNER)])

        def load(array: Any, name: Named, columns: int) -> jax.Array:
            if named == name:
                at = array.at[rows[:, None], jnp.arange(columns)[None, :]]
            else:
                at = array.at[pl.ds(first, _INNER), pl.ds(0, columns)]
            return triton.load(at, mask=jnp.broadcast_to(is_own, (_INNER, columns)), other=0)

        return total + _dot(load(x, "x", height).T, load(dy, "dy", width), precision)

    stop = jnp.where(end > begin, (end - 1) // _INNER + 1, begin // _INNER)
    total = jax.lax.fori_loop(begin // _INNER, stop, add, jnp.zeros((height, width), jnp.float32))
    triton.store(out.at[:, :], total.astype(out.dtype))


def _dot(a: jax.Array, b: jax.Array, precision: jax.lax.Precision | None) -> jax.Array:
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _precision(x: jax.Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def padded(order: Int32[Array, "M"]) -> Int32[Array, "P"]:
    """Returns the order with as many places as whole tiles have."""
    return jnp.pad(order, (0, -len(order) % _ROWS))


def _divisor(size: int, most: int) -> int:
    return next(count for count in (256, 128, 64, 32, 16, 8) if count <= most and size % count == 0)


def _like(shape: tuple[int, ...], x: jax.Array, *others: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns a result of x's dtype that varies over all axes over which an argument does."""
    varying = frozenset[str]().union(*(jax.typeof(array).manual_axis_type.varying for array in (x, *others)))
    kind = jax.sharding.ManualAxisType(varying=varying) if varying else None
    return jax.ShapeDtypeStruct(shape, x.dtype, manual_axis_type=kind)
