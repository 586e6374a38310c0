"""Tables are read column by column, whoever wrote them, and damaged ones end with a line, not with the process.

Texts are found inside other keys; stretches of a parquet file have each of its row groups once; what Hugging Face `datasets`
saves is read as it would read it itself.
"""

import json
import shutil
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from llamajax.config.data import SourceConfig
from llamajax.data.documents import columns
from llamajax.data.documents.columns import NoSuchKeyError, RowGroups, column_at, value_at
from llamajax.data.documents.lines import Span
from llamajax.data.documents.sources import Source
from llamajax.errors import DataError

TEXTS = ["first\nline", "", "zwei: äöü 😀", "  spaces \t\r\n", "last\0one", "a" * 99] * 3
KINDS = [
    pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
]  # fmt: skip


def source(*paths, kind: Any = "arrow", **fields):
    return Source(SourceConfig(kind=kind, paths=tuple(map(str, paths)), **fields), "data.sources[0]")


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
def test_a_column_whose_name_is_not_utf8(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "arrow":
        write(path, pyarrow.table({"text": ["a"]}))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"text", b"te\xe5t"))
    with pytest.raises(
        DataError, match=rf"a.{kind}: .*cannot be read: the name of a column is not UTF-8; replace or remove"
    ):
        texts(source(path, kind=kind))


NUMBERED = [f"text {number} " * (number % 7) for number in range(1000)]


