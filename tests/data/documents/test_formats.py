"""Every format gives its documents in one order, and every bad input one line that says what to do."""

import gzip
import json
import os
import typing

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from llamajax.config.data import SourceConfig
from llamajax.data.documents import formats, split
from llamajax.data.documents.formats import Jsonl
from llamajax.data.documents.record_formats import FORMATS
from llamajax.data.documents.sources import Source
from llamajax.errors import DataError, DiskError

TEXTS = ["first\nline", "", "zwei: äöü 😀\u2581", "  spaces \t\r\n", "last\0one"]


def source(kind, *paths, **fields):
    return Source(SourceConfig(kind=kind, paths=tuple(str(path) for path in paths), **fields), "data.sources[0]")


def texts(of):
    return [document.text for document in of.documents(of.files())]


def jsonl(documents, key="text"):
    return b"".join(json.dumps({"id": 1, key: text}).encode() + b"\n" for text in documents)


def write_parquet(path, documents, kind=None):
    column = pyarrow.array(documents, kind or pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=2)


def test_every_kind_has_a_format():
    assert FORMATS.keys() == set(typing.get_args(typing.get_type_hints(SourceConfig)["kind"]))


def test_jsonl_is_the_same_however_it_is_compressed(tmp_path):
    plain = jsonl(TEXTS) + b"\n  \n"
    half = len(jsonl(TEXTS[:2]))
    (tmp_path / "a.jsonl").write_bytes(plain)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain[:half]) + gzip.compress(plain[half:]))
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(compress(plain[:half]) + compress(plain[half:]))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        assert texts(source("jsonl", tmp_path / name)) == TEXTS, name


@pytest.mark.parametrize(
    "kind",
    [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())],
)
def test_parquet_rows_are_documents(tmp_path, kind):
    write_parquet(tmp_path / "a.parquet", TEXTS, kind)
    found = source("parquet", tmp_path / "a.parquet")
    assert texts(found) == TEXTS
    *_, last = found.documents(found.files())
    assert last.bytes_read == (tmp_path / "a.parquet").stat().st_size


@pytest.mark.parametrize(
    "kind",
    [pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view(), pyarrow.dictionary(pyarrow.int8(), pyarrow.binary())],
)
def test_columns_of_bytes_are_read_as_utf8(tmp_path, kind):
    """Spark's old writers do not say that a BYTE_ARRAY is a string."""
    encoded = [text.encode() for text in TEXTS]
    write_parquet(tmp_path / "a.parquet", [*encoded, None, b"a\xff"], kind)
    found = source("parquet", tmp_path / "a.parquet", max_bad_records=2)
    *good, null, bad = found.documents(found.files())
    assert [document.text for document in good] == TEXTS
    assert "a.parquet:6: data.sources[0].text_key: 'text' must be a string, not null" in null.error
    assert "a.parquet:7: data.sources[0].paths: is not UTF-8; correct or remove the row" in bad.error
    if kind == pyarrow.binary():
        with pyarrow.ipc.new_stream(tmp_path / "a.arrow", pyarrow.schema({"text": kind})) as writer:
            writer.write_table(pyarrow.table({"text": encoded}))
        assert texts(source("arrow", tmp_path / "a.arrow")) == TEXTS


