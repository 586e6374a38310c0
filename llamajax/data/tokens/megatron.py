"""Megatron-LM's tokenized documents: a `.bin` with the tokens of all sequences, one after the other, and an `.idx` that says
where each begins and which of them are a document.

The layout is that of `megatron/core/datasets/indexed_dataset.py` of Megatron-Core (compared with 0.16.1), little-endian.
An `.idx` is the nine bytes of `MAGIC`; the version, 1, in eight bytes; a byte for the tokens' dtype; the number of sequences
S and of document indices D + 1, in eight bytes each; then int32 [S] lengths in tokens, int64 [S] places in the `.bin` in
bytes, int64 [D + 1] document indices (document d is the sequences from `index[d]` to before `index[d + 1]`) and, in
multimodal files only, int8 [S] modes.

Only the files are Megatron's: the order of samples that its GPT dataset draws from them, with its shuffles and its cutting
of documents into samples, is not imitated. That dataset also takes every sequence for a document of its own, which in the
files of its `tools/preprocess_data.py` it is, unless they were split into sentences.
"""

import itertools
import math
import os
import re
import stat
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int64

from llamajax.data import progress
from llamajax.data.file_array import FileArray, close
from llamajax.disk import cannot_read
from llamajax.errors import DataError

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
TOKEN_DTYPES = {1: np.dtype("u1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"), 8: np.dtype("<u2")}
"""Those that ids of tokens come in, by the byte that says so."""
CHUNK = 2**20
"""Sequences, document indices, or tokens looked at at once: some tens of megabytes."""
HEAD = struct.Struct("<9sQBQQ")
"""An `.idx` up to its arrays."""

_SPAN, _THREADS = 2**25, 8
"""Tokens that a thread looks at before that is told; threads that look at once, since disks are waited for."""

_OTHER_DTYPES = {2: "int8", 6: "float64", 7: "float32"}
_REMEDY = "copy both files again, or make them again"


