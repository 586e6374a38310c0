"""Reads Megatron-LM's tokenized documents.

The `.bin` file has the tokens of all sequences, one after the other. The `.idx` file says where each sequence begins and
which sequences form a document.

The layout is that of `megatron/core/datasets/indexed_dataset.py` of Megatron-Core (compared with 0.16.1), little-endian.
An `.idx` is the nine bytes of `MAGIC`; the version, 1, in eight bytes; a byte for the tokens' dtype; the number of sequences
S and of document indices D + 1, in eight bytes each; then int32 [S] lengths in tokens, int64 [S] places in the `.bin` in
bytes, int64 [D + 1] document indices (document d is the sequences from `index[d]` to before `index[d + 1]`) and, in
multimodal files only, int8 [S] modes.

Only the file format is Megatron's. The order of samples that its GPT dataset draws from the files, its shuffling, and its
cutting of documents into samples are not imitated. That dataset also treats every sequence as a document of its own; in
files of its `tools/preprocess_data.py` a sequence is a document, unless the documents were split into sentences.
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
"""Integer dtypes of token ids, by their code in the file."""
CHUNK = 2**20
"""Number of sequences, document indices, or tokens checked at a time: some tens of megabytes."""
HEAD = struct.Struct("<9sQBQQ")
"""Head of an `.idx` file, before its arrays."""

_SPAN, _THREADS = 2**25, 8
"""Number of tokens that a thread checks between progress reports, and number of threads, which mostly wait for the disk."""

_OTHER_DTYPES = {2: "int8", 6: "float64", 7: "float32"}
_REMEDY = "copy both files again, or rebuild them"


def paths_of(path: str | Path) -> tuple[Path, Path]:
    """Returns the `.bin` and the `.idx` of a path that names either of them or their common prefix."""
    prefix = re.sub(r"\.(bin|idx)$", "", os.path.expanduser(path))
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def split_documents(num_documents: int, split: str) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Returns the documents for training, validation and testing, as Megatron-Core divides them (its option `--split`).

    Args:
        num_documents: number of documents.
        split: one to three numbers that give the proportions, such as 969,30,1; missing ones are 0.

    Returns:
        The first document and the end of each of the three ranges, which follow each other and may be empty.

    Raises:
        ValueError: `split` has another form.
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
    """A pair of files. Opening it checks the whole index, in little memory.

    Slices of the arrays are read on access. The files must not change while it is open.
    """

    def __init__(self, path: str | Path) -> None:
        """Opens the pair that `path` names, see `paths_of`.

        Raises:
            DataError: a file is missing or invalid, or the two do not belong together.
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
        """Dtype of the tokens."""
        for path in (self.idx_path, self.bin_path):
            close(path)  # a file of this name may have been replaced
        self.tokens = FileArray(self.bin_path, head.dtype, num_bytes // head.dtype.itemsize)
        """Tokens of all sequences, in order, [num_tokens]."""
        self.sequence_lengths = self._in_index("<i4", head.num_sequences, head.lengths_at)
        """Number of tokens of each sequence, int32 [num_sequences]."""
        self.document_indices = self._in_index("<i8", head.num_indices, head.indices_at)
        """First sequence of each document, then the end of the last document, int64 [num_documents + 1]."""
        self.modes = self._in_index("i1", head.num_sequences, head.modes_at) if head.has_modes else None
        """Mode of each sequence in a multimodal file, int8 [num_sequences]."""
        self._pointers = self._in_index("<i8", head.num_sequences, head.pointers_at)

    def _in_index(self, dtype: str, length: int, at: int) -> FileArray:
        return FileArray(self.idx_path, np.dtype(dtype), length, at)

    @property
    def num_documents(self) -> int:
        """Number of documents, of any number of sequences each."""
        return len(self.document_indices) - 1

    @property
    def num_sequences(self) -> int:
        """Number of sequences of all documents."""
        return len(self.sequence_lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return len(self.tokens)

    def document_offsets(self, first: int, end: int) -> Int64[np.ndarray, "{end}-{first}+1"]:
        """Returns where documents `first` to `end` begin: document first + i is `tokens[offsets[i]:offsets[i + 1]]`."""
        assert 0 <= first <= end <= self.num_documents
        sequences = self.document_indices[first : end + 1]
        offsets = np.full(len(sequences), self.num_tokens, np.int64)
        begun = sequences[sequences < self.num_sequences]  # later ones are empty, at the end of the file
        if len(begun):
            pointers = self._pointers[int(begun[0]) : int(begun[-1]) + 1]
            offsets[: len(begun)] = pointers[begun - begun[0]] // self.dtype.itemsize
        return offsets

    def id_range(self, told: Callable[[int], None]) -> tuple[int, int] | None:
        """Reads all tokens and returns the smallest and the largest id; None if there are no tokens.

        Args:
            told: receives the number of further bytes read.

        Raises:
            DataError: the file changed meanwhile.
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
        """Returns the `id_range` of the stretch that begins at this token."""
        end = min(start + _SPAN, self.num_tokens)
        ranges = [(ids.min(), ids.max()) for ids in map(self._ids, range(start, end, CHUNK), itertools.repeat(end))]
        return int(min(smallest for smallest, _ in ranges)), int(max(largest for _, largest in ranges))

    def _ids(self, start: int, end: int) -> np.ndarray:
        """Returns the tokens from `start` on: `CHUNK` of them, or the ones before `end`."""
        progress.gets_on()
        try:
            return self.tokens[start : min(start + CHUNK, end)]
        except OSError as error:
            raise cannot_read(error, self.bin_path, _REMEDY) from error

    def first_outside(self, vocab_size: int) -> tuple[int, int] | None:
        """Returns the first id outside a vocabulary of `vocab_size`, and its document; None if all are inside."""
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
        """Returns a document's slice of `sequence_lengths` and `modes`."""
        assert 0 <= document < self.num_documents
        return slice(*self.document_indices[document : document + 2].tolist())


class _Head(NamedTuple):
    """Head of an index, and the offsets of its arrays in bytes."""

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
    """Returns the size of a file in bytes.

    Raises:
        DataError: it does not exist or is not a file.
        DiskError: the disk fails.
    """
    remedy = "name a .bin and an .idx in the same directory, or their common prefix"
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise DataError(f"{path}: is not a regular file; {remedy}")
        with path.open("rb"):  # access may be denied
            return about.st_size
    except OSError as error:
        raise cannot_read(error, path, remedy) from error


def _read_head(path: Path, begin: bytes, num_bytes: int) -> _Head:
    """Returns the head of an index of `num_bytes`, which must be the size that the head implies."""
    if begin[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: does not begin with MMIDIDX, as Megatron-LM's .idx files do; name one of those")
    if len(begin) < HEAD.size:
        raise DataError(f"{path}: ends within its head, after {len(begin)} bytes; {_REMEDY}")
    _, version, code, num_sequences, num_indices = HEAD.unpack(begin)
    if version != VERSION:
        raise DataError(f"{path}: has version {version}, but only {VERSION} is supported; {_REMEDY}")
    if code not in TOKEN_DTYPES:
        kind = _OTHER_DTYPES.get(code, f"an unknown dtype (code {code})")
        known = ", ".join(dtype.name for dtype in TOKEN_DTYPES.values())
        raise DataError(f"{path}: holds {kind}, but ids of tokens must be {known}; name a file of tokens, or rebuild it")
    if num_indices < 1:
        raise DataError(f"{path}: has no document indices, but must have one more than documents; {_REMEDY}")
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
            raise DataError(f"{path}: the first document begins at sequence {indices[0]:,}, but must begin at 0; {_REMEDY}")
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
            f"{path}: the last document ends at sequence {last:,}, but must end at {head.num_sequences:,}, like the file;"
            f" {_REMEDY}"
        )


def _read(path: Path, file: BinaryIO, at: int, dtype: str, count: int) -> np.ndarray:
    progress.gets_on()
    file.seek(at)
    content = file.read(count * np.dtype(dtype).itemsize)
    if len(content) < count * np.dtype(dtype).itemsize:
        raise DataError(f"{path}: changed while it was read; run again once it no longer changes")
    return np.frombuffer(content, dtype)
