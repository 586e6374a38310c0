"""Rows of a source from its shards and their packing in the cache; what is found damaged there is made again."""

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from llamajax import disk
from llamajax.data import cache, progress
from llamajax.data.chat import ChatTemplate
from llamajax.data.groups import ANNOUNCED_BYTES, FileGroup
from llamajax.data.packing import Row, fill_row, pack
from llamajax.data.shards import Shard, read_shard, remake, shard_paths, shards_entry
from llamajax.data.sources import Source
from llamajax.data.split import is_held_out
from llamajax.data.tokenizer_base import Tokenizer
from llamajax.errors import DataError, DiskError, UserError

MAX_MAPPED_SHARDS = 2**12
"""Shards that stay mapped after a row was read from them; Linux lets a process have 65,530 maps of any kind."""

_FOLDER = "packing-2"
"""Says how packings are written; the name of an entry says which rows they hold."""
_ROWS = "packing-1"
_SPLIT, _SPACE_SIGNS = "split-2", "space-2"
TRAIN, HELD_OUT = SIDES = ("train", "held_out")
"""Of the split."""

T = TypeVar("T")


class PackedSource:
    """The rows of one source, of both sides of the split."""

    def __init__(
        self,
        source: Source,
        groups: Sequence[FileGroup],
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        cache_dir: Path,
        seq_len: int,
        held_out_fraction: float,
        log: Callable[[str], None],
    ) -> None:
        """Packs the documents of tokenized groups, if that has not been done.

        Raises:
            DataError: the cache cannot be read and what is damaged not be made again.
        """
        self.source = source
        self.seq_len = seq_len
        self._tokenizer, self._template, self._cache_dir, self._log = tokenizer, template, cache_dir, log
        self._held_out_fraction = held_out_fraction
        entries = [shards_entry(group, tokenizer, cache_dir, template) for group in groups]
        self._groups = dict(zip(entries, groups, strict=True))
        self.shards = [path for entry in entries for path in shard_paths(entry)]
        key = cache.key_of(_ROWS, [entry.name for entry in entries], seq_len, held_out_fraction)
        self._entry = cache_dir / _FOLDER / key
        self.counts = self.reading(lambda: Counts.of(self.shards))
        self._shard_starts = np.cumsum([0, *self.counts.tokens_of_shard]).tolist()
        if not all(self._packing_path(side).exists() for side in SIDES):
            self.reading(self._pack)
        self._packings = self.reading(self._read_packings)
        moved = any(packing.info["num_moved"] for packing in self._packings.values())
        other_rules = [_SPLIT] * moved + [_SPACE_SIGNS] * bool(self.counts.space_signs)
        self.rows_key = cache.key_of(key, *other_rules) if other_rules else key
        """Hash of all that decides the rows: files, tokenizer, split and length of the rows. Rules that came later are in
        it where they change a row, so that a run goes on wherever its rows are the same."""

    @property
    def content(self) -> list[str]:
        """What tells the contents of the cached files apart."""
        return [*self.counts.sha256_of_shard, *(packing.sha256 for packing in self._packings.values())]

    @property
    def num_cut(self) -> int:
        """Conversations of which only the beginning is within a row."""
        return sum(packing.info["num_cut"] for packing in self._packings.values())

    def num_left_out(self, side: str) -> int:
        """Conversations without an answer within a row."""
        return self._packings[side].info["num_left_out"]

    def num_rows(self, side: str) -> int:
        """Rows on this side of the split."""
        return len(self._packings[side].arrays["rows"]) - 1

    def num_targets(self, side: str) -> int:
        """Targets in these rows."""
        return self._packings[side].info["num_targets"]

    def sides(self) -> tuple["PackedRows", "PackedRows"]:
        """The rows to train on and the held-out ones."""
        return PackedRows(self, TRAIN), PackedRows(self, HELD_OUT)

    def row(self, side: str, index: int) -> Row:
        """The row, put together; what is damaged of it is made again first.

        Raises:
            DataError: that cannot be done.
            OSError: the disk fails.
        """
        return self.reading(lambda: self._row(self._packings[side].arrays, index))

    def reading(self, read: Callable[[], T]) -> T:
        """What `read` gives, after every damaged file that it comes upon was made again."""
        remade: set[Path] = set()
        while True:
            try:
                return read()
            except cache.DamagedError as error:
                if error.path in remade:
                    raise
                remade.add(error.path)
                self._remake(error.path)

    def _row(self, packing: dict[str, cache.CheckedArray], index: int) -> Row:
        first, end = packing["rows"][index : index + 2]
        pieces, learnt = [], []
        for start, length in zip(packing["starts"][first:end], packing["lengths"][first:end], strict=True):
            number = bisect.bisect_right(self._shard_starts, start) - 1  # a piece lies in one shard, as its document does
            at = start - self._shard_starts[number]
            shard = _shard(self.shards[number])
            pieces.append(shard.tokens[at : at + length + 1])
            if shard.learnt is not None:
                learnt.append(shard.is_learnt(at + 1, at + length + 1))
        return fill_row(pieces, self.seq_len, learnt)

    def _remake(self, damaged: Path) -> None:
        try:
            if damaged.parent == self._entry:
                self._pack()
                self._packings = self._read_packings()
            else:
                group = self._groups[damaged.parent]
                remake(damaged, group, self._tokenizer, self._cache_dir, self._log, self._template)
                _shard.cache_clear()
        except OSError as error:
            raise cache_error(error, self._cache_dir) from error

    def _packing_path(self, side: str) -> Path:
        return self._entry / f"{side}.packing"

    def _read_packings(self) -> dict[str, cache.ArrayFile]:
        return {side: cache.read_arrays(self._packing_path(side)) for side in SIDES}

    def _pack(self) -> None:
        """Packs the training and the held-out documents, unless another process did.

        A text may lie across rows. A conversation does not: what is beyond a row is cut off, and if nothing that is
        learnt is left, all of it.
        """
        with disk.locked(self._entry):
            if self._is_packed():
                return
            is_new = {side: not self._packing_path(side).exists() for side in SIDES}
            if self.counts.text_bytes >= ANNOUNCED_BYTES:
                self._log(f"packing    {self.counts.documents:,} documents of {self.source.key}")
            starts, lengths, kept_lengths, is_left_out, hashes, plain_hashes = [], [], [], [], [], []
            shard_start = 0
            for path in self.shards:  # all that is kept of one is copied, so that it need not stay mapped
                progress.gets_on()
                shard = read_shard(path)
                offsets = shard.offsets[:]
                starts.append(offsets[:-1] + shard_start)
                lengths.append(np.diff(offsets))
                kept_lengths.append(lengths[-1] if shard.learnt is None else np.minimum(lengths[-1], self.seq_len + 1))
                is_left_out.append(shard.first_learnt() >= kept_lengths[-1])
                hashes.append(shard.hashes[:].copy())
                plain_hashes.append(shard.plain_hashes[:].copy())
                shard_start += len(shard.tokens)
            all_starts, all_lengths = np.concatenate(starts), np.concatenate(kept_lengths)
            left_out = np.concatenate(is_left_out)
            cut = ~left_out & (all_lengths < np.concatenate(lengths))
            held_out = np.asarray(is_held_out(np.concatenate(hashes), self._held_out_fraction))
            moved = held_out != is_held_out(np.concatenate(plain_hashes), self._held_out_fraction)
            for side, chosen in ((TRAIN, ~held_out), (HELD_OUT, held_out)):
                packing = pack(all_starts[chosen & ~left_out], all_lengths[chosen & ~left_out], self.seq_len)
                info = {
                    "num_targets": int(packing.lengths.sum()),
                    "num_cut": int((chosen & cut).sum()),
                    "num_left_out": int((chosen & left_out).sum()),
                    "num_moved": int((chosen & moved).sum()),
                }
                cache.write_arrays(self._packing_path(side), vars(packing), info, keep=is_new[side])

    def _is_packed(self) -> bool:
        paths = [self._packing_path(side) for side in SIDES]
        if not all(path.exists() for path in paths):
            return False
        try:
            for path in paths:
                cache.check_arrays(path)
        except cache.DamagedError as error:
            self._log(f"damaged    {error.path}: {error.reason}; making it again")
            return False
        return True


