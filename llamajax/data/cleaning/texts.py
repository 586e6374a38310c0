"""Joins the pieces that sources cut long documents into, and yields the whole texts of a part."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from llamajax.data.documents.formats import Document

MAX_TEXT_CHARS = 2**25
"""Maximum length of a text that is judged and kept as one; longer documents become several texts. As a line of JSONL, such a
text has fewer bytes than the maximum that a source reads."""


class Text(NamedTuple):
    """A text that is judged as one."""

    text: str
    error: str = ""
    """Reason why the record is left out; its text is empty then."""
    ends_cut: bool = False
    """Whether it is the last text of a document that became several."""


def whole_texts(documents: Iterable[Document]) -> Iterator[Text]:
    """Yields the whole texts of a source's `documents`, in order."""
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
