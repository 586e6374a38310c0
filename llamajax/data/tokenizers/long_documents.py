"""Encodes documents of any length in pieces, to the same ids as in one piece, with one piece in memory at a time."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from llamajax.data.documents.formats import Document, utf8_length
from llamajax.data.documents.split import PlainHash
from llamajax.data.progress import Progress
from llamajax.data.tokenizers.fast_encoder import any_of
from llamajax.data.tokenizers.tokenizer_base import SPACE, Tokenizer

SPOOL_BYTES = 2**28
"""Number of bytes of ids held in memory; the rest is written to disk."""

_WORD_ENDS = re.compile(r"(?<=[^\W_])(?=[ \n.,;:!?。，、！？；：])")  # noqa: RUF001 (Chinese punctuation is meant)
"""Places where pre-tokenizers split, whatever comes before and after."""
_SEARCHED_CHARS, _MAX_TRIES = 2**16, 64
_CONTEXT_CHARS = 512
"""Number of characters compared on each side of a cut."""


class LongDocument(NamedTuple):
    """Counts of an encoded document."""

    num_tokens: int
    """Number of tokens, including the first and last one."""
    text_bytes: int
    plain_hash: int
    has_space_sign: bool
    """Whether U+2581 occurs in it."""
    num_pieces: int
    num_unknown: int
    """Number of pieces that end where the ids may differ from those of the whole."""


def encode_long(
    first: Document, documents: Iterator[Document], tokenizer: Tokenizer, tokens: "Spool", progress: Progress
) -> LongDocument:
    """Adds the ids of a text to `tokens`. The text begins with `first` and continues with the next of `documents`."""
    before, text_bytes, num_pieces, num_unknown = len(tokens), 0, 0, 0
    plain_hash, has_space_sign = PlainHash(), False
    tokens.append(np.array([tokenizer.bos_id], np.int32))
    pending, document = "", first
    while True:
        pending += document.text
        end = cut_place(pending, tokenizer) if document.goes_on else len(pending)
        num_unknown += not end
        text, pending = (pending[:end], pending[end:]) if end else (pending, "")
        (ids,) = tokenizer.encode_documents([text], follow=num_pieces > 0)
        tokens.append(ids)
        num_pieces += 1
        plain_hash.update(text)
        has_space_sign |= SPACE in text
        text_bytes += utf8_length(text)
        progress.advance(int(not document.goes_on), utf8_length(text), document.bytes_read, len(ids))
        if not document.goes_on:
            break
        document = next(documents)
    tokens.append(np.array([tokenizer.eos_id], np.int32))
    return LongDocument(len(tokens) - before, text_bytes, plain_hash.value(), has_space_sign, num_pieces, num_unknown)


def cut_place(text: str, tokenizer: Tokenizer) -> int:
    """Returns the last place near the end where cutting keeps the ids of the whole, whatever follows; 0 if none is found."""
    end = len(text) - _CONTEXT_CHARS // 2
    places = [match.start() for match in _WORD_ENDS.finditer(text, max(0, end - _SEARCHED_CHARS), max(0, end))]
    added = any_of(tokenizer.special_texts)
    for place in places[: -_MAX_TRIES - 1 : -1]:
        start = max(0, place - _CONTEXT_CHARS)
        around, at = text[start : place + _CONTEXT_CHARS], place - start
        if at and not added.search(around) and tokenizer.splits(around, at) and _is_same(around, at, tokenizer):
            return place
    return 0


def _is_same(text: str, place: int, tokenizer: Tokenizer) -> bool:
    (whole,), (first,) = tokenizer.encode_batch([text]), tokenizer.encode_batch([text[:place]])
    return np.array_equal(whole, np.concatenate([first, *tokenizer.encode_following([text[place:]])]))


class Spool:
    """A growing array; beyond `SPOOL_BYTES` it is stored in an unnamed file."""

    def __init__(self, dtype: np.dtype, folder: Path) -> None:
        self._dtype, self._folder = dtype, folder
        self._parts: list[np.ndarray] = []
        self._length = self._in_file = 0
        self._file = None

    def __len__(self) -> int:
        return self._length

    def append(self, part: Integer[np.ndarray, "_"]) -> None:
        """Appends a part; raises `OSError` if the disk fails."""
        self._parts.append(part.astype(self._dtype))
        self._length += len(part)
        if (self._length - self._in_file) * self._dtype.itemsize > SPOOL_BYTES:
            self._write()

    def array(self) -> Integer[np.ndarray, "_"]:
        """Returns the whole array, after which nothing may be added; raises `OSError` if the disk fails."""
        if self._file is None:
            return np.concatenate([np.zeros(0, self._dtype), *self._parts])
        self._write()
        with self._file:
            return np.memmap(self._file, self._dtype, "r")

    def _write(self) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (closed when it is read)
        for part in self._parts:
            self._file.write(part.data)
        self._file.flush()
        self._parts, self._in_file = [], self._length
