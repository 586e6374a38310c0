"""Builds the rows of a source from its tokens and its packing in the cache; damaged files are rebuilt."""

import bisect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from llamajax import disk
from llamajax.data import cache
from llamajax.data.documents.file_groups import ANNOUNCED_BYTES
from llamajax.data.rows.packing import Row, fill_row
from llamajax.data.rows.packing_cache import PackingIndex, Packings
from llamajax.data.rows.preferences import fill_preferences
from llamajax.data.rows.prompts import PromptIndex, prompt_row
from llamajax.data.tasks import MapTasks
from llamajax.data.tokens.source_tokens import SourceTokens
from llamajax.data.tokens.stores import HELD_OUT, SIDES, TRAIN, ShardStore
from llamajax.errors import DataError, DiskError, UserError

_ROWS = "packing-1"
_SPLIT, _SPACE_SIGNS = "split-2", "space-2"


class PackedSource:
    """Rows of one source, on both sides of the split."""

    def __init__(
        self, tokens: SourceTokens, cache_dir: Path, seq_len: int, log: Callable[[str], None], run: MapTasks = map
    ) -> None:
        """Packs the documents by calls of `run`, unless already done; a prompt has a row of its own.

        `seq_len` is the number of tokens of the data per row: for prompts, of the longest one that is kept.

        Raises:
            DataError: the cache cannot be read, and a damaged file cannot be rebuilt.
        """
        self.tokens, self.source, self.seq_len = tokens, tokens.source, seq_len
        self._cache_dir, self._log = cache_dir, log
        key = cache.key_of(_ROWS, tokens.key, seq_len, tokens.split)
        self._packings = Packings(tokens.store, seq_len, cache.key_of(key, tokens.content), cache_dir)
        self._packing = cache.repaired(lambda: self._pack(run), self._remake)
        self._part_starts = np.cumsum([0, *tokens.store.tokens_of_part]).tolist()
        moved = any(self._packing.totals(side).moved for side in range(len(SIDES)))
        other_rules = [_SPLIT] * moved + [_SPACE_SIGNS] * bool(tokens.counts.space_signs)
        self.rows_key = cache.key_of(key, *other_rules) if other_rules else key
        """Hash of everything that decides the rows: files, tokenizer, split and row length.

        Rules that were added later are included only if they change a row, so that a run continues wherever its rows are
        equal.
        """

    @property
    def content(self) -> list[str]:
        """Hashes that identify the contents of the cached files."""
        return [*self.tokens.content, self._packing.sha256]

    @property
    def num_cut(self) -> int:
        """Number of conversations that exceed a row, so that only their beginning is used."""
        return sum(self._packing.totals(side).cut for side in range(len(SIDES)))

    def num_left_out(self, side: str) -> int:
        """Returns the number of conversations without an answer within a row, or of preferences or prompts that exceed a
        row."""
        return self._packing.totals(SIDES.index(side)).left_out

    def num_rows(self, side: str) -> int:
        """Returns the number of rows on this side of the split."""
        return self._packing.num_rows(SIDES.index(side))

    def num_targets(self, side: str) -> int:
        """Returns the number of targets in these rows."""
        return self._packing.num_targets(SIDES.index(side))

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt; 0 without prompts."""
        return self._packing.longest if isinstance(self._packing, PromptIndex) else 0

    @property
    def train_places(self) -> "RowPlaces":
        """Training rows, as places."""
        return RowPlaces(self, TRAIN)

    @property
    def held_out_rows(self) -> "PackedRows":
        """Held-out rows."""
        return PackedRows(self, HELD_OUT)

    def pairs_of_documents(self, side: str, index: int) -> Int32[np.ndarray, "pieces"]:
        """Returns the number of pairs of each document in a row, or of each sequence of a preference, or of a prompt; raises
        the errors of `row`."""
        if self.source.format.has_prompts:
            return np.array([len(self.row(side, index)["tokens"])], np.int32)
        if self.source.format.has_preferences:
            segment_ids = self.row(side, index)["segment_ids"]
            return np.unique(segment_ids[segment_ids > 0], return_counts=True)[1].astype(np.int32)
        return cache.repaired(lambda: self._packing.pieces(SIDES.index(side), index)[1], self._remake)

    def row(self, side: str, index: int) -> Row:
        """Builds a row; its damaged files are rebuilt first.

        Raises:
            DataError: a damaged file cannot be rebuilt.
            OSError: the disk fails.
        """
        return cache.repaired(lambda: self._row(SIDES.index(side), index), self._remake)

    def _pack(self, run: MapTasks) -> PackingIndex | PromptIndex:
        if self.source.format.has_prompts:
            assert isinstance(self.tokens.store, ShardStore)
            return PromptIndex(self.tokens.store, self.seq_len)
        counts = self.tokens.counts
        if not self._packings.is_there() and max(counts.text_bytes, 2 * counts.tokens) >= ANNOUNCED_BYTES:
            self._log(f"packing    {counts.documents:,} documents of {self.source.key}")
        self._packings.make(run)
        return self._packings.read()

    def _row(self, side: int, index: int) -> Row:
        pieces = []
        for start, length in zip(*self._packing.pieces(side, index), strict=True):
            part = bisect.bisect_right(self._part_starts, start) - 1  # each document, and so each piece, is in one part
            pieces.append(self.tokens.store.piece(part, int(start) - self._part_starts[part], int(length)))
        if self.source.format.has_prompts:
            return prompt_row(pieces[0])
        if self.source.format.has_preferences:
            return fill_preferences(pieces, self.seq_len)
        learnt = [piece.learnt for piece in pieces if piece.learnt is not None]
        return fill_row([piece.tokens for piece in pieces], self.seq_len, learnt)

    def _remake(self, damaged: Path) -> None:
        try:
            if damaged.parent == self._packings.entry:
                self._packings.remake(damaged, self._log)
            else:
                self.tokens.remake(damaged)
        except OSError as error:
            raise cache_error(error, self._cache_dir) from error


class RowPlace(NamedTuple):
    """Identifies a row of a source; its content is read on demand."""

    packed: PackedSource
    side: str
    number: int

    def row(self) -> Row:
        """See `PackedSource.row`."""
        return self.packed.row(self.side, self.number)

    def pairs_of_documents(self) -> Int32[np.ndarray, "pieces"]:
        """See `PackedSource.pairs_of_documents`."""
        return self.packed.pairs_of_documents(self.side, self.number)


class RowPlaces(Sequence[RowPlace]):
    """Places of the rows of one source on one side of the split; none is read."""

    def __init__(self, packed: PackedSource, side: str) -> None:
        self._packed = packed
        self._side = side

    def __len__(self) -> int:
        return self._packed.num_rows(self._side)

    def __getitem__(self, index: int) -> RowPlace:  # pyright: ignore[reportIncompatibleMethodOverride] (as below)
        return RowPlace(self._packed, self._side, index)


class PackedRows(Sequence[Row]):
    """Rows of one source on one side of the split; each row is built on access."""

    def __init__(self, packed: PackedSource, side: str) -> None:
        self._packed = packed
        self._side = side

    def __len__(self) -> int:
        return self._packed.num_rows(self._side)

    def __getitem__(self, index: int) -> Row:  # pyright: ignore[reportIncompatibleMethodOverride] (grain asks for no slice)
        return self._packed.row(self._side, index)


def cache_error(error: OSError, cache_dir: Path) -> UserError:
    """Returns the one-line error for an unusable cache; sources and tokenizers report their own errors."""
    kind = DiskError if disk.may_pass(error) else DataError
    return kind(f"data.cache_dir: {error}; make {cache_dir} writable, free space there, or name another")
