"""The products of `llamajax.kernels.grouped` in Pallas, compiled by Triton for NVIDIA GPUs.

Rows are multiplied in tiles of consecutive places, where they lie expert after expert. A tile is visited once for every
expert that has rows in it, and a visit stores that expert's rows alone. Loads and stores follow `Groups.order`, as in
ScatterMoE (arXiv:2403.08245): rows are read, or written, where they are. The gradient of a matrix is summed by one program
for each of its tiles, over its expert's rows, so sums have one order. Widths need not be multiples of a tile's.

All functions run on one device, within `shard_map`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from llamajax.errors import ConfigError
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
    num_visits: Int32[Array, "1"]
    """Those beyond this number compute nothing."""


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


class Tile(NamedTuple):
    """Places and columns that a program computes. Stores at places or columns beyond the expert's are masked."""

    place: Int32[Array, "rows"]
    row: Int32[Array, "rows"]
    """Row that `Groups.order` names for each place."""
    is_own: Bool[Array, "rows"]
    """Whether the expert has a row at the place."""
    number: Int32[Array, ""]
    """Number of the tile among those of a row."""
    column: Int32[Array, "columns"]
    is_column: Bool[Array, "columns"] | None
    """Whether the column is within the matrix; None: all are."""

    def of_rows(self, array: Any) -> Float[Array, "rows"]:
        """Loads a number of each row from an array [R]."""
        return triton.load(array.at[self.row])

    def load(self, array: Any, part: int = 0, parts: int = 1) -> Float[Array, "rows columns"]:
        """Loads the expert's numbers from the columns of a part of an array [P, parts columns]; others are zeros."""
        return _load((array,), self.place, self._column(array, part, parts), self.is_own, self.is_column)

    def store(self, array: Any, values: Float[Array, "rows columns"], part: int = 0, parts: int = 1) -> None:
        """Stores the expert's numbers where `load` finds them, in the array's dtype."""
        self.store_at(array, self.place, values, self._column(array, part, parts))

    def store_at(
        self, array: Any, row: Int32[Array, "rows"], values: Float[Array, "rows columns"], column: Int32[Array, "columns"]
    ) -> None:
        """Stores the expert's numbers at rows and columns of an array, in its dtype."""
        mask = _mask(values.shape, self.is_own, self.is_column)
        triton.store(array.at[row[:, None], column[None, :]], values.astype(array.dtype), mask=mask)

    def _column(self, array: Any, part: int, parts: int) -> Int32[Array, "columns"]:
        return self.column + part * (array.shape[1] // parts)


Finish = Callable[[Tile, Sequence[Float32[Array, "rows columns"]], Sequence[Any], Sequence[Any]], None]
"""Stores the results of a tile from its products, of each part of the matrix; then follow further arguments and results."""


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

    Raises:
        ConfigError: an array in float8 is too large.
    """
    num_rows = len(groups.is_row) if named == "out" else len(padded(groups.order))

    def finish(tile: Tile, products: Sequence[jax.Array], _: Sequence[Any], results: Sequence[Any]) -> None:
        (product,), (out,) = products, results
        # Interpreted, a masked store puts old values back, so a place without an expert must not name another's row.
        to = jnp.where(tile.is_own, tile.row, out.shape[0]) if named == "out" else tile.place
        tile.store_at(out, to, product, tile.column)

    shape = num_rows, w.shape[1 if transposed else 2]
    (out,) = multiply(
        "grouped_rows",
        finish,
        x,
        w,
        groups,
        [(shape, x.dtype)],
        is_named=named == "x",
        transposed=transposed,
        interpret=interpret,
    )
    return out


def multiply(
    name: str,
    finish: Finish,
    x: Float[Array, "R K"] | Float8,
    w: Float[Array, "E _ _"] | Float8,
    groups: Groups,
    results: Sequence[tuple[tuple[int, ...], DTypeLike]],
    *others: jax.Array,
    is_named: bool,
    transposed: bool = False,
    parts: int = 1,
    turns: int = 1,
    interpret: bool = False,
) -> list[jax.Array]:
    """Multiplies rows by their expert's matrix, as `times` does, and returns the arrays that `finish` stores.

    Args:
        name: the kernel's name, which the cost model knows.
        finish: see `Finish`.
        x: see `times`.
        w: see `times`.
        groups: rows of each expert.
        results: shapes and dtypes of the results.
        others: further arguments of `finish`.
        is_named: whether the rows of x lie at `order`; otherwise they lie expert after expert.
        transposed: whether rows are multiplied by the transposed matrices.
        parts: number of equal parts of the matrices' columns; each program computes the same columns of all.
        turns: number of tiles side by side that a program computes at once and finishes in turn, in fewer registers.
        interpret: see `times`.

    Raises:
        ConfigError: an array in float8 is too large.
    """
    N, order = w.shape[1 if transposed else 2] // parts, padded(groups.order)
    own, columns = visits(groups.sizes, len(order)), _columns(N, parts * turns)
    sizes = {"num_others": len(others), "num_columns": N, "columns": columns, "parts": parts, "turns": turns}
    kernel = partial(_times, finish=finish, transposed=transposed, is_named=is_named, **sizes)
    grid = pl.cdiv(N, columns * turns), len(own.tile)
    return _call(kernel, grid, results, (*own, order), (x, w), others, name=name, interpret=interpret)


def num_tiles(num_columns: int, turns: int) -> int:
    """Returns the number of tiles that `multiply` finishes along the columns of a matrix of one part."""
    return pl.cdiv(num_columns, _columns(num_columns, turns))


def _columns(num_columns: int, products: int) -> int:
    return _tile(num_columns, _COLUMNS // products)


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
    (gradient,) = _call(
        kernel, grid, [((E, K, N), x.dtype)], indices, (x, dy), (), name="grouped_weights", interpret=interpret
    )
    return gradient


def _call(
    kernel: Any,
    grid: tuple[int, ...],
    results: Sequence[tuple[tuple[int, ...], DTypeLike]],
    indices: tuple[jax.Array, ...],
    factors: tuple[Factor, Factor],
    others: tuple[jax.Array, ...],
    *,
    name: str,
    interpret: bool,
) -> list[jax.Array]:
    """Runs a kernel on the factor of its sums, indices, two arrays, and further ones."""
    scale = jnp.ones(1, jnp.float32)
    for factor in factors:
        scale = scale * factor.scale.reshape(1) if isinstance(factor, Float8) else scale
    x, y = map(values, factors)
    if any(array.dtype.itemsize == 1 and array.size >= 2**31 for array in (x, y)):
        # Pallas computes with offsets of 32 bits, with a sign, in arrays of up to 4 GiB.
        rule = "has 2^31 or more numbers in an array of experts or of their tokens"
        raise ConfigError(
            f"model.matmul_dtype: float8 {rule}; set model.float8_exempt to [w_gate_up, w_down], or mesh.expert"
        )
    arguments = scale, *indices, x, y, *others
    return pl.pallas_call(
        partial(kernel, dot=_dot(x, y, interpret=interpret)),
        grid=grid,
        in_specs=[pl.no_block_spec] * len(arguments),
        out_specs=[pl.no_block_spec] * len(results),
        out_shape=[_like(shape, dtype, *arguments) for shape, dtype in results],
        # Tiles of float32 are twice as large, and a core holds fewer.
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=2 if x.dtype == jnp.float32 else 3),
        interpret=interpret,
        name=name,
    )(*arguments)


def _times(
    scale: Any,
    expert: Any,
    tile: Any,
    bounds: Any,
    num_visits: Any,
    order: Any,
    x: Any,
    w: Any,
    *refs: Any,
    finish: Finish,
    num_others: int,
    num_columns: int,
    columns: int,
    parts: int,
    turns: int,
    transposed: bool,
    is_named: bool,
    dot: Dot,
) -> None:
    K, visit = x.shape[1], pl.program_id(1)
    numbers = [pl.program_id(0) * turns + turn for turn in range(turns)]
    inner, is_even = _tile(K, _INNER[x.dtype.itemsize]), num_columns % (columns * turns) == 0

    @pl.when(visit < num_visits[0])
    def _() -> None:
        own, first = expert[visit], tile[visit] * _ROWS
        place = first + jnp.arange(_ROWS)
        row = triton.load(order.at[pl.ds(first, _ROWS)])
        is_own = (place >= bounds[own]) & (place < bounds[own + 1])
        of_columns = [number * columns + jnp.arange(columns) for number in numbers]
        tiles = [
            Tile(place, row, is_own, number, column, None if is_even else column < num_columns)
            for number, column in zip(numbers, of_columns, strict=True)
        ]

        def add(step: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
            entry = step * inner + jnp.arange(inner)
            is_entry = _within(entry, K)
            a = _load((x,), row if is_named else place, entry, None, is_entry)

            def factor(column: jax.Array, is_column: jax.Array | None) -> jax.Array:
                if transposed:
                    return _load((w, own), column, entry, is_column, is_entry).T
                return _load((w, own), entry, column, is_entry, is_column)

            wanted = [(one.column + part * num_columns, one.is_column) for one in tiles for part in range(parts)]
            return [total + dot(a, factor(*columns)) for columns, total in zip(wanted, totals, strict=True)]

        zeros = [jnp.zeros((_ROWS, columns), jnp.float32)] * (parts * turns)
        totals = jax.lax.fori_loop(0, pl.cdiv(K, inner), add, zeros)
        for turn, one in enumerate(tiles):
            products = totals[turn * parts : (turn + 1) * parts]

            # The last turns may lie beyond the columns. The condition also keeps a turn's loads out of the turn before it.
            @pl.when(one.number * columns < num_columns)
            def _(one: Tile = one, products: list[jax.Array] = products) -> None:
                finish(one, [product * scale[0] for product in products], refs[:num_others], refs[num_others:])


def _weight_gradients(
    scale: Any,
    bounds: Any,
    order: Any,
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
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying))
