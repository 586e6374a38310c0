"""Numbers all documents that the first pass kept, over all parts, and records which of them are copies."""

import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt32, UInt64

from llamajax.data import cache
from llamajax.data.cleaning.scan import Part

COPIES_FILE, CANDIDATES_FILE, DECISIONS_FILE = "copies", "candidates", "decisions"


class Survivors:
    """Documents of all scanned chunks, numbered from 0 in order of parts and of their positions in these."""

    def __init__(self, entry: Path) -> None:
        """Reads the file of `write_copies`.

        Raises:
            DamagedError: the file is missing or damaged.
        """
        self._entry = entry
        self._file = cache.read_arrays(entry / COPIES_FILE)
        self._chunks: list[tuple[int, str, int]] = [(part, name, size) for part, name, size in self._file.info["chunks"]]
        self._starts = np.cumsum([0, *(size for _, _, size in self._chunks)]).tolist()
        self._open: dict[int, dict[str, cache.CheckedArray]] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def firsts(self) -> Int64[np.ndarray, "documents"]:
        """For every document, the first document that it is a copy of, possibly itself."""
        return self._file.arrays["first"][:]

    def positions_of(self, part: Part) -> Iterator[tuple[int, int, Int64[np.ndarray, "chunk"]]]:
        """Yields, for each chunk of the part in order, the numbers of its first document and of the one after its last.

        The third value has the positions of its documents in the part.
        """
        return self._of(part, "positions")

    def sizes_of(self, part: Part) -> Iterator[tuple[int, int, Int64[np.ndarray, "chunk"]]]:
        """Yields the same with the sizes of the documents in bytes."""
        return self._of(part, "sizes")

    def _of(self, part: Part, name: str) -> Iterator[tuple[int, int, np.ndarray]]:
        first = bisect.bisect_left(self._chunks, part.number, key=lambda chunk: chunk[0])
        end = bisect.bisect_right(self._chunks, part.number, key=lambda chunk: chunk[0])
        for chunk in range(first, end):
            yield self._starts[chunk], self._starts[chunk + 1], self._arrays(chunk)[name][:]

    def keys(self, band: int) -> UInt64[np.ndarray, "documents"]:
        """Returns the hashes of one band of all signatures."""
        keys = [np.zeros(0, np.uint64)]
        for chunk, (_, _, size) in enumerate(self._chunks):
            keys.append(self._arrays(chunk)["bands"][band * size : (band + 1) * size])
        return np.concatenate(keys)

    def signatures(self, documents: Sequence[int], length: int) -> UInt32[np.ndarray, "members {length}"]:
        """Returns the signatures of these documents."""
        rows = np.zeros((len(documents), length), np.uint32)
        for place, document in enumerate(documents):
            chunk = bisect.bisect_right(self._starts, document) - 1
            row = document - self._starts[chunk]
            rows[place] = self._arrays(chunk)["signatures"][row * length : (row + 1) * length]
        return rows

    def _arrays(self, chunk: int) -> dict[str, cache.CheckedArray]:
        if chunk not in self._open:
            if len(self._open) >= 2**12:
                self._open.clear()
            self._open[chunk] = cache.read_arrays(self._entry / self._chunks[chunk][1]).arrays
        return self._open[chunk]


def write_copies(entry: Path, parts: Sequence[Part], *, look: bool) -> None:
    """Writes the list of all chunks and, for every document, the first document that it is a copy of.

    Without `look`, every document counts as its own first. Takes 40 bytes of memory per document. The entry's lock must be
    held.
    """
    chunks = [(part.number, path) for part in parts for path in part.chunk_paths()]
    files = [cache.read_arrays(path) for _, path in chunks]
    sizes = [len(file.arrays["positions"]) for file in files]
    first = np.arange(sum(sizes))
    if look:
        halves = np.concatenate([np.zeros(0, np.uint64), *(file.arrays["digests"][:] for file in files)]).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable, so the first of equals comes first
        is_other = np.ones(len(order), bool)
        is_other[1:] = (halves[order[1:]] != halves[order[:-1]]).any(axis=1)
        first[order] = order[np.maximum.accumulate(np.where(is_other, np.arange(len(order)), 0))]
    listed = [[number, path.name, size] for (number, path), size in zip(chunks, sizes, strict=True)]
    cache.write_arrays(entry / COPIES_FILE, {"first": first}, {"chunks": listed})
