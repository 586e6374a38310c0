"""Reads tokens in Megatron-LM's files in place, without copying or tokenizing anything.

A pair of files is identified by its whole index, the size of the `.bin` and samples of it. The first start with new files
reads all ids once and keeps their range: an id outside the model's vocabulary is reported before the first step. Documents
are the ones in the files. If a document does not begin with a special token such as bos, its first token serves as context
only.
"""

import functools
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from llamajax import disk
from llamajax.data import cache, progress
from llamajax.data.documents.file_groups import file_identity
from llamajax.data.documents.sources import Source
from llamajax.data.file_array import FileArray
from llamajax.data.progress import TokenizingProgress
from llamajax.data.tokens.megatron import IndexedDataset, paths_of, split_documents
from llamajax.data.tokens.source_tokens import Counts
from llamajax.data.tokens.stores import HELD_OUT, SIDES, TRAIN, Documents, Piece
from llamajax.errors import DataError, UserError

PART_DOCUMENTS = 2**20
"""Number of documents per part."""
SAMPLES, SAMPLE_BYTES = 64, 2**20
"""Number and size of the evenly spaced samples of the tokens that identify a file; a smaller file is read completely."""

_FOLDER = "megatron-2"
_NEITHER = len(SIDES)


@dataclass(frozen=True)
class MegatronStore:
    """Tokens in pairs of files; a part is `PART_DOCUMENTS` documents of a pair."""

    parts_path: Path
    """File with the parts and what is known of the files."""
    source: Source
    held_out_fraction: float
    vocab_size: int
    """Size of the model's vocabulary."""

    @functools.cached_property
    def parts(self) -> cache.ArrayFile:
        """Arrays `file`, `document`, `token` and `tokens`: each part's file, first document and token, number of tokens."""
        return cache.read_arrays(self.parts_path)

    def __getstate__(self) -> dict[str, object]:
        """Omits cached data, which another process reads itself."""
        return {name: value for name, value in vars(self).items() if name not in ("parts", "_table")}

    @functools.cached_property
    def _table(self) -> dict[str, list[int]]:
        return {name: array[:].tolist() for name, array in self.parts.arrays.items()}

    @property
    def tokens_of_part(self) -> Int64[np.ndarray, "parts"]:
        """Number of tokens of each part."""
        return self.parts.arrays["tokens"][:]

    def documents(self, part: int, seq_len: int) -> Documents:
        """See `TokenStore`. Documents may cross rows."""
        file = self.parts.info["files"][self._table["file"][part]]
        first, dataset = self._table["document"][part], _opened(file["bin"], file["sha256"])
        end = min(first + PART_DOCUMENTS, dataset.num_documents)
        offsets = dataset.document_offsets(first, end) - self._table["token"][part]
        sides = np.full(end - first, _NEITHER, np.uint8)
        for side, (begin, stop) in self._sides(dataset.num_documents).items():
            sides[max(begin - first, 0) : max(stop - first, 0)] = side
        nothing = np.zeros(end - first, bool)
        return Documents(offsets[:-1], np.diff(offsets), sides, is_cut=nothing, is_left_out=nothing, is_moved=nothing)

    def piece(self, part: int, start: int, length: int) -> Piece:
        """See `TokenStore`. Raises `DataError` for ids outside the model's vocabulary."""
        file = self.parts.info["files"][self._table["file"][part]]
        at = self._table["token"][part] + start
        piece = _tokens(file["bin"], file["dtype"], file["sha256"])[at : at + length + 1]
        if (wrong := piece[(piece < 0) | (piece >= self.vocab_size)]).size:  # changed since the start
            raise _id_error(self.source, file, f"id {wrong[0]}", self.vocab_size)
        return Piece(piece)

    def _sides(self, num_documents: int) -> dict[int, tuple[int, int]]:
        """Returns the range of documents on each side, in the order of the file."""
        if self.source.config.split is not None:
            train, validate, _ = split_documents(num_documents, self.source.config.split)
            return {SIDES.index(TRAIN): train, SIDES.index(HELD_OUT): validate}
        held_out_at = num_documents - round(num_documents * self.held_out_fraction)
        return {SIDES.index(TRAIN): (0, held_out_at), SIDES.index(HELD_OUT): (held_out_at, num_documents)}


class MegatronTokens:
    """Tokens of a `megatron` source; see `SourceTokens`."""

    def __init__(
        self, source: Source, parts: Path, held_out_fraction: float, vocab_size: int, log: Callable[[str], None]
    ) -> None:
        """Checks the files, unless the cache has the result, and their ids against the model's vocabulary.

        Raises:
            DataError: a file is invalid.
            DiskError: the disk fails.
        """
        self.source, self._log = source, log
        self.store = MegatronStore(parts, source, held_out_fraction, vocab_size)
        for file in cache.repaired(lambda: self.store.parts, self.remake).info["files"]:
            _check_ids(source, file, vocab_size)

    @property
    def counts(self) -> Counts:
        """Counts of the files."""
        documents = sum(file["documents"] for file in self.store.parts.info["files"])
        return Counts(documents, tokens=int(self.store.tokens_of_part.sum()), text_bytes=0)

    @property
    def key(self) -> list[str]:
        """JSON value that identifies the documents and their tokens."""
        return ["megatron", *(file["sha256"] for file in self.store.parts.info["files"])]

    @property
    def split(self) -> Any:
        """JSON value that decides on which side of the split each document is."""
        return self.source.config.split or self.store.held_out_fraction

    @property
    def content(self) -> list[str]:
        """Hashes that identify the files."""
        return self.key

    def remake(self, damaged: Path) -> None:
        """Checks the files again; nothing else can be rebuilt."""
        assert damaged == self.store.parts_path
        _write_parts(self.source, damaged, self._log)
        for known in ("parts", "_table"):
            vars(self.store).pop(known, None)


