"""Packs documents into rows of equal length without losing tokens or mixing documents.

A document of n tokens has n - 1 pairs of a token and its next token. Pairs that fill whole rows are cut off its front. The
rest shares a row with the rests of other documents, chosen by best fit in decreasing length (Johnson 1973; for language
models: Ding et al., arXiv:2404.10830). Rows depend only on the documents and `seq_len`, never on a seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from llamajax.step.batch import IGNORE

WINDOW = 2**17
"""Number of documents packed together: enough to fill rows, few enough to keep rows local on the disk."""

Row = dict[str, Int32[np.ndarray, "T"]]
"""A row with `tokens`; `targets`, which are `IGNORE` where nothing is trained; `segment_ids`, which count documents from 1
(or say what the sequences are, see `preferences.py`) and are 0 for padding; and `positions`, which start at 0 in every
segment."""


@dataclass(frozen=True)
class Packing:
    """Assignment of stretches of documents to rows.

    Piece p has the `lengths[p]` pairs that start with token `starts[p]`; row r holds pieces `rows[r]` to `rows[r + 1]`.
    """

    rows: Int64[np.ndarray, "ends"]
    """First piece of each row, then the number of pieces."""
    starts: Int64[np.ndarray, "pieces"]
    """Index of each piece's first token among all tokens."""
    lengths: Int32[np.ndarray, "pieces"]
    """Number of pairs of each piece, at most `seq_len`."""

    def __len__(self) -> int:
        return len(self.rows) - 1


def pack(starts: Int64[np.ndarray, "documents"], lengths: Int64[np.ndarray, "documents"], seq_len: int) -> Packing:
    """Packs documents with best fit into few rows, `WINDOW` documents at a time.

    Args:
        starts: index of each document's first token among all tokens.
        lengths: number of tokens of each document, at least 2.
        seq_len: pairs per row.
    """
    windows = [
        _pack_window(starts[at : at + WINDOW], lengths[at : at + WINDOW], seq_len) for at in range(0, len(lengths), WINDOW)
    ]
    sizes = np.concatenate([np.zeros(1, np.int64), *(np.diff(window.rows) for window in windows)])
    return Packing(
        rows=np.cumsum(sizes),
        starts=np.concatenate([np.zeros(0, np.int64), *(window.starts for window in windows)]),
        lengths=np.concatenate([np.zeros(0, np.int32), *(window.lengths for window in windows)]),
    )


def _pack_window(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> Packing:
    pairs = lengths - 1
    num_full, rest = np.divmod(pairs, seq_len)
    first_full = np.cumsum(num_full) - num_full
    number_in_document = np.arange(num_full.sum()) - np.repeat(first_full, num_full)
    full_starts = np.repeat(starts, num_full) + number_in_document * seq_len

    has_rest = rest > 0
    rest_lengths = rest[has_rest]
    rest_starts = (starts + num_full * seq_len)[has_rest]
    row_of_rest = _best_fit_decreasing(rest_lengths, seq_len)
    by_row = np.argsort(row_of_rest, kind="stable")  # within a row, documents stay in order
    return Packing(
        rows=np.concatenate([np.arange(len(full_starts)), len(full_starts) + _group_starts(row_of_rest[by_row])]),
        starts=np.concatenate([full_starts, rest_starts[by_row]]),
        lengths=np.concatenate([np.full(len(full_starts), seq_len), rest_lengths[by_row]]).astype(np.int32),
    )


def _group_starts(sorted_groups: np.ndarray) -> np.ndarray:
    """Returns where each of the groups 0, 1, ... begins in the sorted list of group numbers, and where the last one ends."""
    num_groups = int(sorted_groups[-1]) + 1 if len(sorted_groups) else 0
    return np.searchsorted(sorted_groups, np.arange(num_groups + 1))


def _best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each piece, int64: longest piece first, each into the fullest row that has room; of equally full
    rows, into the one that reached this size last.

    Pieces of equal length are placed together: the row that just took one is the fullest with room for the next, until it is
    full, so whole rows are filled at a time. Rows are grouped by free space, and the spaces that occur are the bits of one
    integer, so the smallest sufficient space is found by a shift and the lowest set bit.
    """
    rows_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0
    num_rows = 0
    row_of_next: list[int] = []

    def keep(rows: list[int], space: int) -> None:
        nonlocal spaces
        if space and rows:
            rows_by_space[space] += rows
            spaces |= 1 << space

    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            large_enough = spaces >> length
            space = length + (large_enough & -large_enough).bit_length() - 1 if large_enough else capacity
            per_row = space // length
            wanted = -(-count // per_row)
            if large_enough:
                rows = rows_by_space[space][: -wanted - 1 : -1]
                del rows_by_space[space][-wanted:]
                if not rows_by_space[space]:
                    spaces ^= 1 << space
            else:
                rows = list(range(num_rows, num_rows + wanted))
                num_rows += wanted
            in_last = min(count, len(rows) * per_row) - (len(rows) - 1) * per_row
            row_of_next += [row for row in rows[:-1] for _ in range(per_row)] + rows[-1:] * in_last
            keep(rows[:-1], space - per_row * length)
            keep(rows[-1:], space - in_last * length)
            count -= (len(rows) - 1) * per_row + in_last
    row_of_piece = np.zeros(len(lengths), np.int64)
    row_of_piece[np.argsort(-lengths, kind="stable")] = row_of_next
    return row_of_piece


def fill_row(pieces: Sequence[Integer[np.ndarray, "_"]], seq_len: int, learnt: Sequence[Bool[np.ndarray, "_"]] = ()) -> Row:
    """Builds a row from stretches of tokens; each has one more token than positions in the row, its last target.

    `learnt` says which targets of each stretch are trained on, one entry fewer than tokens; without it all are.
    """
    row = {name: np.zeros(seq_len, np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    row["targets"].fill(IGNORE)
    if pieces:
        lengths = np.array([len(piece) - 1 for piece in pieces])
        ends = np.cumsum(lengths)
        end = ends[-1]
        row["tokens"][:end] = np.concatenate([piece[:-1] for piece in pieces])
        row["targets"][:end] = np.concatenate([piece[1:] for piece in pieces])
        row["segment_ids"][:end] = np.repeat(np.arange(1, len(pieces) + 1), lengths)
        row["positions"][:end] = np.arange(end) - np.repeat(ends - lengths, lengths)
        if learnt:
            row["targets"][:end][~np.concatenate(learnt)] = IGNORE
    return row
