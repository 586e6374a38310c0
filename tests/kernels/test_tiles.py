"""Which tiles are computed: nothing that is seen is left out, and nothing is taken for seen that is not."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamajax.kernels.tiles import Sizes, TileSize, tiles

LENGTHS = st.sampled_from((1, 7, 16, 20))  # few: jax compiles every operation for each
SIZES = st.builds(TileSize, st.sampled_from((2, 8)), st.sampled_from((2, 8)))


@st.composite
def cases(draw):
    t, s, offset = draw(LENGTHS), draw(LENGTHS), draw(st.integers(-12, 12))
    window = draw(st.none() | st.integers(1, 12))
    ids = None
    if draw(st.booleans()):
        # Documents in order as rows have them, or ids in any order, which nobody forbids.
        numbers = draw(st.lists(st.integers(0, 4), min_size=64, max_size=64))
        ids = np.array(numbers if draw(st.booleans()) else sorted(numbers, key=lambda number: number or 99), np.int32)
    return t, s, offset, window, ids


def seen(t: int, s: int, offset: int, window: int | None, ids: np.ndarray | None) -> np.ndarray:
    """[t, s]: by hand; a token at index i of its row is at i + 20 of the ids."""
    query, key = np.arange(t)[:, None] + offset, np.arange(s)[None, :]
    visible = (query >= key) & (query - key < (window or 1000))
    return visible if ids is None else visible & (ids[query + 20] == ids[key + 20])


def check(table: np.ndarray, visible: np.ndarray, own: int, other: int) -> None:
    """`visible` by own and other side; the longest first."""
    assert sorted(table[:, 4]) == list(range(-(-len(visible) // own)))
    assert np.all(np.diff(table[:, 3] - table[:, 0]) <= 0)
    for first, whole_first, whole_end, end, tile in table:
        rows = visible[tile * own : (tile + 1) * own]
        assert 0 <= first <= whole_first <= whole_end <= end <= -(-visible.shape[1] // other)
        assert not rows[:, : first * other].any()
        assert not rows[:, end * other :].any()
        assert rows[:, whole_first * other : whole_end * other].all()


def check_case(case, for_queries: TileSize, for_keys: TileSize) -> None:
    t, s, offset, window, ids = case
    visible = seen(*case)
    q_ids = None if ids is None else jnp.asarray(ids[None, np.arange(t) + offset + 20])
    k_ids = None if ids is None else jnp.asarray(ids[None, np.arange(s) + 20])
    found = tiles(Sizes(for_queries, for_keys), t, s, offset=offset, window=window, q_ids=q_ids, k_ids=k_ids)
    check(np.asarray(found.of_queries)[0], visible, *for_queries)
    check(np.asarray(found.of_keys)[0], visible.T, for_keys.keys, for_keys.queries)


@pytest.mark.slow
@settings(max_examples=4, derandomize=True, deadline=None)
@given(cases(), SIZES, SIZES)
def test_what_is_seen_is_computed_and_what_is_whole_needs_no_mask(case, for_queries, for_keys):
    check_case(case, for_queries, for_keys)


@pytest.mark.long
@settings(max_examples=100, derandomize=True, deadline=None)
@given(cases(), SIZES, SIZES)
def test_more_of_what_is_seen(case, for_queries, for_keys):
    check_case(case, for_queries, for_keys)


def test_the_longest_programs_start_first():
    """In causal rows these are the last tile of queries, which sees all keys, and the first of keys, which all queries
    see."""
    size = TileSize(4, 4)
    found = tiles(Sizes(size, size), 64, 64, offset=0, window=None)
    assert found.of_queries[0, :, 4].tolist() == list(reversed(range(16)))
    assert found.of_keys[0, :, 4].tolist() == list(range(16))


@pytest.mark.parametrize("padding", [0, 6, 8])
def test_tiles_of_other_documents_are_skipped(padding):
    """Four documents of 16 tokens, tiles of four: each sees its own four, and padding is not taken for an early document,
    where it has tiles of its own nor where it begins in one of a document's."""
    ids = np.repeat(np.arange(1, 5, dtype=np.int32), 16)[None]
    ids[0, 64 - padding :] = 0
    size, on_device = TileSize(4, 4), jnp.asarray(ids)
    found = tiles(Sizes(size, size), 64, 64, offset=0, window=None, q_ids=on_device, k_ids=on_device)
    table = np.asarray(found.of_queries)[0]
    first, whole_first, whole_end, end, _ = table[np.argsort(table[:, 4])].T
    by_tile = ((ids[0][:, None] == ids[0]) & np.tri(64, dtype=bool)).reshape(16, 4, 16, 4)
    some, whole = by_tile.any((1, 3)), by_tile.all((1, 3))
    np.testing.assert_array_equal(first, some.argmax(1))
    np.testing.assert_array_equal(end, np.arange(1, 17))
    np.testing.assert_array_equal(whole_end - whole_first, whole.sum(1))
