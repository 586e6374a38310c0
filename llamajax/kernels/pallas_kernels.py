"""Bodies of the attention kernels: a program computes one tile of queries against all keys that they see, or one tile of
keys against all queries that see them. `llamajax.kernels.pallas` passes a program a ref to each array."""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Int32

from llamajax.kernels.task import Task
from llamajax.kernels.tiles import Sight, num_tiles

_LOG2_E = math.log2(math.e)
_LOWEST = -1e30
"""Lower than every score, yet finite: the difference of two such values is a number."""
_OWN = 4
"""Index of the program's own tile in `llamajax.kernels.tiles.Tiles`."""


class _Side(NamedTuple):
    """Block specs of the queries, or of the keys, for one program."""

    heads: pl.BlockSpec
    """Block of [b, length, heads, H]."""
    numbers: pl.BlockSpec
    """Block of [b, heads, length]."""
    ids: pl.BlockSpec
    """Block of [b, length]."""


def launch(
    task: Task,
    tiles: Int32[Array, "b n 5"],
    sight: Sight,
    arrays: tuple[jax.Array, ...],
    results: list[jax.ShapeDtypeStruct],
    *,
    interpret: bool,
) -> Any:
    """On one device: runs the kernel `task.name` on `arrays` and returns arrays like `results`.

    Args:
        task: parameters that the kernel is compiled for.
        tiles: tiles that each program computes, see `llamajax.kernels.tiles.Tiles`.
        sight: which scores are seen.
        arrays: queries [b, t, K G, H], keys and values [b, s, K, H]; in the backward pass also the output's gradients,
            shaped like the queries, the log-sum-exp and the scores' gradients [b, K G, t].
        results: shapes and dtypes of the results.
        interpret: see `llamajax.kernels.pallas.attend_to_rows`.
    """
    size, (t, s, H) = task.size, (task.num_queries, task.num_keys, task.head_dim)
    queries, keys = _side(t, size.queries, H), _side(s, size.keys, H, shared_by=task.group)
    if task.name == "attention_forward":
        kernel, written = forward, [queries.heads, queries.numbers]
    elif task.name == "attention_backward_queries":
        kernel, written = query_gradients, [queries.heads]
    else:
        own = task.group // task.parts
        kernel, written = partial(key_gradients, group=own), [_side(s, size.keys, H).heads] * 2
        queries, keys = _side(t, size.queries, H, sharing=own), _side(s, size.keys, H, shared_by=task.parts)
    read = queries.heads, keys.heads, keys.heads, queries.heads, queries.numbers, queries.numbers
    rows_differ = tiles.shape[0] > 1
    of_tiles = pl.BlockSpec((None, None, 5), lambda head, place, row: (row if rows_differ else 0, place, 0))
    of_offset = pl.BlockSpec((1,), lambda head, place, row: (0,))
    of_ids = (queries.ids, keys.ids) if sight.documents is not None else (None, None)
    return pl.pallas_call(
        partial(kernel, task),
        grid=task.grid,
        in_specs=[of_tiles, of_offset, *of_ids, *read[: len(arrays)]],
        out_specs=written,
        out_shape=results,
        compiler_params=triton.CompilerParams(num_warps=task.build.warps, num_stages=task.build.stages),
        interpret=interpret,
        name=task.name,
    )(tiles, sight.offset, *(sight.documents or (None, None)), *arrays)


