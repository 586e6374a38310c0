"""Stores packings in the cache, made and read in chunks of documents, however many there are.

The documents of each side of the split are packed in chunks of `CHUNK_WINDOWS` windows, one file per chunk. A small index
has the totals and the start of each chunk, so that chunks are made, and rebuilt, independently of each other.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from llamajax import disk
from llamajax.data import cache, progress
from llamajax.data.rows import packing
from llamajax.data.tasks import MapTasks
from llamajax.data.tokens.stores import SIDES, TokenStore

CHUNK_WINDOWS = 8
"""Number of windows of documents per file: a million documents, about twenty megabytes."""
COUNTED_PARTS = 64
"""Number of parts counted by one call."""
MAX_KNOWN_CHUNKS = 2**10
"""Maximum number of chunk heads that stay in memory after a row was read from them."""

_FOLDER = "packing-3"
"""Folder name with the version of the format; the name of an entry identifies its rows."""


class Totals(NamedTuple):
    """Counts of one side of the split."""

    documents: int
    """Number of documents that become rows."""
    cut: int
    """Number of conversations that exceed a row, so that only their beginning is used."""
    left_out: int
    """Number of conversations without an answer within a row, and of preferences that exceed a row."""
    moved: int
    """Number of documents that an earlier rule put on the other side."""


class Packings:
    """Packings of a store's documents into rows of `seq_len` tokens."""

    def __init__(self, store: TokenStore, seq_len: int, key: str, cache_dir: Path) -> None:
        """Sets the entry of the cache; `key` identifies its rows."""
        self._store, self._seq_len = store, seq_len
        self.entry = cache_dir / _FOLDER / key
        self._path = self.entry / "index"

    def is_there(self) -> bool:
        """Returns whether the packings have been made."""
        return self._path.exists()

    def make(self, run: MapTasks = map) -> None:
        """Makes the packings unless they exist.

        Raises:
            DamagedError: a shard is damaged.
            OSError: the disk fails.
        """
        if self.is_there():
            return
        with disk.locked(self.entry):
            if not self.is_there():
                self._make(run)

    def remake(self, damaged: Path, log: Callable[[str], None]) -> None:
        """Rebuilds one of the files, unless another process did; raises the errors of `make`."""
        read_again()
        with disk.locked(self.entry):
            try:
                cache.check_arrays(damaged)
                return
            except cache.DamagedError as error:
                log(f"damaged    {damaged}: {error.reason}; rebuilding it")
            if damaged == self._path:
                self._make(map)
            else:
                of_sides = (self._known_chunks(side) for side in range(len(SIDES)))
                _pack(next(chunk for chunk in itertools.chain.from_iterable(of_sides) if chunk.path == damaged))

    def read(self) -> "PackingIndex":
        """Returns the totals of the packings.

        Raises:
            DamagedError: the index is damaged.
        """
        return PackingIndex(self._path)

    def _make(self, run: MapTasks) -> None:
        of_parts = self._count(run)
        arrays: dict[str, np.ndarray] = {}
        info: dict[str, Any] = {}
        for number, side in enumerate(SIDES):
            chunks = self._chunks(number, of_parts[:, number, 0])
            packed: list[_Packed] = list(run(_pack, chunks))
            arrays[f"{side}_first_part"] = np.array([chunk.first_part for chunk in chunks], np.int64)
            arrays[f"{side}_passed_over"] = np.array([chunk.num_passed_over for chunk in chunks], np.int64)
            arrays[f"{side}_rows"] = np.array([chunk.rows for chunk in packed], np.int64)
            arrays[f"{side}_sha256"] = cache.hashes_to_array(chunk.sha256 for chunk in packed)
            totals = Totals(*of_parts[:, number].sum(axis=0).tolist())
            info[side] = {**totals._asdict(), "targets": sum(chunk.targets for chunk in packed)}
        cache.write_arrays(self._path, arrays, info)

    def _count(self, run: MapTasks) -> Int64[np.ndarray, "parts sides totals"]:
        num_parts = len(self._store.tokens_of_part)
        parts = [range(at, min(at + COUNTED_PARTS, num_parts)) for at in range(0, num_parts, COUNTED_PARTS)]
        counts = run(_count, [_Count(self._store, self._seq_len, some) for some in parts])
        return np.concatenate([np.zeros((0, len(SIDES), len(Totals._fields)), np.int64), *counts])

    def _known_chunks(self, side: int) -> list["_Chunk"]:
        """Returns the chunks of a side, starting where the index says."""
        arrays = cache.read_arrays(self._path).arrays
        begins = zip(arrays[f"{SIDES[side]}_first_part"][:], arrays[f"{SIDES[side]}_passed_over"][:], strict=True)
        return [self._chunk(side, number, int(part), int(over)) for number, (part, over) in enumerate(begins)]

    def _chunk(self, side: int, number: int, first_part: int, num_passed_over: int) -> "_Chunk":
        size, path = CHUNK_WINDOWS * packing.WINDOW, chunk_path(self.entry, side, number)
        return _Chunk(self._store, self._seq_len, side, size, first_part, num_passed_over, path)

    def _chunks(self, side: int, documents_of_part: Int64[np.ndarray, "parts"]) -> list["_Chunk"]:
        ends = np.cumsum(documents_of_part)
        size = CHUNK_WINDOWS * packing.WINDOW
        chunks = []
        for number, first in enumerate(range(0, int(documents_of_part.sum()), size)):
            part = int(np.searchsorted(ends, first, side="right"))
            passed_over = first - int(ends[part] - documents_of_part[part])
            chunks.append(self._chunk(side, number, part, passed_over))
        return chunks