def parts_path(source: Source, cache_dir: Path) -> Path:
    """Returns the path of the file about the source's files; its key has their names, sizes and times.

    Raises:
        DataError: a file is missing.
        DiskError: the disk fails.
    """
    identities = []
    for path in _pairs(source):
        for file in paths_of(path):
            with source.format.reading(file):
                identities.append(file_identity(file))
    return cache_dir / _FOLDER / cache.key_of(identities) / "parts"


def _pairs(source: Source) -> list[Path]:
    """Returns the `.bin` of each pair, once."""
    return sorted({paths_of(path)[0] for path in source.files()})


def _write_parts(source: Source, path: Path, log: Callable[[str], None]) -> None:
    """Checks the source's files and stores the result, unless another process did."""
    with disk.locked(path.parent):
        is_new = not path.exists()
        if cache.is_intact(path):
            return
        arrays, files = _look_at(source, log)
        cache.write_arrays(path, arrays, {"files": files}, keep=is_new)


def _look_at(source: Source, log: Callable[[str], None]) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    columns: dict[str, list[int]] = {"file": [], "document": [], "token": [], "tokens": []}
    files = []
    datasets = [_open(source, bin_path) for bin_path in _pairs(source)]
    with TokenizingProgress(sum(dataset.tokens.nbytes for dataset in datasets), log, doing="checking") as shown:
        id_ranges = [dataset.id_range(shown.finish_group) for dataset in datasets]
    for number, (dataset, id_range) in enumerate(zip(datasets, id_ranges, strict=True)):
        for first in range(0, dataset.num_documents, PART_DOCUMENTS):
            begin, end = dataset.document_offsets(first, min(first + PART_DOCUMENTS, dataset.num_documents))[
                [0, -1]
            ].tolist()
            for name, value in zip(columns, (number, first, begin, end - begin), strict=True):
                columns[name].append(value)
        with source.format.reading(dataset.bin_path):
            sha256 = _content(dataset)
        absolute = str(dataset.bin_path.absolute())
        about = {"bin": absolute, "dtype": dataset.dtype.str, "documents": dataset.num_documents, "sha256": sha256}
        files.append({**about, "ids": id_range})
    return {name: np.array(values, np.int64) for name, values in columns.items()}, files


def _check_ids(source: Source, file: dict[str, Any], vocab_size: int) -> None:
    """Raises `DataError` if a token of the file has an id outside the model's vocabulary."""
    smallest, largest = file["ids"] or (0, 0)
    if smallest < 0 or largest >= vocab_size:
        found = _open(source, file["bin"]).first_outside(vocab_size)
        which = "ids" if found is None else f"id {found[0]} in document {found[1]}"
        raise _id_error(source, file, which, vocab_size)


def _id_error(source: Source, file: dict[str, Any], which: str, vocab_size: int) -> DataError:
    return DataError(
        f"{file['bin']}: {source.key}.paths: token {which} is not among the {vocab_size} of model.vocab_size; name files"
        " made with data.tokenizer.path"
    )


def _open(source: Source, path: str | Path) -> IndexedDataset:
    try:
        return IndexedDataset(path)
    except UserError as error:
        raise type(error)(f"{error} ({source.key}.paths)") from error


def _content(dataset: IndexedDataset) -> str:
    """Returns the SHA-256 of the index, the number of tokens, and samples of them."""
    content = hashlib.sha256(f"{dataset.dtype.str} {dataset.num_tokens}".encode())
    with dataset.idx_path.open("rb") as file:
        while block := file.read(SAMPLE_BYTES):
            content.update(block)
            progress.gets_on()
    num_bytes = dataset.tokens.nbytes
    step = max(SAMPLE_BYTES, (num_bytes - SAMPLE_BYTES) // (SAMPLES - 1))
    with dataset.bin_path.open("rb") as file:
        for at in range(0, num_bytes, step):
            file.seek(at)
            content.update(file.read(SAMPLE_BYTES))
            progress.gets_on()
    return content.hexdigest()


@functools.lru_cache(64)
def _opened(path: str, sha256: str) -> IndexedDataset:
    return IndexedDataset(path)


@functools.lru_cache(2**12)
def _tokens(path: str, dtype: str, sha256: str) -> FileArray:
    return FileArray(Path(path), np.dtype(dtype), os.stat(path).st_size // np.dtype(dtype).itemsize)