def test_another_text_key(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS, key="body"))
    assert texts(source("jsonl", tmp_path / "a.jsonl", text_key="body")) == TEXTS


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_long_documents_are_cut_at_line_ends(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(formats, "MAX_DOCUMENT_CHARS", 20)
    monkeypatch.setattr(formats, "READ_BYTES", 7)  # characters of several bytes lie across two reads
    text = "".join(f"zeile {n} äöü\n" for n in range(10)) + "😀" * 45
    path = tmp_path / "long"
    if kind == "text":
        path.write_text(text)
    elif kind == "jsonl":
        path.write_bytes(jsonl([text]))
    else:
        write_parquet(path, [text])
    parts = texts(source(kind, path))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 20
    assert all(part.endswith("\n") for part in parts[:10])


def test_progress_reaches_the_size_of_the_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(jsonl(TEXTS))
    found = source("jsonl", tmp_path / "*")
    reached = [document.bytes_read for document in found.documents(found.files())]
    assert reached == sorted(reached)
    assert reached[-1] == sum(path.stat().st_size for path in found.files())


def test_the_standard_library_and_its_help_texts():
    found = Source(SourceConfig(kind="stdlib"), "data.sources[0]")
    files = found.files()
    assert not {"site-packages", "test", "tests"} & {part for path in files for part in path.parts[-3:]}
    import dataclasses
    import pydoc_data.topics as help_texts

    topics = next(path for path in files if path.name == "topics.py" and path.parent.name == "pydoc_data")
    module = next(path for path in files if path.name == "dataclasses.py")
    with open(dataclasses.__file__, encoding="utf-8", newline="") as file:
        assert [document.text for document in found.documents([module])] == [file.read()]
    assert [document.text for document in found.documents([topics])] == [
        text for _, text in sorted(help_texts.topics.items())
    ]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_pieces_of_a_long_document_are_on_one_side_of_the_split(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(split, "HEAD_CHARS", 10)
    monkeypatch.setattr(formats, "MAX_DOCUMENT_CHARS", 20)
    monkeypatch.setattr(formats, "READ_BYTES", 7)
    path, text = tmp_path / "long", "".join(f"line {n} äöü\n" for n in range(10))
    if kind == "text":
        path.write_text(text)
    elif kind == "jsonl":
        path.write_bytes(jsonl([text]))
    else:
        write_parquet(path, [text])
    found = source(kind, path)
    documents = list(found.documents(found.files()))
    assert len(documents) == 10
    assert {document.split_hash for document in documents} == {split.split_hash(text)}


def test_every_kind_gives_a_text_the_same_hash(tmp_path):
    (tmp_path / "a.txt").write_text("a text\n")
    (tmp_path / "a.jsonl").write_bytes(jsonl(["a text"]))
    write_parquet(tmp_path / "a.parquet", ["a text\r\n"])
    message = {"messages": [{"role": "assistant", "content": "a text"}]}
    (tmp_path / "a.chat").write_text(json.dumps(message) + "\n")
    hashes = set()
    for kind, name in (("text", "a.txt"), ("jsonl", "a.jsonl"), ("parquet", "a.parquet"), ("chat", "a.chat")):
        found = source(kind, tmp_path / name)
        hashes |= {document.split_hash for document in found.documents(found.files())}
    assert hashes == {split.split_hash("a text")}


BAD_LINES = [
    b'{"text": null}', b'{"text": 1}', b'{"body": "a"}', b"oops", b'["text"]', b'{"text": "\xff"}', b'{"text": "\\ud800"}',
    b'{"text": "' + b"a" * 200 + b'"}',
]  # fmt: skip


@pytest.mark.parametrize("end", [b"\n", b""])
def test_bad_lines_may_be_left_out_up_to_a_bound(tmp_path, monkeypatch, end):
    monkeypatch.setattr(Jsonl, "max_line_bytes", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(jsonl([f"good {n}"]) + bad for n, bad in enumerate(BAD_LINES)) + end)
    found = source("jsonl", path, max_bad_records=len(BAD_LINES))
    documents = list(found.documents(found.files()))
    assert [document.text for document in documents if not document.error] == [f"good {n}" for n in range(len(BAD_LINES))]
    bad = [document for document in documents if document.error]
    assert [document.error.partition(" ")[0] for document in bad] == [f"{path}:{2 * n + 2}:" for n in range(len(BAD_LINES))]
    assert not any(document.text for document in bad)
    fewer = source("jsonl", path, max_bad_records=3)
    with pytest.raises(DataError) as caught:
        texts(fewer)
    assert str(caught.value) == (
        f"{path}:8: data.sources[0].paths: is not JSON: Expecting value at column 1; correct or remove the line;"
        " data.sources[0].max_bad_records: 3 allows no more"
    )


def test_bad_rows_and_conversations_may_be_left_out(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a", None, "b", None])
    found = source("parquet", tmp_path / "a.parquet", max_bad_records=2)
    assert [(document.text, bool(document.error)) for document in found.documents(found.files())] == [
        ("a", False), ("", True), ("b", False), ("", True),
    ]  # fmt: skip
    good = json.dumps({"messages": [{"role": "assistant", "content": "yes"}]})
    (tmp_path / "a.jsonl").write_text("\n".join(['{"messages": []}', good, "{}", "oops"]))
    found = source("chat", tmp_path / "a.jsonl", max_bad_records=3)
    assert texts(found) == ["", "yes", "", ""]
    with pytest.raises(DataError, match=r"a.jsonl:4: .*is not JSON.*max_bad_records: 2 allows no more"):
        texts(source("chat", tmp_path / "a.jsonl", max_bad_records=2))


def test_lines_are_read_as_pythons_own_reader_does(tmp_path):
    """A quicker one reads most of them."""
    lines = [
        '{"text": "plain", "score": NaN}', '{"score": -Infinity, "text": "b"}', '{"text": "first", "text": "last"}',
        '{"text": "\\ud83d\\ude00 \\u0000 \\u2028\u0085 \\/"}', '{"id": 123456789012345678901234567890, "text": "c"}',
        '{"id": -1e999, "text": "d"}', ' \t{"text": "e"} \r', '{"text": ""}', '{"": 1, "text": "é\u0301"}',
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode())
    assert texts(source("jsonl", tmp_path / "a.jsonl")) == [json.loads(line)["text"] for line in lines]


TRUNCATED = gzip.compress(os.urandom(2000))[:1000]
HOSTILE = {
    "bad UTF-8 in text": ("text", b"ok\nok\nb\xffd", r":3: data.sources\[0\].paths: is not UTF-8; convert"),
    "UTF-8 cut off at the end": ("text", b"ok\n\xe2\x96", r":2: .*is not UTF-8"),
    "UTF-16": ("text", "hello".encode("utf-16"), r":1: .*is not UTF-8"),
    "bad UTF-8 in JSONL": ("jsonl", jsonl(["a"]) + b'{"text": "\xff"}\n', r":2: .*is not UTF-8"),
    "broken JSON": (
        "jsonl",
        jsonl(["a", "b"]) + b'{"text": "c"\n',
        r":3: .*is not JSON: .* at column 13; correct or remove",
    ),
    "two records in a line": ("jsonl", b'{"text": "a"} {"text": "b"}\n', r":1: .*is not JSON: Extra data"),
    "half a surrogate": ("jsonl", b'{"text": "\\ud800"}\n', r":1: .*text_key: 'text' has half a surrogate"),
    "no object": ("jsonl", jsonl(["a"]) + b'["text"]\n', r":2: .*must be a JSON object, not list"),
    "no text key": ("jsonl", b'{"body": "a"}\n', r":1: .*text_key: has no 'text', only 'body'; correct the key"),
    "text is a number": ("jsonl", b'{"text": 1}\n', r":1: .*'text' must be a string, not int"),
    "text is null": ("jsonl", b'{"text": null}\n', r":1: .*'text' must be a string, not null"),
    "deep nesting": ("jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", r":1: .*is nested too deeply"),
    "huge number": ("jsonl", b'{"text": ' + b"1" * 5000 + b"}\n", r":1: .*is not JSON"),
    "no parquet": ("parquet", b"hello", r"cannot be read: .*; replace or remove"),
    "empty parquet": ("parquet", b"", r"cannot be read"),
}


@pytest.mark.parametrize(("kind", "content", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_bad_content_is_one_line_with_place_and_remedy(tmp_path, kind, content, message):
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        texts(source(kind, path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("damage", ["truncated", "scrambled", "another format"])
def test_damaged_compression(tmp_path, suffix, damage):
    blob = {".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.ZstdCompressor().compress}[suffix](jsonl(TEXTS * 100))
    path = tmp_path / f"bad{suffix}"
    path.write_bytes(
        {"truncated": blob[:-5], "scrambled": blob[:20] + b"\0\1\2\3" * 5 + blob[40:], "another format": b"PK"}[damage]
    )
    with pytest.raises(DataError, match=rf"bad{suffix}: data.sources\[0\].paths: .*cannot be read|{suffix}:\d+: .*is not"):
        texts(source("jsonl", path))


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_truncated_parquet(tmp_path, keep):
    path = tmp_path / "bad.parquet"
    write_parquet(path, TEXTS * 100)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(DataError, match=r"bad.parquet: .*cannot be read"):
        texts(source("parquet", path))


def test_parquet_with_bytes_damaged_inside(tmp_path):
    path = tmp_path / "bad.parquet"
    write_parquet(path, TEXTS * 100)
    blob = bytearray(path.read_bytes())
    blob[4:40] = b"\xff" * 36
    path.write_bytes(blob)
    with pytest.raises(DataError, match=r"bad.parquet"):
        texts(source("parquet", path))


def test_parquet_column_mistakes(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, [1, 2], pyarrow.int64())
    with pytest.raises(DataError, match="column 'text' must hold strings, not int64"):
        texts(source("parquet", path))
    with pytest.raises(DataError, match="has no 'body', only 'text'"):
        texts(source("parquet", path, text_key="body"))
    write_parquet(path, ["a", "b", None])
    with pytest.raises(DataError, match=r"a.parquet:3: .*'text' must be a string, not null"):
        texts(source("parquet", path))
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"a\xff")]
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), path)
    with pytest.raises(DataError, match=r"a.parquet:2: .*is not UTF-8"):
        texts(source("parquet", path))


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(Jsonl, "max_line_bytes", 1000)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl(["a" * 900]) + jsonl(["a" * 1_000_000])))
    found = source("jsonl", path)
    documents = found.documents(found.files())
    assert len(next(documents).text) == 900
    with pytest.raises(DataError, match=r"bomb.jsonl.gz:2: .*at most 1,000 bytes; split"):
        next(documents)


def test_a_file_that_cannot_be_read(monkeypatch):
    found = source("text", "/proc/self/mem")  # its start is not mapped: reading it is an I/O error
    with pytest.raises(DiskError, match=r"/proc/self/mem: .*cannot be read: Input/output error"):
        texts(found)
