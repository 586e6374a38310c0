"""The products of `llamajax.kernels.grouped` in Pallas, compiled by Triton for NVIDIA GPUs.

Rows are multiplied in tiles of consecutive places, where they lie expert after expert. A tile is visited once for every
expert that has rows in it, and a visit stores that expert's rows alone. Loads and stores follow `Groups.order`, as in
ScatterMoE (arXiv:2403.08245): rows are read, or written, where they are. The gradient of a matrix is summed by one program
for each of its tiles, over its expert's rows, so sums have one order. Widths need not be multiples of a tile's.

All functions run on one device, within `shard_map`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from llamajax.kernels.choice import HOPPER, compute_capability
from llamajax.parallel.dispatch import Groups
from llamajax.parallel.float8 import Factor, Float8, values

Named = Literal["x", "out"]
"""The side of a product whose rows lie at `order`; those of the other lie expert after expert."""
_ROWS, _COLUMNS = 128, 128
"""Tile of rows and columns that a program computes."""
_INNER = {4: 32, 2: 64, 1: 64}
"""Inner entries that a program adds up at a time, by their bytes."""
_LEAST = 32
"""Least size of a tile: matrix units multiply as many numbers of eight bits."""
_WARPS = 8
Dot = Callable[[jax.Array, jax.Array], jax.Array]


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
    return Visits(expert, tile.astype(jnp.int32), _bounds(sizes), until[-1:].astype(jnp.int32))


def _bounds(sizes: Int32[Array, "E"]) -> Int32[Array, "E+1"]:
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])


def times(
    x: Float[Array, "R K"] | Float8,
    w: Float[Array, "E _ _"] | Float8,
    groups: Groups,
    named: Named,
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "S N"]:
    """Returns the products of rows with their expert's matrix, in x's dtype. Rows of no expert are left unwritten.

    Args:
        x: rows. Those that lie expert after expert fill whole tiles, as `padded` rounds up.
        w: matrices [E, K, N], or [E, N, K] if transposed; in float8 if x is.
        groups: rows of each expert.
        named: the result has a row for each of theirs if it is `out`, otherwise one for each place.
        transposed: whether rows are multiplied by the transposed matrices.
        interpret: compute with jax, on any device and slowly, instead of compiling with Triton.
    """
    N, order = w.shape[1 if transposed else 2], padded(groups.order)
    own, columns = visits(groups.sizes, len(order)), _tile(N, _COLUMNS)
    kernel = partial(_times, columns=columns, transposed=transposed, named=named)
    num_rows = len(groups.is_row) if named == "out" else len(order)
    grid = pl.cdiv(N, columns), len(own.tile)
    return _call(kernel, grid, (num_rows, N), (*own, order), x, w, name="grouped_rows", interpret=interpret)


def weight_gradients(
    x: Float[Array, "R K"] | Float8,
    dy: Float[Array, "S N"] | Float8,
    groups: Groups,
    named: Named,
    *,
    interpret: bool = False,
) -> Float[Array, "E K N"]:
    """Returns x^T dy of each expert's rows, zeros without rows, for a product of x whose result has the gradient dy; other
    arguments as for `times`."""
    (K, N), E = (x.shape[1], dy.shape[1]), len(groups.sizes)
    height, width = _tile(K, _COLUMNS), _tile(N, _COLUMNS)
    kernel = partial(_weight_gradients, height=height, width=width, named=named)
    grid, indices = (pl.cdiv(N, width), pl.cdiv(K, height), E), (_bounds(groups.sizes), padded(groups.order))
    return _call(kernel, grid, (E, K, N), indices, x, dy, name="grouped_weights", interpret=interpret)


def _call(
    kernel: Any,
    grid: tuple[int, ...],
    shape: tuple[int, ...],
    indices: tuple[jax.Array, ...],
    *factors: Factor,
    name: str,
    interpret: bool,
) -> jax.Array:
    """Runs a kernel on indices, the factor of its sums, and two arrays."""
    dtype, scale = factors[0].dtype, jnp.ones(1, jnp.float32)
    for factor in factors:
        scale = scale * factor.scale.reshape(1) if isinstance(factor, Float8) else scale
    x, y = map(values, factors)
    return pl.pallas_call(
        partial(kernel, dot=_dot(x, y, interpret=interpret)),
        grid=grid,
        in_specs=[pl.no_block_spec] * (len(indices) + 3),
        out_specs=pl.no_block_spec,
        out_shape=_like(shape, dtype, *indices, scale, x, y),
        # Tiles of float32 are twice as large, and a core holds fewer.
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=2 if x.dtype == jnp.float32 else 3),
        interpret=interpret,
        name=name,
    )(*indices, scale, x, y)


def _times(
    expert: Any,
    tile: Any,
    bounds: Any,
    count: Any,
    order: Any,
    scale: Any,
    x: Any,
    w: Any,
    out: Any,
    *,
    columns: int,
    transposed: bool,
    named: Named,
    dot: Dot,
) -> None:
    (K, N), visit = (x.shape[1], out.shape[1]), pl.program_id(1)
    column, inner = pl.program_id(0) * columns + jnp.arange(columns), _tile(K, _INNER[x.dtype.itemsize])
    is_column = _within(column, N)

    @pl.when(visit < count[0])
    def _() -> None:
        own, first = expert[visit], tile[visit] * _ROWS
        place = first + jnp.arange(_ROWS)
        row = triton.load(order.at[pl.ds(first, _ROWS)])

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            entry = step * inner + jnp.arange(inner)
            is_entry = _within(entry, K)
            a = _load((x,), row if named == "x" else place, entry, None, is_entry)
            if transposed:
                b = _load((w, own), column, entry, is_column, is_entry).T
            else:
                b = _load((w, own), entry, column, is_entry, is_column)
            return total + dot(a, b)

        total = jax.lax.fori_loop(0, pl.cdiv(K, inner), add, jnp.zeros((_ROWS, columns), jnp.float32))
        is_own = (place >= bounds[own]) & (place < bounds[own + 1])
        # Interpreted, a masked store puts old values back, so a place without an expert must not name another's row.
        to = jnp.where(is_own, row, out.shape[0]) if named == "out" else place
        at = out.at[to[:, None], column[None, :]]
        triton.store(at, (total * scale[0]).astype(out.dtype), mask=_mask(total.shape, is_own, is_column))


def _weight_gradients(
    bounds: Any,
    order: Any,
    scale: Any,
    x: Any,
    dy: Any,
    out: Any,
    *,
    height: int,
    width: int,
    named: Named,
    dot: Dot,
) -> None:
    own, inner = pl.program_id(2), _INNER[x.dtype.itemsize]
    begin, end = bounds[own], bounds[own + 1]
    row = pl.program_id(1) * height + jnp.arange(height)
    column = pl.program_id(0) * width + jnp.arange(width)
    is_row, is_column = _within(row, out.shape[1]), _within(column, out.shape[2])

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        first = step * inner
        place = first + jnp.arange(inner)
        is_own = (place >= begin) & (place < end)
        at = triton.load(order.at[pl.ds(first, inner)])
        a = _load((x,), at if named == "x" else place, row, is_own, is_row)
        b = _load((dy,), at if named == "out" else place, column, is_own, is_column)
        return total + dot(a.T, b)

    # An expert without rows ends where it begins, perhaps within a step, which then adds zeros.
    total = jax.lax.fori_loop(begin // inner, pl.cdiv(end, inner), add, jnp.zeros((height, width), jnp.float32))
    mask = _mask(total.shape, is_row, is_column)
    triton.store(out.at[own, row[:, None], column[None, :]], (total * scale[0]).astype(out.dtype), mask=mask)


def _load(
    array: tuple[Any, ...],
    row: Int32[Array, "a"],
    column: Int32[Array, "b"],
    is_row: Bool[Array, "a"] | None,
    is_column: Bool[Array, "b"] | None,
) -> Float[Array, "a b"]:
    """Loads a tile of a matrix, or of one of several that a number names, with zeros where a mask excludes numbers."""
    ref, *which = array
    at, mask = ref.at[(*which, row[:, None], column[None, :])], _mask((len(row), len(column)), is_row, is_column)
    return triton.load(at, mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def _mask(
    shape: tuple[int, ...], is_row: Bool[Array, "a"] | None, is_column: Bool[Array, "b"] | None
) -> Bool[Array, "a b"] | None:
    parts = [*([] if is_row is None else [is_row[:, None]]), *([] if is_column is None else [is_column[None, :]])]
    if not parts:
        return None
    mask = parts[0] if len(parts) == 1 else parts[0] & parts[1]
    return jnp.broadcast_to(mask, shape)


def _within(index: Int32[Array, "n"], size: int) -> Bool[Array, "n"] | None:
    """Returns which indices are within an array of such a size; None: tiles of n divide it, so all are."""
    return index < size if size % len(index) else None


def _dot(x: jax.Array, y: jax.Array, *, interpret: bool) -> Dot:
    """Returns the function that multiplies tiles of two arrays, with sums in float32."""
    precision: Any = None
    if x.dtype == jnp.float32:
        # On a GPU three products in TF32, which its matrix units compute.
        precision = jax.lax.Precision.HIGHEST if interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    product = partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)
    capability = compute_capability() or (0,)
    if x.dtype == y.dtype and (x.dtype.itemsize > 1 or capability[0] != HOPPER):
        return product
    # Pallas multiplies factors of one type, and on Hopper uses its matrix units for no eight-bit type. float16 holds every
    # number of both formats.
    return lambda a, b: product(a.astype(jnp.float16), b.astype(jnp.float16))


def padded(order: Int32[Array, "M"]) -> Int32[Array, "P"]:
    """Returns the order with as many places as whole tiles have."""
    return jnp.pad(order, (0, -len(order) % _ROWS))


def _tile(size: int, most: int) -> int:
    return min(most, max(_LEAST, pl.next_power_of_2(size)))


def _like(shape: tuple[int, ...], dtype: DTypeLike, *arrays: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns a result that varies over all axes over which an argument does."""
    varying = frozenset[str]().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))
    kind = jax.sharding.ManualAxisType(varying=varying) if varying else None
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)