def _side(length: int, tile: int, head_dim: int, *, shared_by: int = 1, sharing: int | None = None) -> _Side:
    """Returns the block specs of all tokens up to the end of the last tile: for the head that the heads of `shared_by`
    programs share, or for all `sharing` heads of the program."""
    length = num_tiles(length, tile) * tile
    return _Side(
        pl.BlockSpec(
            (None, length, sharing, pl.next_power_of_2(head_dim)), lambda head, _, row: (row, 0, head // shared_by, 0)
        ),
        pl.BlockSpec((None, sharing, length), lambda head, _, row: (row, head // shared_by, 0)),
        pl.BlockSpec((None, length), lambda head, _, row: (row, 0)),
    )


class Seen(NamedTuple):
    """Refs that say which scores of a program's tiles are seen."""

    tiles: Any
    """Ref of five numbers per tile, see `llamajax.kernels.tiles.Tiles`."""
    offset: Any
    """Ref of one number: index of the first query in its row minus the index of the first key."""
    q_ids: Any
    """Ref of the queries' documents; None: every row is one document."""
    k_ids: Any
    """Ref of the keys' documents; None: every row is one document."""


def forward(task: Task, tiles: Any, offset: Any, q_ids: Any, k_ids: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    """Computes attention of one head's tile of queries, and the log-sum-exp."""
    seen, first = Seen(tiles, offset, q_ids, k_ids), tiles[_OWN] * task.size.queries
    queries = _Tile(task.size.queries, first, task.num_queries, task.head_dim)
    own_q = queries.load(q)

    def add(tile: jax.Array, sums: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        weighted, largest, total = sums
        keys = _Tile(task.size.keys, tile * task.size.keys, task.num_keys, task.head_dim)
        scores = _dot(own_q, keys.load(k).T) * (task.scale * _LOG2_E)
        if masked:
            scores = jnp.where(_visible(task, seen, queries, keys), scores, -jnp.inf)
        larger = jnp.maximum(largest, jnp.max(scores, axis=1))
        shrunk, exps = jnp.exp2(largest - larger), jnp.exp2(scores - larger[:, None])
        weighted = shrunk[:, None] * weighted + _dot(exps.astype(own_q.dtype), keys.load(v))
        return weighted, larger, shrunk * total + jnp.sum(exps, axis=1)

    sums = jnp.zeros(own_q.shape, jnp.float32), jnp.full(own_q.shape[0], _LOWEST), jnp.zeros(own_q.shape[0], jnp.float32)
    weighted, largest, total = _over_tiles(tiles, add, sums)
    sees_any = total > 0
    queries.store(out, weighted / jnp.where(sees_any, total, 1.0)[:, None])
    queries.store(lse, jnp.where(sees_any, (largest + jnp.log2(total)) / _LOG2_E, -jnp.inf))


def query_gradients(
    task: Task, tiles: Any, offset: Any, q_ids: Any, k_ids: Any, q: Any, k: Any, v: Any, d_out: Any, lse: Any, d_scores: Any,
    d_q: Any,
) -> None:  # fmt: skip
    """Computes the gradient of one head's tile of queries."""
    seen, first = Seen(tiles, offset, q_ids, k_ids), tiles[_OWN] * task.size.queries
    queries = _Tile(task.size.queries, first, task.num_queries, task.head_dim)
    own_q, own_d_out, own_lse, own_d_scores = (queries.load(array) for array in (q, d_out, lse, d_scores))

    def add(tile: jax.Array, total: jax.Array, masked: bool) -> jax.Array:
        keys = _Tile(task.size.keys, tile * task.size.keys, task.num_keys, task.head_dim)
        own_k = keys.load(k)
        weights = jnp.exp2(_dot(own_q, own_k.T) * (task.scale * _LOG2_E) - (own_lse * _LOG2_E)[:, None])
        if masked:
            weights = jnp.where(_visible(task, seen, queries, keys), weights, 0.0)
        d_weights = _dot(own_d_out, keys.load(v).T)
        return total + _dot((weights * (d_weights + own_d_scores[:, None])).astype(own_q.dtype), own_k)

    queries.store(d_q, task.scale * _over_tiles(tiles, add, jnp.zeros(own_q.shape, jnp.float32)))


def key_gradients(
    task: Task, tiles: Any, offset: Any, q_ids: Any, k_ids: Any, q: Any, k: Any, v: Any, d_out: Any, lse: Any, d_scores: Any,
    d_k: Any, d_v: Any, *, group: int,
) -> None:  # fmt: skip
    """Computes the gradients of one kv head's tile of keys and values from the `group` query heads that share them."""
    seen, first = Seen(tiles, offset, q_ids, k_ids), tiles[_OWN] * task.size.keys
    keys = _Tile(task.size.keys, first, task.num_keys, task.head_dim)
    own_k, own_v = keys.load(k), keys.load(v)

    def add_head(head: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def add(tile: jax.Array, sums: tuple[jax.Array, jax.Array], masked: bool) -> tuple[jax.Array, jax.Array]:
            queries = _Tile(task.size.queries, tile * task.size.queries, task.num_queries, task.head_dim)
            own_q, own_d_out = queries.load(q, head), queries.load(d_out, head)
            scores = _dot(own_k, own_q.T) * (task.scale * _LOG2_E)  # keys first, so that no computed tile is transposed
            weights = jnp.exp2(scores - (queries.load(lse, head) * _LOG2_E)[None, :])
            if masked:
                weights = jnp.where(_visible(task, seen, queries, keys, by_key=True), weights, 0.0)
            d_weights = _dot(own_v, own_d_out.T) + queries.load(d_scores, head)[None, :]
            d_k, d_v = sums
            d_k += _dot((weights * d_weights).astype(own_k.dtype), own_q)
            return d_k, d_v + _dot(weights.astype(own_k.dtype), own_d_out)

        return _over_tiles(tiles, add, sums)

    zeros = jnp.zeros(own_k.shape, jnp.float32)
    sum_k, sum_v = jax.lax.fori_loop(0, group, add_head, (zeros, zeros))
    keys.store(d_k, task.scale * sum_k)
    keys.store(d_v, sum_v)


class _Tile:
    """Tile of `size` tokens that starts at token `first`, out of `length` tokens in the refs."""

    def __init__(self, size: int, first: jax.Array, length: int, head_dim: int) -> None:
        self.indices, self.length, self.head_dim = first + jnp.arange(size), length, head_dim
        self.place = pl.ds(first, size)
        self.is_ragged = length % size != 0

    def load(self, ref: Any, head: jax.Array | None = None) -> jax.Array:
        """Loads the tile from a ref of [tokens, width], or of one number per token, with or without heads; zeros outside the
        array."""
        heads = () if head is None else (head,)
        has_width = ref.ndim - len(heads) == 2
        place = (self.place, *heads) if has_width else (*heads, self.place)
        mask = self._mask(ref.shape[-1]) if has_width else self._mask()
        return triton.load(ref.at[place], mask=mask, other=None if mask is None else 0)

    def store(self, ref: Any, values: jax.Array) -> None:
        """Stores the tile in a ref of [tokens, width] or of one number per token."""
        mask = self._mask(ref.shape[-1]) if values.ndim == 2 else self._mask()
        triton.store(ref.at[self.place], values.astype(ref.dtype), mask=mask)

    def _mask(self, width: int | None = None) -> jax.Array | None:
        """Returns the mask of entries that exist, where the last tile is ragged or the head width is no power of two. None:
        all exist."""
        masks = [self.indices < self.length] if self.is_ragged else []
        if width is not None:
            masks = [mask[:, None] for mask in masks]
            masks += [(jnp.arange(width) < self.head_dim)[None, :]] if width != self.head_dim else []
        return reduce(jnp.logical_and, masks) if masks else None


def _visible(task: Task, seen: Seen, queries: _Tile, keys: _Tile, *, by_key: bool = False) -> jax.Array:
    """Returns which scores [queries, keys] of two tiles are seen; [keys, queries] where `by_key`."""

    def by_score(of_queries: jax.Array, of_keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (of_queries[None, :], of_keys[:, None]) if by_key else (of_queries[:, None], of_keys[None, :])

    query, key = by_score(queries.indices, keys.indices)
    distance = query + seen.offset[0] - key
    visible = distance >= 0
    if task.window is not None:
        visible = visible & (distance < task.window)
    if keys.is_ragged:
        visible = visible & (key < keys.length)
    if seen.q_ids is not None:
        of_query, of_key = by_score(queries.load(seen.q_ids), keys.load(seen.k_ids))
        visible = visible & (of_query == of_key)
    return visible


def _over_tiles(tiles: Any, add: Callable[[jax.Array, Any, bool], Any], sums: Any) -> Any:
    """Calls `add` for every tile of the other side to update the sums, with whether the tile needs a mask."""
    first, whole_first, whole_end, end = (tiles[place] for place in range(4))
    for begin, stop, masked in ((first, whole_first, True), (whole_first, whole_end, False), (whole_end, end, True)):
        sums = jax.lax.fori_loop(begin, stop, lambda tile, sums, masked=masked: add(tile, sums, masked), sums)
    return sums


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies with sums in fp32; fp32 operands are not rounded."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
