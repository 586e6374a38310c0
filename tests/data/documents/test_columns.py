"""Arrow files are read column by column, whoever wrote them, and damaged ones end with a line, not with the process."""

from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from llamajax.config.data import SourceConfig
from llamajax.data.documents import columns
from llamajax.data.documents.sources import Source
from llamajax.errors import DataError

TEXTS = ["first\nline", "", "zwei: äöü 😀", "  spaces \t\r\n", "last\0one", "a" * 99] * 3
KINDS = [
    pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
]  # fmt: skip


def source(path, **fields):
    return Source(SourceConfig(kind="arrow", paths=(str(path),), **fields), "data.sources[0]")


def texts(found):
    return [document.text for document in found.documents(found.files())]


def write(path, table, *, new=pyarrow.ipc.new_stream, compression=None):
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("new", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_rows_are_documents(tmp_path, kind, new, compression):
    column = pyarrow.array(TEXTS, pyarrow.string()).cast(kind)
    write(tmp_path / "a.arrow", pyarrow.table({"id": range(len(TEXTS)), "text": column}), new=new, compression=compression)
    found = source(tmp_path / "a.arrow")
    assert texts(found) == TEXTS
    reached = [document.bytes_read for document in found.documents(found.files())]
    assert reached == sorted(reached)
    assert reached[0] < reached[-1] <= (tmp_path / "a.arrow").stat().st_size


def test_nested_columns_and_nulls(tmp_path):
    rows = [{"x": 1, "a": {"n": 1, "b": {"c": "one"}}}, {"a": None}, {"a": {"b": None}}, {"a": {"b": {"c": "two"}}}]
    write(tmp_path / "a.arrow", pyarrow.Table.from_pylist(rows))
    assert texts(source(tmp_path / "a.arrow", text_key="a.b.c", max_bad_records=2)) == ["one", "", "", "two"]
    with pytest.raises(DataError, match=r"a.arrow:2: .*'a.b.c' must be a string, not null"):
        texts(source(tmp_path / "a.arrow", text_key="a.b.c"))
    with pytest.raises(DataError, match=r"a.arrow: .*has no 'text', only 'x', 'a'; correct the key or the file"):
        texts(source(tmp_path / "a.arrow"))
    with pytest.raises(DataError, match=r"a.arrow: .*column 'x' must hold strings, not int64; choose another column"):
        texts(source(tmp_path / "a.arrow", text_key="x"))


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())])
def test_a_text_that_is_not_utf8_is_one_bad_row(tmp_path, kind):
    offsets = np.array([0, 1, 3, 4], np.int32)
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"a\xffbc")]
    )
    if pyarrow.types.is_dictionary(kind):
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, 2], pyarrow.int32()), column)
    write(tmp_path / "a.arrow", pyarrow.table({"text": column}))
    found = source(tmp_path / "a.arrow", max_bad_records=1)
    assert texts(found) == ["a", "", "c"]
    with pytest.raises(DataError, match=r"a.arrow:2: data.sources\[0\].paths: is not UTF-8"):
        texts(source(tmp_path / "a.arrow"))


@pytest.mark.parametrize("new", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_bytes_end_with_a_line_or_with_other_texts(tmp_path, new, kind):
    path = tmp_path / "a.arrow"
    write(path, pyarrow.table({"text": pyarrow.array(TEXTS).cast(kind)}), new=new)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    refused = []
    for at in rng.integers(len(whole), size=300):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.integers(8)]) + whole[at + 1 :])
        try:
            texts(source(path))
        except DataError as error:
            refused.append(str(error))
    assert 10 < len(refused) < 300
    assert all(line.startswith(str(path)) and "\n" not in line for line in refused)


@pytest.mark.parametrize("content", [b"", b"hello", b"ARROW1\0\0", b"\xff\xff\xff\xff\xff\xff\xff\x7f"])
def test_what_is_no_arrow_file(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(DataError, match=r"a.arrow: data.sources\[0\].paths: cannot be read: .*; replace or remove the file"):
        texts(source(tmp_path / "a.arrow"))


def test_only_the_column_with_the_text_is_decoded(tmp_path, monkeypatch):
    write(tmp_path / "a.arrow", pyarrow.table({"x": ["b" * 1000], "text": ["a"], "y": [b"c"]}))
    seen = []
    monkeypatch.setattr(columns, "_checked", lambda column, names: seen.append(column) or column)
    with pyarrow.memory_map(str(tmp_path / "a.arrow")):
        assert texts(source(tmp_path / "a.arrow")) == ["a"]
    assert [column.to_pylist() for column in seen] == [["a"]]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_column_whose_name_is_not_utf8(tmp_path, kind: Any):
    path = tmp_path / f"a.{kind}"
    if kind == "arrow":
        write(path, pyarrow.table({"text": ["a"]}))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"text", b"te\xe5t"))
    found = Source(SourceConfig(kind=kind, paths=(str(path),)), "data.sources[0]")
    with pytest.raises(
        DataError, match=rf"a.{kind}: .*cannot be read: the name of a column is not UTF-8; replace or remove"
    ):
        texts(found)
