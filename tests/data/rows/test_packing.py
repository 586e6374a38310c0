"""Packing: golden rows, nothing lost, nothing mixed, little padding."""

import numpy as np
import pytest

from llamajax.data.rows import packing
from llamajax.data.rows.packing import fill_row, pack
from llamajax.step.batch import IGNORE


def rows_of(documents, seq_len):
    lengths = np.array([len(document) for document in documents], np.int64)
    tokens = np.concatenate([np.asarray(document, np.int32) for document in documents])
    packed = pack(np.cumsum(lengths) - lengths, lengths, seq_len)
    return [
        fill_row(
            [
                tokens[packed.starts[p] : packed.starts[p] + packed.lengths[p] + 1]
                for p in range(*packed.rows[row : row + 2])
            ],
            seq_len,
        )
        for row in range(len(packed))
    ]


def test_golden_rows():
    # 7 tokens fill a row of 4 and leave 2 pairs; 3 tokens are 2 pairs; 4 tokens are 3; 2 are 1.
    rows = rows_of([[10, 11, 12, 13, 14, 15, 16], [20, 21, 22], [30, 31, 32, 33], [40, 41]], seq_len=4)
    golden = [
        {"tokens": [10, 11, 12, 13], "targets": [11, 12, 13, 14], "segment_ids": [1, 1, 1, 1], "positions": [0, 1, 2, 3]},
        {"tokens": [30, 31, 32, 40], "targets": [31, 32, 33, 41], "segment_ids": [1, 1, 1, 2], "positions": [0, 1, 2, 0]},
        {"tokens": [14, 15, 20, 21], "targets": [15, 16, 21, 22], "segment_ids": [1, 1, 2, 2], "positions": [0, 1, 0, 1]},
    ]
    assert [{name: values.tolist() for name, values in row.items()} for row in rows] == golden
    assert all(values.dtype == np.int32 for row in rows for values in row.values())


def test_padding_is_not_counted():
    (row,) = rows_of([[5, 6, 7]], seq_len=5)
    assert row["targets"].tolist() == [6, 7, IGNORE, IGNORE, IGNORE]
    assert row["segment_ids"].tolist() == [1, 1, 0, 0, 0]
    assert row["tokens"].tolist() == [5, 6, 0, 0, 0]
    assert row["positions"].tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("seq_len", [1, 7, 64, 1000])
@pytest.mark.parametrize("window", [3, 2**17])
def test_every_pair_is_in_exactly_one_place(monkeypatch, seq_len, window):
    monkeypatch.setattr(packing, "WINDOW", window)
    lengths = np.random.default_rng(0).integers(2, 300, 100)
    ends = np.cumsum(lengths)
    documents = [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]  # every token once
    seen = []
    for row in rows_of(documents, seq_len):
        real = row["segment_ids"] > 0
        assert ((row["targets"] != IGNORE) == real).all()
        assert (row["targets"] == row["tokens"] + 1)[real].all()  # nothing crosses from one document to the next
        assert (np.diff(row["segment_ids"][real]) >= 0).all()
        new_piece = np.diff(row["segment_ids"], prepend=0) != 0
        assert (row["positions"][new_piece] == 0).all()
        assert (np.diff(row["positions"])[~new_piece[1:] & real[1:]] == 1).all()
        seen += row["tokens"][real].tolist()
    assert sorted(seen) == sorted(set(range(ends[-1])) - set((ends - 1).tolist()))


def test_rows_are_filled_as_best_fit_decreasing_fills_them():
    """Against a search over all open rows."""
    lengths = np.random.default_rng(1).integers(1, 65, 500)
    spaces, expected = [], np.zeros(500, int)
    for piece in np.argsort(-lengths, kind="stable"):
        fitting = [row for row in range(len(spaces)) if spaces[row] >= lengths[piece]]
        if not fitting:
            spaces.append(64)
            fitting = [len(spaces) - 1]
        row = min(fitting, key=lambda row: spaces[row])
        spaces[row] -= lengths[piece]
        expected[piece] = row
    found = packing._best_fit_decreasing(lengths, 64)
    assert found.max() == expected.max()
    fill = [sorted(np.bincount(rows, weights=lengths).tolist()) for rows in (found, expected)]
    assert fill[0] == fill[1]


@pytest.mark.parametrize("longest", [1, 5, 60, 64])
def test_rows_of_equal_space_are_filled_from_the_newest_on(longest):
    """A golden order: rows of runs that were begun before are the same."""
    lengths = np.random.default_rng(longest).integers(1, longest + 1, 2000)
    rows_by_space, num_rows, expected = [[] for _ in range(65)], 0, np.zeros(2000, int)
    for piece in np.argsort(-lengths, kind="stable"):
        space = next((space for space in range(lengths[piece], 65) if rows_by_space[space]), None)
        if space is None:
            space, row, num_rows = 64, num_rows, num_rows + 1
        else:
            row = rows_by_space[space].pop()
        rows_by_space[space - lengths[piece]].append(row)
        expected[piece] = row
    np.testing.assert_array_equal(packing._best_fit_decreasing(lengths, 64), expected)


RNG = np.random.default_rng(2)
SHORT_DOCUMENTS = {
    "log-normal, median 250": np.exp(RNG.normal(np.log(250), 1.2, 20_000)),
    "exponential, mean 600": RNG.exponential(600, 20_000),
    "chat turns, 20 to 120": RNG.uniform(20, 120, 20_000),
    "uniform up to a row": RNG.uniform(2, 2048, 20_000),
    "Pareto": RNG.pareto(1.2, 20_000) * 100,
}


@pytest.mark.parametrize("lengths", SHORT_DOCUMENTS.values(), ids=SHORT_DOCUMENTS.keys())
@pytest.mark.parametrize("seq_len", [512, 2048, 8192])
def test_rows_are_at_least_98_percent_full(lengths, seq_len):
    lengths = lengths.astype(np.int64) + 2
    packed = pack(np.cumsum(lengths) - lengths, lengths, seq_len)
    assert packed.lengths.sum() == (lengths - 1).sum()
    assert packed.lengths.sum() / (len(packed) * seq_len) >= 0.98


def test_no_documents_are_no_rows():
    packed = pack(np.zeros(0, np.int64), np.zeros(0, np.int64), 8)
    assert len(packed) == 0
    assert packed.rows.tolist() == [0]