@pytest.fixture(params=["NONE", "ZSTD"])
def path(tmp_path, request):
    table = pyarrow.table({"id": range(1000), "text": NUMBERED, "more": [["x"] * (n % 3) for n in range(1000)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=90, compression=request.param)
    return tmp_path / "a.parquet"


def spans(path, step):
    size = path.stat().st_size
    return [Span(at, min(at + step, size)) for at in range(0, size, step)]


@pytest.mark.parametrize("step", [1000, 4096, 10**6])
def test_stretches_have_every_row_once(path, step):
    found = source(path, kind="parquet")
    of_spans = [[document.text for document in found.documents([path], span)] for span in spans(path, step)]
    assert [text for of_span in of_spans for text in of_span] == NUMBERED
    assert {len(of_span) % 90 for of_span in of_spans} <= {0, 10}


def test_rows_are_numbered_through(path):
    with pyarrow.parquet.ParquetFile(path) as file:
        found = [RowGroups.of(file, span) for span in spans(path, 4096)]
        assert [group for of_span in found for group in of_span.numbers] == list(range(12))
        first = 0
        for of_span in found:
            if of_span.numbers:
                assert of_span.first_row == first
            first += of_span.num_rows
        assert first == 1000


def test_the_extent_of_row_groups_is_all_that_they_are_read_from(path):
    """Bytes outside of the extent may be anything."""
    found = source(path, kind="parquet")
    whole = path.read_bytes()
    last_end = 4
    for span in spans(path, 4096):
        expected = [document.text for document in found.documents([path], span)]
        if not expected:
            continue
        start, end, said = found.format.extent(path, span)
        assert last_end <= start < end
        assert b"total_compressed_size" in said
        last_end = end
        footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
        path.write_bytes(b"\0" * start + whole[start:end] + b"\0" * (footer - end) + whole[footer:])
        assert [document.text for document in found.documents([path], span)] == expected
        path.write_bytes(whole)


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
        "x.y": "has no 'y' in 'x', which is str, not a JSON object",
        "a.n.y": "has no 'y' in 'a.n', which is null, not a JSON object",
        "a.l.0": "has no '0' in 'a.l', which is list, not a JSON object",
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
        "l.0": "has no '0' in 'l', which is list<element: string>, not a struct",
        "x.y": "has no 'x' of 'x.y', only 'a', 'a.c.d', 'l'",
    }.items():
        with pytest.raises(NoSuchKeyError) as caught:
            column_at(SCHEMA, key)
        assert str(caught.value).replace("item: ", "element: ") == message
    twice = pyarrow.schema([("a", pyarrow.string()), ("a", pyarrow.string())])
    with pytest.raises(NoSuchKeyError, match="has 2 columns named 'a'"):
        column_at(twice, "a")


def test_bad_records_with_nested_keys_are_counted_one_by_one(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [{"a": {"b": "one"}}, {"a": {"c": 1}}, {"a": None}, {"a": {"b": "two"}}, {"a": {"b": 3}}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = source(path, kind="jsonl", text_key="a.b", max_bad_records=3)
    documents = list(found.documents(found.files()))
    assert [document.text for document in documents] == ["one", "", "", "two", ""]
    where = f"{path}:{{}}: data.sources[0].text_key: {{}}"
    assert [document.error for document in documents if document.error] == [
        where.format(2, "has no 'b' in 'a', only 'c'; correct the key or the file"),
        where.format(3, "has no 'b' in 'a', which is null, not a JSON object; correct the key or the file"),
        where.format(5, "'a.b' must be a string, not int; correct or remove it"),
    ]
    with pytest.raises(DataError, match=r":5: .*max_bad_records: 2 allows no more"):
        list(source(path, kind="jsonl", text_key="a.b", max_bad_records=2).documents([path]))


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
    found = source(path, kind="parquet", text_key="a.b", max_bad_records=2)
    documents = list(found.documents(found.files()))
    assert [(document.text, bool(document.error)) for document in documents] == [
        ("one", False), ("", True), ("", True), ("two", False),
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"a.parquet: .*text_key: column 'a' must hold strings, not struct<.*choose another"):
        list(source(path, kind="parquet", text_key="a").documents([path]))
    with pytest.raises(DataError, match=r"a.parquet: .*text_key: has no 'x' in 'a', only 'b', 'bin'; correct the key"):
        list(source(path, kind="parquet", text_key="a.x").documents([path]))


def test_a_parquet_column_with_a_dot_in_its_name(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([{"b": "inside"}]), "a.b": ["whole"]}), path)
    assert [document.text for document in source(path, kind="parquet", text_key="a.b").documents([path])] == ["whole"]


SAVED = [f"document {n}\näöü " * (n % 7) for n in range(300)]


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    module: Any = pytest.importorskip("datasets")
    module.disable_progress_bars()
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    return module


def saved(datasets, path, **options):
    dataset = datasets.Dataset.from_dict({"id": list(range(300)), "text": SAVED, "meta": [{"body": text} for text in SAVED]})
    dataset.save_to_disk(path, **options)
    return path


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_saved_dataset_is_read_in_its_order(tmp_path, datasets, num_shards):
    folder = saved(datasets, tmp_path / "saved", num_shards=num_shards)
    found = source(folder)
    assert [path.name for path in found.files()] == [f"data-{n:05d}-of-{num_shards:05d}.arrow" for n in range(num_shards)]
    assert texts(found) == SAVED == list(datasets.load_from_disk(folder)["text"])
    assert texts(source(folder / "*.arrow")) == SAVED
    assert texts(source(folder, folder / "*.arrow", text_key="meta.body")) == SAVED


def test_the_order_is_the_one_of_the_state(tmp_path, datasets):
    folder = saved(datasets, tmp_path / "saved", num_shards=3)
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    assert (
        texts(source(folder)) == SAVED[200:] + SAVED[100:200] + SAVED[:100] == list(datasets.load_from_disk(folder)["text"])
    )
    other = saved(datasets, tmp_path / "another", num_shards=2)
    assert texts(source(folder, other)) == SAVED + texts(source(folder))  # directories come by their names


def test_a_shuffled_dataset_is_saved_shuffled(tmp_path, datasets):
    shuffled = datasets.load_from_disk(saved(datasets, tmp_path / "saved")).shuffle(seed=1)
    shuffled.save_to_disk(tmp_path / "shuffled")
    assert texts(source(tmp_path / "shuffled")) == list(shuffled["text"]) != SAVED


def test_rows_in_the_order_of_a_list_of_indices_are_refused(tmp_path, datasets):
    """As early versions saved what was shuffled."""
    folder = saved(datasets, tmp_path / "saved")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(DataError) as caught:
        source(folder).files()
    assert str(caught.value) == (
        f"{folder}: data.sources[0].paths: has its rows in another order than its files, given by indices; save it again"
        " after flatten_indices()"
    )
    (folder / "state.json").write_text(json.dumps(state | {"_indices_files": []}))
    assert texts(source(folder)) == SAVED


def test_the_files_of_its_cache(tmp_path, datasets):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SAVED))
    loaded = datasets.load_dataset(
        "json", data_files=str(tmp_path / "a.jsonl"), split="train", cache_dir=str(tmp_path / "c")
    )
    (cached,) = [file["filename"] for file in loaded.cache_files]
    assert texts(source(cached)) == SAVED
    upper = loaded.map(lambda row: {"text": row["text"].upper()}, batch_size=7)
    (cached,) = [file["filename"] for file in upper.cache_files]
    assert texts(source(cached)) == [text.upper() for text in SAVED]


def test_directories_that_are_no_dataset(tmp_path, datasets):
    folder = saved(datasets, tmp_path / "saved")
    both = tmp_path / "both"
    datasets.DatasetDict({name: datasets.load_from_disk(folder) for name in ("train", "test")}).save_to_disk(both)
    assert texts(source(both / "train")) == SAVED
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "state.json").write_text("{")
    shutil.copytree(folder, tmp_path / "nameless")
    (tmp_path / "nameless" / "state.json").write_text("{}")
    shutil.copytree(folder, tmp_path / "missing")
    (tmp_path / "missing" / "data-00000-of-00001.arrow").unlink()
    (tmp_path / "empty").mkdir()
    for name, message in {
        "both": f"is a DatasetDict; name a split of it: {both}/train, {both}/test",
        "damaged": "has a state.json that is damaged; save it again",
        "nameless": "has a state.json that names no _data_files; save it again",
        "empty": f"it has no state.json; name its files, for example {tmp_path}/empty/\\*.arrow",
        "missing": r"No such file or directory; correct or remove the path",
    }.items():
        with pytest.raises(DataError, match=rf"{name}.*: data.sources\[0\].paths: .*{message}"):
            source(tmp_path / name).files()
