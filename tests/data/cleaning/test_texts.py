"""Pieces of long documents are judged as one; copies of a document are not taken for pieces of it."""

import json

from llamajax.config.data import SourceConfig
from llamajax.data.cleaning import texts
from llamajax.data.cleaning.texts import whole_texts
from llamajax.data.documents.formats import MAX_DOCUMENT_CHARS, Document
from llamajax.data.documents.sources import Source

LONG = "".join(f"line {number} of a long document\n" for number in range(2 * MAX_DOCUMENT_CHARS // 28))


def read(source: SourceConfig) -> tuple[list[Document], list[str]]:
    of_source = Source(source, "data.sources[0]")
    documents = list(of_source.documents(of_source.files()))
    return documents, [text.text for text in whole_texts(documents)]


def test_pieces_become_the_document_that_was_cut(tmp_path):
    (tmp_path / "a.txt").write_text(LONG)
    (tmp_path / "b.txt").write_text("short")
    documents, found = read(SourceConfig(kind="text", paths=(f"{tmp_path}/*.txt",)))
    assert len(documents) > 3
    assert found == [LONG, "short"]


def test_copies_stay_apart_and_empty_ones_keep_their_place(tmp_path):
    lines = ["one", "one", "", LONG, LONG, "two"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    documents, found = read(SourceConfig(kind="jsonl", paths=(f"{tmp_path}/a.jsonl",)))
    assert len(documents) > len(lines)
    assert found == lines


def test_what_is_too_long_becomes_several(monkeypatch, tmp_path):
    monkeypatch.setattr(texts, "MAX_TEXT_CHARS", MAX_DOCUMENT_CHARS + 100)
    (tmp_path / "a.txt").write_text(LONG)
    documents, found = read(SourceConfig(kind="text", paths=(f"{tmp_path}/a.txt",)))
    assert found == [document.text for document in documents]
    assert [text.ends_cut for text in whole_texts(documents)] == [*[False] * (len(found) - 1), True]
    monkeypatch.undo()
    assert not any(text.ends_cut for text in whole_texts(documents))


def test_bad_records_are_told():
    documents = [Document("one", 0, 1), Document("", 0, error="a.jsonl:2: is not JSON"), Document("two", 0, 2)]
    assert [text[:2] for text in whole_texts(documents)] == [("one", ""), ("", "a.jsonl:2: is not JSON"), ("two", "")]
