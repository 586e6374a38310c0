"""Files of text are read as their first bytes say, and what is none is called by its name."""

import bz2
import codecs
import gzip
import json
import lzma
import tarfile
import zipfile

import pyarrow
import pytest
import zstandard

from llamajax.errors import DataError
from tests.data.documents.test_formats import TEXTS, jsonl, source, texts, write_parquet

COMPRESS = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("name", COMPRESS)
@pytest.mark.parametrize("suffix", ["", ".own", ".OWN", ".gz"])
def test_the_first_bytes_say_how_a_file_is_compressed(tmp_path, name, suffix):
    lines, compress = jsonl(TEXTS), COMPRESS[name]
    path = tmp_path / f"a.jsonl{suffix.replace('own', name).replace('OWN', name.upper())}"
    path.write_bytes(compress(lines[:50]) + compress(lines[50:]))
    assert texts(source("jsonl", path)) == TEXTS
    talk = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    path.write_bytes(compress(json.dumps([{"messages": talk}] * 2).encode()))
    assert texts(source("chat", path)) == ["a?\nb"] * 2
    path.write_bytes(compress(codecs.BOM_UTF8 + TEXTS[2].encode()))
    assert texts(source("text", path)) == [TEXTS[2]]
    path.write_bytes(compress(lines)[:-9])
    with pytest.raises(DataError, match=rf"{path.name}: data.sources\[0\].paths: cannot be read: .*; replace or remove"):
        texts(source("jsonl", path))


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + "ä\ufeff".encode())
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8)
    assert texts(source("text", tmp_path / "*.txt")) == ["ä\ufeff", ""]
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + jsonl(TEXTS).replace(b"\n", b"\r\n") + codecs.BOM_UTF8)
    with pytest.raises(DataError, match=r"a.jsonl:6: .*is not JSON: Unexpected UTF-8 BOM"):
        texts(source("jsonl", tmp_path / "a.jsonl"))
    assert texts(source("jsonl", tmp_path / "a.jsonl", max_bad_records=1)) == [*TEXTS, ""]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("begin", [b"", codecs.BOM_UTF8, b"\n  "])
def test_a_file_that_is_one_array_has_its_elements_for_records(tmp_path, indent, begin):
    path = tmp_path / "a.json"
    path.write_bytes(begin + json.dumps([{"text": text} for text in TEXTS], indent=indent).encode())
    assert texts(source("jsonl", path)) == TEXTS
    alpaca = [{"instruction": "a", "input": "", "output": "b"}, {"instruction": "c", "input": "d", "output": "e"}]
    path.write_bytes(begin + json.dumps(alpaca, indent=indent).encode() + b"\n")
    assert texts(source("chat", path, chat_format="alpaca")) == ["a\nb", "c\n\nd\ne"]


def test_a_mistake_in_an_array_names_the_record_and_its_line(tmp_path):
    path = tmp_path / "a.json"

    def error(content, **fields):
        path.write_text(content)
        with pytest.raises(DataError) as caught:
            texts(source("jsonl", path, **fields))
        assert "\n" not in str(caught.value)
        return str(caught.value).removeprefix(f"{path}:")

    good = '[\n {"text": "a"},\n'
    assert error(good + ' {"body":\n "b"}]').startswith("3: record 2: data.sources[0].text_key: has no 'text', only 'body'")
    assert error(good + ' {"text":\n oops}]').startswith(
        "3: record 2: data.sources[0].paths: is not JSON: Expecting value at column 2 of its line 2; correct"
    )
    assert error(good + "]").startswith("3: record 2: data.sources[0].paths: is not JSON: Expecting value")
    assert error(good + ' {"text": "b').startswith(
        "3: record 2: data.sources[0].paths: the file ends before its array does; correct the file, or copy it again"
    )
    assert error(good + ' {"text": "b"}]\n{"text": "c"}').startswith(
        "4: record 3: data.sources[0].paths: the file continues after its array; correct the file"
    )
    lost = error(good + ' {"text": "b""},\n {"text": "c"}]', max_bad_records=9)  # a quote too many: where it ends is unknown
    assert lost.startswith("3: record 2: data.sources[0].paths: the file ends before its array does")
    path.write_text(good + ' {"text": 1},\n "b", {"text": "c"}]')
    found = source("jsonl", path, max_bad_records=2)
    assert [(document.text, document.error != "") for document in found.documents(found.files())] == [
        ("a", False), ("", True), ("", True), ("c", False),
    ]  # fmt: skip


def test_what_is_no_file_of_text_is_called_by_its_name(tmp_path):
    write_parquet(tmp_path / "table.jsonl", TEXTS)
    with zipfile.ZipFile(tmp_path / "zip.jsonl", "w") as file:
        file.writestr("a.jsonl", jsonl(TEXTS))
    (tmp_path / "a").write_bytes(jsonl(TEXTS))
    with tarfile.open(tmp_path / "tar.jsonl.gz", "w:gz") as file:
        file.add(tmp_path / "a", "a")
    with pyarrow.ipc.new_file(tmp_path / "file.jsonl", pyarrow.schema({"text": pyarrow.string()})) as writer:
        writer.write_table(pyarrow.table({"text": TEXTS}))
    with pyarrow.ipc.new_stream(tmp_path / "stream.jsonl", pyarrow.schema({"text": pyarrow.string()})) as writer:
        writer.write_table(pyarrow.table({"text": TEXTS}))
    for name, kind, told in [
        (
            "table.jsonl",
            "jsonl",
            "is a parquet file, which kind=jsonl does not read; set kind: parquet, or name other files",
        ),
        ("table.jsonl", "chat", "is a parquet file, which kind=chat does not read; let its name end in .parquet"),
        ("zip.jsonl", "text", "is a zip archive, which kind=text does not read; unpack it, and name the files in it"),
        ("tar.jsonl.gz", "jsonl", "is a tar archive, which kind=jsonl does not read; unpack it, and name the files in it"),
        ("file.jsonl", "jsonl", "is an Arrow file, which kind=jsonl does not read; set kind: arrow, or name other files"),
        ("stream.jsonl", "jsonl", "is an Arrow file, which kind=jsonl does not read; set kind: arrow, or name other files"),
    ]:
        with pytest.raises(DataError) as caught:
            texts(source(kind, tmp_path / name))
        assert str(caught.value) == f"{tmp_path}/{name}: data.sources[0].paths: {told}"
