"""Whole texts of a part: the pieces that sources cut long documents into, put together again."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from llamajax.data.documents.formats import Document

MAX_TEXT_CHARS = 2**25
"""Longest text that is judged, and kept, as one; what is longer becomes several. As a line of JSONL it has fewer bytes than
a source may read."""


class Text(NamedTuple):
    """What is judged as one."""

    text: str
    error: str = ""
    """What is wrong with the record, if it is left out for that; its text is empty."""
    ends_cut: bool = False
    """Whether it is the last one of a document that became several."""


def whole_texts(documents: Iterable[Document]) -> Iterator[Text]:
    """The texts that `documents` of a source are, or are pieces of, in order."""
    pieces: list[str] = []
    num_chars = 0
    is_cut = False
    for document in documents:
        if document.error or not document.text:
            yield Text("", document.error)
            continue
        if pieces and num_chars + len(document.text) > MAX_TEXT_CHARS:
            yield Text("".join(pieces))
            pieces, num_chars, is_cut = [], 0, True
        pieces.append(document.text)
        num_chars += len(document.text)
        if not document.goes_on:
            yield Text("".join(pieces), ends_cut=is_cut)
            pieces, num_chars, is_cut = [], 0, False
