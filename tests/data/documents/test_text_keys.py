"""Texts are found inside other keys, and the part of a key that is missing is named."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from llamajax.config.data import SourceConfig
from llamajax.data.documents.sources import Source
from llamajax.data.documents.text_keys import NoSuchKeyError, column_at, value_at
from llamajax.errors import DataError

RECORD = {"a": {"b": "inside", "c": {"d": "deep"}, "n": None, "l": ["x"]}, "a.b.c": "whole", "x": "y"}


@pytest.mark.parametrize(("key", "value"), [("a.b", "inside"), ("a.c.d", "deep"), ("a.b.c", "whole"), ("x", "y")])
def test_a_key_of_the_whole_name_goes_before_one_inside_others(key, value):
    assert value_at(RECORD, key) == value


@pytest.mark.parametrize(
    ("key", "message"),
    {
        "text": "has no 'text', only 'a', 'a.b.c', 'x'",
        "t.x": "has no 't' of 't.x', only 'a', 'a.b.c', 'x'",
        "a.x": "has no 'x' in 'a', only 'b', 'c', 'n', 'l'",
        "a.c.x": "has no 'x' in 'a.c', only 'd'",
        "x.y": "has no 'y' in 'x', which is str and no JSON object",
        "a.n.y": "has no 'y' in 'a.n', which is null and no JSON object",
        "a.l.0": "has no '0' in 'a.l', which is list and no JSON object",
    }.items(),
)
def test_the_part_that_is_missing_is_named(key, message):
    with pytest.raises(NoSuchKeyError) as caught:
        value_at(RECORD, key)
    assert str(caught.value) == message


SCHEMA = pyarrow.schema(
    {
        "a": pyarrow.struct({"b": pyarrow.string(), "c": pyarrow.struct({"d": pyarrow.large_string()})}),
        "a.c.d": pyarrow.string(),
        "l": pyarrow.list_(pyarrow.string()),
    }
)


def test_columns_are_found_as_values_are():
    assert column_at(SCHEMA, "a.b") == (("a", "b"), pyarrow.string())
    assert column_at(SCHEMA, "a.c.d") == (("a.c.d",), pyarrow.string())
    assert column_at(SCHEMA.remove(1), "a.c.d") == (("a", "c", "d"), pyarrow.large_string())
    for key, message in {
        "text": "has no 'text', only 'a', 'a.c.d', 'l'",
        "a.x": "has no 'x' in 'a', only 'b', 'c'",
        "l.0": "has no '0' in 'l', which is list<element: string> and no struct",
        "x.y": "has no 'x' of 'x.y', only 'a', 'a.c.d', 'l'",
    }.items():
        with pytest.raises(NoSuchKeyError) as caught:
            column_at(SCHEMA, key)
        assert str(caught.value).replace("item: ", "element: ") == message
    twice = pyarrow.schema([("a", pyarrow.string()), ("a", pyarrow.string())])
    with pytest.raises(NoSuchKeyError, match="has 2 columns of the name 'a'"):
        column_at(twice, "a")


def source(kind, path, **fields):
    return Source(SourceConfig(kind=kind, paths=(str(path),), **fields), "data.sources[0]")


def test_bad_records_with_nested_keys_are_counted_one_by_one(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [{"a": {"b": "one"}}, {"a": {"c": 1}}, {"a": None}, {"a": {"b": "two"}}, {"a": {"b": 3}}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = source("jsonl", path, text_key="a.b", max_bad_records=3)
    documents = list(found.documents(found.files()))
    assert [document.text for document in documents] == ["one", "", "", "two", ""]
    where = f"{path}:{{}}: data.sources[0].text_key: {{}}"
    assert [document.error for document in documents if document.error] == [
        where.format(2, "has no 'b' in 'a', only 'c'; correct the key or the file"),
        where.format(3, "has no 'b' in 'a', which is null and no JSON object; correct the key or the file"),
        where.format(5, "'a.b' must be a string, not int; correct or remove it"),
    ]
    with pytest.raises(DataError, match=r":5: .*max_bad_records: 2 allows no more of them"):
        list(source("jsonl", path, text_key="a.b", max_bad_records=2).documents([path]))


def test_a_parquet_file_is_read_at_one_nested_column_only(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"a": {"b": "one", "bin": b"0" * 9}}, {"a": None}, {"a": {"b": None}}, {"a": {"b": "two"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3, compression="none")
    with pyarrow.parquet.ParquetFile(path) as file:
        (other,) = [n for n in range(2) if file.metadata.row_group(0).column(n).path_in_schema == "a.bin"]
        damaged = file.metadata.row_group(0).column(other)
    content = bytearray(path.read_bytes())
    at = damaged.dictionary_page_offset or damaged.data_page_offset
    content[at : at + damaged.total_compressed_size] = b"\xff" * damaged.total_compressed_size
    path.write_bytes(content)
    found = source("parquet", path, text_key="a.b", max_bad_records=2)
    documents = list(found.documents(found.files()))
    assert [(document.text, bool(document.error)) for document in documents] == [
        ("one", False), ("", True), ("", True), ("two", False),
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"a.parquet: .*text_key: column 'a' must hold strings, not struct<.*choose another"):
        list(source("parquet", path, text_key="a").documents([path]))
    with pytest.raises(DataError, match=r"a.parquet: .*text_key: has no 'x' in 'a', only 'b', 'bin'; correct the key"):
        list(source("parquet", path, text_key="a.x").documents([path]))


def test_a_parquet_column_with_a_dot_in_its_name(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([{"b": "inside"}]), "a.b": ["whole"]}), path)
    assert [document.text for document in source("parquet", path, text_key="a.b").documents([path])] == ["whole"]