class PackingIndex:
    """Totals of packings, and access to their rows."""

    def __init__(self, path: Path) -> None:
        """Reads the index.

        Raises:
            DamagedError: it is missing or damaged.
        """
        file = cache.read_arrays(path)
        self.sha256 = file.sha256
        """Hash that identifies the content."""
        self._entry = path.parent
        self._info = file.info
        self._ends = [np.cumsum([0, *file.arrays[f"{side}_rows"][:]]) for side in SIDES]

    def num_rows(self, side: int) -> int:
        """Returns the number of rows on this side of the split."""
        return int(self._ends[side][-1])

    def num_targets(self, side: int) -> int:
        """Returns the number of targets in these rows."""
        return self._info[SIDES[side]]["targets"]

    def totals(self, side: int) -> Totals:
        """Returns the other counts of this side."""
        return Totals(*(self._info[SIDES[side]][name] for name in Totals._fields))

    def pieces(self, side: int, row: int) -> tuple[Int64[np.ndarray, "pieces"], Int32[np.ndarray, "pieces"]]:
        """Returns where the stretches of a row start among all tokens of the source, and how many pairs they have.

        Raises:
            DamagedError: the chunk is damaged.
            OSError: the disk fails.
        """
        number = int(np.searchsorted(self._ends[side], row, side="right")) - 1
        chunk = _chunk(chunk_path(self._entry, side, number)).arrays
        at = row - int(self._ends[side][number])
        first, end = chunk["rows"][at : at + 2].tolist()
        return chunk["starts"][first:end], chunk["lengths"][first:end]


def chunk_path(entry: Path, side: int, number: int) -> Path:
    """Returns the path of a chunk."""
    return entry / f"{SIDES[side]}-{number:06d}.packing"


def read_again() -> None:
    """Drops the cached heads of chunks, after one was rebuilt."""
    _chunk.cache_clear()


@functools.lru_cache(MAX_KNOWN_CHUNKS)
def _chunk(path: Path) -> cache.ArrayFile:
    return cache.read_arrays(path)


@dataclass(frozen=True)
class _Count:
    """Parts to count documents in."""

    store: TokenStore
    seq_len: int
    parts: range


def _count(task: _Count) -> Int64[np.ndarray, "parts sides totals"]:
    counts = []
    for part in task.parts:
        progress.gets_on()
        documents = task.store.documents(part, task.seq_len)
        of_kind = [documents.lengths >= 2, documents.is_cut, documents.is_left_out, documents.is_moved]
        counts.append([[int((documents.sides == side)[kind].sum()) for kind in of_kind] for side in range(len(SIDES))])
    return np.array(counts, np.int64)


@dataclass(frozen=True)
class _Chunk:
    """Documents to pack: at most `size` of one side, from a part on, without the first ones there."""

    store: TokenStore
    seq_len: int
    side: int
    size: int
    first_part: int
    num_passed_over: int
    path: Path


class _Packed(NamedTuple):
    rows: int
    targets: int
    sha256: str


def _pack(chunk: _Chunk) -> _Packed:
    tokens_before = np.cumsum([0, *chunk.store.tokens_of_part])
    starts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    passed_over, missing = chunk.num_passed_over, chunk.size
    for part in range(chunk.first_part, len(tokens_before) - 1):
        progress.gets_on()
        documents = chunk.store.documents(part, chunk.seq_len)
        wanted = np.flatnonzero((documents.sides == chunk.side) & (documents.lengths >= 2))
        wanted = wanted[passed_over : passed_over + missing]
        passed_over = 0
        starts.append(documents.starts[wanted] + tokens_before[part])
        lengths.append(documents.lengths[wanted])
        missing -= len(wanted)
        if not missing:
            break
    packed = packing.pack(np.concatenate(starts), np.concatenate(lengths), chunk.seq_len)
    cache.write_arrays(chunk.path, vars(packed), {}, keep=not chunk.path.exists())
    return _Packed(len(packed), int(packed.lengths.sum()), cache.read_arrays(chunk.path).sha256)