class PackedRows(Sequence[Row]):
    """The rows of one source and one side of the split; a row is put together when it is asked for."""

    def __init__(self, packed: PackedSource, side: str) -> None:
        self._packed = packed
        self._side = side

    def __len__(self) -> int:
        return self._packed.num_rows(self._side)

    def __getitem__(self, index: int) -> Row:  # pyright: ignore[reportIncompatibleMethodOverride] (grain asks for no slice)
        return self._packed.row(self._side, index)


@dataclass(frozen=True)
class Counts:
    """What a source's shards hold."""

    tokens_of_shard: list[int]
    sha256_of_shard: list[str]
    documents: int
    space_signs: int
    """Documents with U+2581."""
    empty: int
    bad: int
    """Records that are left out because something is wrong with them."""
    first_bad: str
    """What is wrong with the first of them."""
    text_bytes: int

    @classmethod
    def of(cls, paths: Sequence[Path]) -> "Counts":
        """Counts what the heads of shards say."""
        heads = [
            (len(shard.tokens), shard.sha256, len(shard.hashes), shard.num_space_signs, shard.num_empty, shard.num_bad,
             shard.first_bad, shard.text_bytes)
            for shard in map(read_shard, paths)
        ]  # fmt: skip
        tokens, sha256s, documents, signs, empty, bad, first_bad, text_bytes = zip(*heads, strict=True)
        return cls(
            tokens_of_shard=list(tokens), sha256_of_shard=list(sha256s), documents=sum(documents), space_signs=sum(signs),
            empty=sum(empty), bad=sum(bad), first_bad=next(filter(None, first_bad), ""), text_bytes=sum(text_bytes),
        )  # fmt: skip


def cache_error(error: OSError, cache_dir: Path) -> UserError:
    """The one line about a cache that cannot be used; sources and tokenizers report their own."""
    kind = DiskError if disk.may_pass(error) else DataError
    return kind(f"data.cache_dir: {error}; make {cache_dir} writable, free space there, or name another")


@functools.lru_cache(MAX_MAPPED_SHARDS)
def _shard(path: Path) -> Shard:
    return read_shard(path)
