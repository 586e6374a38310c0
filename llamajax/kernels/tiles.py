"""Which tiles of the scores a kernel computes, and the order in which its programs start. Tiles that no query sees are
skipped, tiles that are seen whole need no mask, and the longest programs start first. Computed once per batch, from the
positions and documents of the tokens."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

_PADDING_LAST = jnp.iinfo(jnp.int32).max


class TileSize(NamedTuple):
    """Scores that are computed at once."""

    queries: int
    keys: int


class Tiles(NamedTuple):
    """Work of each program, in the order in which programs start: the tile `[4]` of its own side, and a range of tiles along
    the other side. From `[0]` to `[3]` some score is seen; from `[1]` to `[2]` every score is seen. The first dim is 1 where
    all rows are alike."""

    of_queries: Int32[Array, "b num_query_tiles 5"]
    """Query tiles with their key tiles, in the size for queries."""
    of_keys: Int32[Array, "b num_key_tiles 5"]
    """Key tiles with their query tiles, in the size for keys."""


class Documents(NamedTuple):
    """Segment ids of the tokens on both sides of the scores."""

    of_queries: Int32[Array, "b t"]
    of_keys: Int32[Array, "b s"]


class Sight(NamedTuple):
    """Scores that queries see of keys, as a kernel needs them."""

    tiles: Tiles
    offset: Int32[Array, "1"]
    """Index of the first query in its row minus the index of the first key."""
    documents: Documents | None = None
    """Documents of the tokens; None: every row is one document."""


class Sizes(NamedTuple):
    """Tile sizes of the kernels that loop over keys for each tile of queries, and of the kernel that loops over queries."""

    for_queries: TileSize
    for_keys: TileSize


def tiles(
    sizes: Sizes,
    num_queries: int,
    num_keys: int,
    *,
    offset: int | Int32[Array, ""],
    window: int | None,
    q_ids: Int32[Array, "b t"] | None = None,
    k_ids: Int32[Array, "b s"] | None = None,
) -> Tiles:
    """Returns the tiles of attention from consecutive queries to consecutive keys, see `llamajax.kernels.plain.Mask`.

    The ids may be in any order; the more tokens of a document are adjacent, the more tiles are skipped.

    Args:
        sizes: sizes of the tiles.
        num_queries: t.
        num_keys: s.
        offset: index of the first query in its row minus the index of the first key.
        window: see `Mask`.
        q_ids: documents of the queries; None: every row is one document.
        k_ids: documents of the keys.
    """
    see = partial(_seen, num_queries=num_queries, num_keys=num_keys, offset=offset, window=window, q_ids=q_ids, k_ids=k_ids)
    some, all_seen = see(sizes.for_keys)
    of_queries, of_keys = _ranges(*see(sizes.for_queries)), _ranges(jnp.swapaxes(some, 1, 2), jnp.swapaxes(all_seen, 1, 2))
    return Tiles(_longest_first(of_queries), _longest_first(of_keys))


def num_tiles(length: int, size: int) -> int:
    """Returns the number of tiles that cover `length` tokens."""
    return -(-length // size)


def _seen(
    size: TileSize,
    *,
    num_queries: int,
    num_keys: int,
    offset: int | jax.Array,
    window: int | None,
    q_ids: jax.Array | None,
    k_ids: jax.Array | None,
) -> tuple[Bool[Array, "b i j"], Bool[Array, "b i j"]]:
    """Returns for every tile whether some of its scores may be seen, and whether all are."""
    q_first = (offset + size.queries * jnp.arange(num_tiles(num_queries, size.queries)))[None, :, None]
    k_first = (size.keys * jnp.arange(num_tiles(num_keys, size.keys)))[None, None, :]
    q_last = jnp.minimum(q_first + size.queries, offset + num_queries) - 1
    k_last = jnp.minimum(k_first + size.keys, num_keys) - 1
    some, every = k_first <= q_last, (k_last <= q_first) & (k_first + size.keys <= num_keys)
    if window is not None:
        some, every = some & (q_first - k_last < window), every & (q_last - k_first < window)
    if q_ids is not None and k_ids is not None:
        (q_least, q_most), (k_least, k_most) = _range_of_ids(q_ids, size.queries), _range_of_ids(k_ids, size.keys)
        q_least, q_most, k_least, k_most = q_least[:, :, None], q_most[:, :, None], k_least[:, None], k_most[:, None]
        some = some & (q_least <= k_most) & (k_least <= q_most)
        every = every & (q_least == q_most) & (k_least == k_most) & (q_least == k_least)
    return some, every


def _range_of_ids(ids: Int32[Array, "b t"], size: int) -> tuple[Int32[Array, "b n"], Int32[Array, "b n"]]:
    """Returns the least and the largest id of each tile."""
    # Padding comes after all documents and has the least id, so it would make the range of the last tile include all of
    # them.
    ids = jnp.where(ids == 0, _PADDING_LAST, ids)
    length = ids.shape[1]
    ids = jnp.pad(ids, ((0, 0), (0, num_tiles(length, size) * size - length)), mode="edge")
    ids = ids.reshape(ids.shape[0], -1, size)
    return jnp.min(ids, axis=2), jnp.max(ids, axis=2)


def _ranges(some: Bool[Array, "b i j"], every: Bool[Array, "b i j"]) -> Int32[Array, "b i 4"]:
    """Returns the ranges of `Tiles`. The range of whole tiles is the first run of adjacent ones."""
    count = some.shape[2]
    first, end = jnp.argmax(some, axis=2), count - jnp.argmax(some[:, :, ::-1], axis=2)
    end = jnp.where(jnp.any(some, axis=2), end, first)
    has_whole = jnp.any(every, axis=2)
    whole_first = jnp.where(has_whole, jnp.argmax(every, axis=2), end)
    behind = ~every & (jnp.arange(count)[None, None, :] > whole_first[:, :, None])
    whole_end = jnp.where(jnp.any(behind, axis=2), jnp.argmax(behind, axis=2), count)
    whole_end = jnp.where(has_whole, whole_end, end)
    return jnp.stack([first, whole_first, whole_end, end], axis=2).astype(jnp.int32)


def _longest_first(ranges: Int32[Array, "b i 4"]) -> Int32[Array, "b i 5"]:
    """Sorts the ranges of `Tiles`. A GPU starts programs in order as others end; if the longest came last, most of it would
    wait for them."""
    first, *others, end = jnp.unstack(ranges, axis=2)
    own = jax.lax.broadcasted_iota(jnp.int32, first.shape, 1)
    _, *in_order = jax.lax.sort((first - end, first, *others, end, own), dimension=1, is_stable=True, num_keys=1)
    return jnp.stack(in_order, axis=2)