def paths_of(path: str | Path) -> tuple[Path, Path]:
    """The `.bin` and the `.idx` that a path means: either of the two, or what they begin with."""
    prefix = re.sub(r"\.(bin|idx)$", "", os.path.expanduser(path))
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def split_documents(num_documents: int, split: str) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """The documents to train on, to validate and to test with, as Megatron-Core divides them (its option `--split`).

    Args:
        num_documents: how many there are.
        split: one to three numbers that say how they share, such as 969,30,1; what is left out is 0.

    Returns:
        The first document and the end of each of the three ranges, which follow each other and may be empty.

    Raises:
        ValueError: `split` is something else.
    """
    numbers = [number.strip() for number in split.split(",")]
    weights = [float(number) for number in numbers if re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", number)]
    if not len(weights) == len(numbers) <= 3 or not 0 < sum(weights) < math.inf:
        raise ValueError(f"{split!r} must be one to three numbers, such as 969,30,1, that are not all 0; correct it")
    shares = np.array([*weights, 0.0, 0.0][:3])
    bounds = itertools.accumulate((shares / np.sum(shares)).tolist(), initial=0.0)
    train, validate, test = itertools.pairwise(round(bound * float(num_documents)) for bound in bounds)
    return train, validate, test


class IndexedDataset:
    """A pair of files; all of the index is checked when it is opened, in little memory.

    Slices of the arrays are read when they are asked for. While it is open, the files must stay as they are.
    """

    def __init__(self, path: str | Path) -> None:
        """Opens the pair that `path` means, see `paths_of`.

        Raises:
            DataError: a file is missing, is not what it should be, or the two do not belong together.
            DiskError: the disk fails.
        """
        self.bin_path, self.idx_path = paths_of(path)
        index_bytes, num_bytes = _size(self.idx_path), _size(self.bin_path)
        try:
            with self.idx_path.open("rb") as file:
                head = _read_head(self.idx_path, file.read(HEAD.size), index_bytes)
                _check_sequences(self.idx_path, file, head, self.bin_path, num_bytes)
                _check_documents(self.idx_path, file, head)
        except OSError as error:
            raise cannot_read(error, self.idx_path, _REMEDY) from error
        self.dtype = head.dtype
        """Of the tokens."""
        for path in (self.idx_path, self.bin_path):
            close(path)  # it may be another file than the one of that name before
        self.tokens = FileArray(self.bin_path, head.dtype, num_bytes // head.dtype.itemsize)
        """[num_tokens] of all sequences, in order."""
        self.sequence_lengths = self._in_index("<i4", head.num_sequences, head.lengths_at)
        """int32 [num_sequences]."""
        self.document_indices = self._in_index("<i8", head.num_indices, head.indices_at)
        """int64 [num_documents + 1]: the first sequence of each document, and the end of the last one's."""
        self.modes = self._in_index("i1", head.num_sequences, head.modes_at) if head.has_modes else None
        """int8 [num_sequences], of a multimodal file."""
        self._pointers = self._in_index("<i8", head.num_sequences, head.pointers_at)

    def _in_index(self, dtype: str, length: int, at: int) -> FileArray:
        return FileArray(self.idx_path, np.dtype(dtype), length, at)

    @property
    def num_documents(self) -> int:
        """Documents, of any number of sequences each."""
        return len(self.document_indices) - 1

    @property
    def num_sequences(self) -> int:
        """Sequences of all documents."""
        return len(self.sequence_lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.tokens)

    def document_offsets(self, first: int, end: int) -> Int64[np.ndarray, "{end}-{first}+1"]:
        """Where documents `first` to `end` begin: document first + i is `tokens[offsets[i]:offsets[i + 1]]`."""
        assert 0 <= first <= end <= self.num_documents
        sequences = self.document_indices[first : end + 1]
        offsets = np.full(len(sequences), self.num_tokens, np.int64)
        begun = sequences[sequences < self.num_sequences]  # the others end where the file does
        if len(begun):
            pointers = self._pointers[int(begun[0]) : int(begun[-1]) + 1]
            offsets[: len(begun)] = pointers[begun - begun[0]] // self.dtype.itemsize
        return offsets

    def id_range(self, told: Callable[[int], None]) -> tuple[int, int] | None:
        """The smallest and the largest id of all tokens, which are read for it; None of no tokens.

        Args:
            told: takes how many further bytes were read.

        Raises:
            DataError: the file was changed meanwhile.
            DiskError: the disk fails.
        """
        found = []
        starts = range(0, self.num_tokens, _SPAN)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ids") as threads:
            for start, smallest_largest in zip(starts, threads.map(self._id_range_from, starts), strict=True):
                found.append(smallest_largest)
                told(min(_SPAN, self.num_tokens - start) * self.dtype.itemsize)
        return (min(smallest for smallest, _ in found), max(largest for _, largest in found)) if found else None

    def _id_range_from(self, start: int) -> tuple[int, int]:
        """`id_range` of the stretch that begins at this token."""
        end = min(start + _SPAN, self.num_tokens)
        ranges = [(ids.min(), ids.max()) for ids in map(self._ids, range(start, end, CHUNK), itertools.repeat(end))]
        return int(min(smallest for smallest, _ in ranges)), int(max(largest for _, largest in ranges))

    def _ids(self, start: int, end: int) -> np.ndarray:
        """The tokens from `start` on, `CHUNK` of them or those before `end`."""
        progress.gets_on()
        try:
            return self.tokens[start : min(start + CHUNK, end)]
        except OSError as error:
            raise cannot_read(error, self.bin_path, _REMEDY) from error

    def first_outside(self, vocab_size: int) -> tuple[int, int] | None:
        """The first token whose id is not one of `vocab_size`, and its document; None if there is none."""
        for start in range(0, self.num_tokens, CHUNK):
            ids = self._ids(start, self.num_tokens)
            if (wrong := (ids < 0) | (ids >= vocab_size)).any():
                at = int(np.argmax(wrong))
                return int(ids[at]), self._document_of(start + at)
        return None

    def _document_of(self, token: int) -> int:
        for first in range(0, self.num_documents, CHUNK):
            offsets = self.document_offsets(first, min(first + CHUNK, self.num_documents))
            if token < offsets[-1]:
                return first + int(np.searchsorted(offsets, token, side="right")) - 1
        raise AssertionError("the documents reach to the last token")

    def sequences_of(self, document: int) -> slice:
        """A document's part of `sequence_lengths` and `modes`."""
        assert 0 <= document < self.num_documents
        return slice(*self.document_indices[document : document + 2].tolist())


class _Head(NamedTuple):
    """What an index says of itself, and where its arrays lie, bytes."""

    dtype: np.dtype
    num_sequences: int
    num_indices: int
    has_modes: bool

    @property
    def lengths_at(self) -> int:
        return HEAD.size

    @property
    def pointers_at(self) -> int:
        return self.lengths_at + 4 * self.num_sequences

    @property
    def indices_at(self) -> int:
        return self.pointers_at + 8 * self.num_sequences

    @property
    def modes_at(self) -> int:
        return self.indices_at + 8 * self.num_indices


def _size(path: Path) -> int:
    """Bytes of a file.

    Raises:
        DataError: it is not there, or is no file.
        DiskError: the disk fails.
    """
    remedy = "name a .bin and an .idx that lie side by side, or what both begin with"
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise DataError(f"{path}: is not a regular file; {remedy}")
        with path.open("rb"):  # which may not be allowed
            return about.st_size
    except OSError as error:
        raise cannot_read(error, path, remedy) from error


def _read_head(path: Path, begin: bytes, num_bytes: int) -> _Head:
    """The head of an index that has `num_bytes`, which must be what the head asks for."""
    if begin[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: does not begin with MMIDIDX, as Megatron-LM's .idx files do; name one of those")
    if len(begin) < HEAD.size:
        raise DataError(f"{path}: ends within its head, after {len(begin)} bytes; {_REMEDY}")
    _, version, code, num_sequences, num_indices = HEAD.unpack(begin)
    if version != VERSION:
        raise DataError(f"{path}: is of version {version}, but only {VERSION} is known; {_REMEDY}")
    if code not in TOKEN_DTYPES:
        kind = _OTHER_DTYPES.get(code, f"a dtype of the unknown number {code}")
        known = ", ".join(dtype.name for dtype in TOKEN_DTYPES.values())
        raise DataError(f"{path}: holds {kind}, but ids of tokens must be {known}; name a file of tokens, or make it again")
    if num_indices < 1:
        raise DataError(f"{path}: has no document indices, of which there must be one more than documents; {_REMEDY}")
    plain = HEAD.size + 12 * num_sequences + 8 * num_indices
    if num_bytes not in (plain, plain + num_sequences):
        raise DataError(
            f"{path}: has {num_bytes:,} bytes, but {num_sequences:,} sequences and {num_indices:,} document indices take"
            f" {plain:,}, or {plain + num_sequences:,} with modes; {_REMEDY}"
        )
    return _Head(TOKEN_DTYPES[code], num_sequences, num_indices, num_bytes > plain)


def _check_sequences(path: Path, file: BinaryIO, head: _Head, bin_path: Path, bin_bytes: int) -> None:
    """Raises `DataError` unless the sequences follow each other from the beginning of the `.bin` to its end."""
    end = 0
    for first in range(0, head.num_sequences, CHUNK):
        count = min(CHUNK, head.num_sequences - first)
        lengths = _read(path, file, head.lengths_at + 4 * first, "<i4", count)
        pointers = _read(path, file, head.pointers_at + 8 * first, "<i8", count)
        if lengths.min() < 0:
            at = int(np.argmax(lengths < 0))
            raise DataError(f"{path}: sequence {first + at} has {lengths[at]} tokens, which must not be negative; {_REMEDY}")
        ends = end + np.cumsum(lengths, dtype=np.int64) * head.dtype.itemsize
        begins = np.concatenate([[end], ends[:-1]])
        if (pointers != begins).any():
            at = int(np.argmax(pointers != begins))
            raise DataError(
                f"{path}: sequence {first + at} begins at byte {pointers[at]:,} of the .bin, but must begin at"
                f" {begins[at]:,}, where the one before it ends; {_REMEDY}"
            )
        end = int(ends[-1])
        if end > bin_bytes:
            break
    if end != bin_bytes:
        raise DataError(f"{bin_path}: has {bin_bytes:,} bytes, but the sequences in {path} reach to {end:,}; {_REMEDY}")


def _check_documents(path: Path, file: BinaryIO, head: _Head) -> None:
    """Raises `DataError` unless the documents follow each other from the first sequence to the end of the last."""
    last = 0
    for first in range(0, head.num_indices, CHUNK):
        count = min(CHUNK, head.num_indices - first)
        indices = _read(path, file, head.indices_at + 8 * first, "<i8", count)
        if first == 0 and indices[0] != 0:
            raise DataError(f"{path}: the first document begins at sequence {indices[0]:,}, but must at 0; {_REMEDY}")
        before = np.concatenate([[last], indices[:-1]])
        if (indices < before).any():
            at = int(np.argmax(indices < before))
            raise DataError(
                f"{path}: document {first + at - 1} ends at sequence {indices[at]:,}, before its beginning at"
                f" {before[at]:,}; {_REMEDY}"
            )
        last = int(indices[-1])
    if last != head.num_sequences:
        raise DataError(
            f"{path}: the last document ends at sequence {last:,}, but must at {head.num_sequences:,}, where the file does;"
            f" {_REMEDY}"
        )


def _read(path: Path, file: BinaryIO, at: int, dtype: str, count: int) -> np.ndarray:
    progress.gets_on()
    file.seek(at)
    content = file.read(count * np.dtype(dtype).itemsize)
    if len(content) < count * np.dtype(dtype).itemsize:
        raise DataError(f"{path}: changed while it was read; run again once it no longer changes")
    return np.frombuffer(content, dtype)
