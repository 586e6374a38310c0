"""Whole texts of a part: the pieces that sources cut long documents into, put together again."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from llamajax.data.sources import Document
from llamajax.data.split import HEAD_CHARS, split_hash

MAX_TEXT_CHARS = 2**25
"""Longest text that is judged, and kept, as one; what is longer becomes several. As a line of JSONL it has fewer bytes than
a source may read."""


class Text(NamedTuple):
    """What is judged as one."""

    text: str
    error: str = ""
    """What is wrong with the record, if it is left out for that; its text is empty."""


def whole_texts(documents: Iterable[Document]) -> Iterator[Text]:
    """The texts that `documents` of a source are, or are pieces of, in order."""
    pieces: list[str] = []
    num_chars = hash_of_all = 0
    for document in documents:
        continues = bool(pieces) and _continues(document, hash_of_all, pieces[-1])
        if pieces and (not continues or num_chars + len(document.text) > MAX_TEXT_CHARS):
            yield Text("".join(pieces))
            pieces, num_chars = [], 0
        if document.error or not document.text:
            yield Text("", document.error)
        else:
            pieces.append(document.text)
            num_chars, hash_of_all = num_chars + len(document.text), document.split_hash
    if pieces:
        yield Text("".join(pieces))


def _continues(document: Document, hash_of_all: int, piece_before: str) -> bool:
    """Whether the document is a further piece of a text, not a copy of it: only a copy has the hash by itself."""
    return (
        document.split_hash == hash_of_all
        and len(piece_before) > HEAD_CHARS
        and bool(document.text)
        and split_hash(document.text) != hash_of_all
    )
