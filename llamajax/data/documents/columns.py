"""Reads texts from one column of parquet and Arrow files, or records from several; no other column is decoded.

In tables and in JSON alike, a text's key is either a field's own name or `a.b`, the field b inside the field a.
A column of bytes is read as UTF-8: some writers, such as old versions of Spark, do not mark strings as such.
"""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from llamajax.data.documents.lines import Span

PARQUET_ROWS = 256
"""Number of rows decoded from a parquet file at a time."""

_AS_BYTES = {
    pyarrow.binary(): pyarrow.binary(), pyarrow.large_binary(): pyarrow.large_binary(),
    pyarrow.binary_view(): pyarrow.binary_view(),
    pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary(),
    pyarrow.string_view(): pyarrow.binary_view(),
}  # fmt: skip
_FILE_MAGIC = b"ARROW1"


class NoSuchKeyError(ValueError):
    """A record or table lacks a key; the message names the missing part and the keys that exist."""


def value_at(record: Mapping[str, object], key: str) -> object:
    """Returns the value of the key in a JSON object. A field with the full dotted name takes precedence over nested ones.

    Raises:
        NoSuchKeyError: the object has no such key.
    """
    if key in record:
        return record[key]
    value: object = record
    names = key.split(".")
    for depth, name in enumerate(names):
        if not isinstance(value, dict | Mapping):
            kind = "null" if value is None else type(value).__name__
            raise NoSuchKeyError(_no_holder(names, depth, f"{kind}, not a JSON object"))
        if name not in value:
            raise NoSuchKeyError(_missing(names, depth, list(value)))
        value = value[name]
    return value


def column_at(schema: pyarrow.Schema, key: str) -> tuple[tuple[str, ...], pyarrow.DataType]:
    """Returns the names that lead to the key, from the column through its nested fields, and the type found there.

    Raises:
        NoSuchKeyError: no column or field has the name, or two have it.
    """
    names = [key] if key in schema.names else key.split(".")
    fields = list(schema)
    kind: pyarrow.DataType = pyarrow.struct([])
    for depth, name in enumerate(names):
        if depth and not pyarrow.types.is_struct(kind):
            raise NoSuchKeyError(_no_holder(names, depth, f"{kind}, not a struct"))
        if depth:
            fields = list(kind)
        of_name = [field for field in fields if field.name == name]
        if not of_name:
            raise NoSuchKeyError(_missing(names, depth, [field.name for field in fields]))
        if len(of_name) > 1:
            raise NoSuchKeyError(f"has {len(of_name)} columns named {name!r}")
        kind = of_name[0].type
    return tuple(names), kind


def _missing(names: Sequence[str], depth: int, there: Sequence[str]) -> str:
    known = ", ".join(repr(name) for name in there[:8]) or "nothing"
    where = f" in {'.'.join(names[:depth])!r}" if depth else f" of {'.'.join(names)!r}" if len(names) > 1 else ""
    return f"has no {names[depth]!r}{where}, only {known}"


def _no_holder(names: Sequence[str], depth: int, instead: str) -> str:
    return f"has no {names[depth]!r} in {'.'.join(names[:depth])!r}, which is {instead}"


class NoTextError(NoSuchKeyError):
    """The column exists but holds neither strings nor bytes."""


class Row(NamedTuple):
    """The text of one row."""

    number: int
    """Row number in the file, from 1."""
    text: pyarrow.Scalar
    """A string, or bytes that may not be UTF-8, or null."""
    bytes_read: int
    """Approximate end of the row in the file or span, in bytes."""

    def value(self) -> object:
        """Returns the text; raises `UnicodeDecodeError` if it is not UTF-8."""
        value = self.text.as_py()
        return value.decode() if isinstance(value, bytes) else value


class RecordRow(NamedTuple):
    """Some columns of one row."""

    number: int
    """Row number in the file, from 1."""
    values: dict[str, pyarrow.Scalar]
    """Values of the columns that are read."""
    others: tuple[str, ...]
    """Names of the other columns."""
    bytes_read: int
    """Approximate end of the row in the file or span, in bytes."""

    def record(self) -> dict[str, Any]:
        """Returns the row as JSON would hold it, null in columns that are not read; raises `UnicodeDecodeError` for texts
        that are not UTF-8."""
        read = {name: _as_json(value.as_py(maps_as_pydicts="strict")) for name, value in self.values.items()}
        return dict.fromkeys(self.others) | read


def _as_json(value: Any) -> Any:
    """Returns a value of a table without the fields that all structs have but this one does not use, which are null."""
    match value:
        case dict():
            return {key: _as_json(inner) for key, inner in value.items() if inner is not None}
        case list():
            return value if value and isinstance(value[0], int | float) else [_as_json(inner) for inner in value]
        case bytes():
            return value.decode()
        case str() | int() | float() | None:
            return value
        case _:  # times and the like
            return str(value)


class RowGroups(NamedTuple):
    """Consecutive row groups of a parquet file."""

    numbers: list[int]
    """Indices of the row groups, from 0."""
    first_row: int
    """Number of rows of the file before them."""
    num_rows: int
    """Number of rows in them."""

    @classmethod
    def of(cls, file: pyarrow.parquet.ParquetFile, span: Span | None) -> "RowGroups":
        """Returns the row groups that begin in `span`, or all."""
        metadata = file.metadata
        of_all = range(metadata.num_row_groups)
        numbers = [n for n in of_all if span is None or span.start <= _start(metadata.row_group(n)) < span.end]
        before = numbers[0] if numbers else 0
        return cls(
            numbers,
            first_row=sum(metadata.row_group(n).num_rows for n in range(before)),
            num_rows=sum(metadata.row_group(n).num_rows for n in numbers),
        )

    def extent(self, file: pyarrow.parquet.ParquetFile) -> tuple[int, int, bytes]:
        """Returns where the groups start and end in the file, in bytes, and their metadata from elsewhere in it."""
        if not self.numbers:
            return 0, 0, b""
        groups = [file.metadata.row_group(n) for n in self.numbers]
        said = json.dumps([str(file.schema_arrow), [group.to_dict() for group in groups]], default=repr)
        return min(map(_start, groups)), max(map(_end, groups)), said.encode()


def _start(group: pyarrow.parquet.RowGroupMetaData) -> int:
    columns = [group.column(n) for n in range(group.num_columns)]
    return min(column.dictionary_page_offset or column.data_page_offset for column in columns)


def _end(group: pyarrow.parquet.RowGroupMetaData) -> int:
    columns = [group.column(n) for n in range(group.num_columns)]
    starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
    return max(start + column.total_compressed_size for start, column in zip(starts, columns, strict=True))


def parquet_rows(path: Path, key: str, span: Span | None = None) -> Iterator[Row]:
    """Yields the rows of a parquet file, or of the row groups that begin in `span`.

    Raises:
        NoSuchKeyError: the file has no such column.
        NoTextError: the column holds no strings.
        OSError: the file cannot be read.
        pyarrow.ArrowException: the file is invalid.
    """
    with pyarrow.parquet.ParquetFile(path) as file:
        names = _names_of_text(file.schema_arrow, key)
        groups = RowGroups.of(file, span)
        row, size = groups.first_row, path.stat().st_size if span is None else span.end - span.start
        for batch in file.iter_batches(PARQUET_ROWS, row_groups=groups.numbers, columns=[".".join(names)]):
            for value in _inside(batch.column(names[0]), names[1:]):
                row += 1
                yield Row(row, value, size * (row - groups.first_row) // groups.num_rows)


def parquet_records(path: Path, columns: Container[str], span: Span | None = None) -> Iterator[RecordRow]:
    """Yields the given columns of a parquet file, as far as it has them, row by row; has the errors of `parquet_rows`."""
    with pyarrow.parquet.ParquetFile(path) as file:
        names, others = _chosen(file.schema_arrow, columns)
        groups = RowGroups.of(file, span)
        row, size = groups.first_row, path.stat().st_size if span is None else span.end - span.start
        for batch in file.iter_batches(PARQUET_ROWS, row_groups=groups.numbers, columns=names):
            for index in range(batch.num_rows):
                row += 1
                values = {name: batch.column(name)[index] for name in names}
                yield RecordRow(row, values, others, size * (row - groups.first_row) // groups.num_rows)


def arrow_records(path: Path, columns: Container[str]) -> Iterator[RecordRow]:
    """Yields the given columns of an Arrow IPC file, as far as it has them, row by row; has the errors of `arrow_rows`."""
    with pyarrow.OSFile(str(path)) as file:  # see `arrow_rows`
        is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        opened = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
        file.seek(0)
        schema = opened(file).schema
        names, others = _chosen(schema, columns)
        file.seek(0)
        reader = opened(file, options=pyarrow.ipc.IpcReadOptions(included_fields=list(map(schema.names.index, names))))
        row, size = 0, file.size()
        for number, batch in enumerate(_batches(reader)):
            reached = size * (number + 1) // reader.num_record_batches if is_file else file.tell()
            batch.validate(full=True)
            for index in range(batch.num_rows):
                row += 1
                yield RecordRow(row, {name: batch.column(name)[index] for name in names}, others, reached)


def _chosen(schema: pyarrow.Schema, columns: Container[str]) -> tuple[list[str], tuple[str, ...]]:
    """Returns the columns of a table that are read, and the others."""
    names = [name for name in schema.names if name in columns]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise NoSuchKeyError(f"has {names.count(double)} columns named {double!r}")
    return names, tuple(name for name in schema.names if name not in names)


def arrow_rows(path: Path, key: str) -> Iterator[Row]:
    """Yields the rows of an Arrow IPC file, in the streaming format (which `datasets` writes) or the file format.

    Raises:
        As `parquet_rows`.
    """
    with pyarrow.OSFile(str(path)) as file:  # not memory-mapped: a failing disk would kill the process with SIGBUS
        is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        opened = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
        file.seek(0)
        schema = opened(file).schema
        names = _names_of_text(schema, key)
        file.seek(0)
        reader = opened(file, options=pyarrow.ipc.IpcReadOptions(included_fields=[schema.names.index(names[0])]))
        row, size = 0, file.size()
        for number, batch in enumerate(_batches(reader)):
            reached = size * (number + 1) // reader.num_record_batches if is_file else file.tell()
            for value in _checked(batch.column(0), names[1:]):
                row += 1
                yield Row(row, value, reached)


def _batches(
    reader: pyarrow.ipc.RecordBatchFileReader | pyarrow.ipc.RecordBatchStreamReader,
) -> Iterator[pyarrow.RecordBatch]:
    if isinstance(reader, pyarrow.ipc.RecordBatchStreamReader):
        yield from reader
    else:
        yield from map(reader.get_batch, range(reader.num_record_batches))


def _names_of_text(schema: pyarrow.Schema, key: str) -> tuple[str, ...]:
    names, kind = column_at(schema, key)
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if kind not in _AS_BYTES:
        raise NoTextError(f"column {key!r} must hold strings, not {kind}")
    return names


def _inside(column: pyarrow.Array, names: Sequence[str]) -> pyarrow.Array:
    """Returns the nested field that the names lead to; null where the struct around it is null."""
    for name in names:
        column = column.flatten()[column.type.get_field_index(name)]
    return column


def _checked(column: pyarrow.Array, names: Sequence[str]) -> pyarrow.Array:
    """Returns what `_inside` does, after validation: texts of a damaged file could reach beyond its memory.

    Raises:
        pyarrow.ArrowException: the column is damaged.
    """
    column.validate()
    texts = _inside(column, names)
    if isinstance(texts, pyarrow.DictionaryArray):
        _check_texts(texts.dictionary)
        return pyarrow.DictionaryArray.from_arrays(texts.indices, texts.dictionary)  # this checks the indices
    _check_texts(texts)
    return texts


def _check_texts(texts: pyarrow.Array) -> None:
    """Validates the texts as bytes; the caller checks row by row whether they are UTF-8."""
    texts.view(_AS_BYTES[texts.type]).validate(full=True)


class NotReadableError(ValueError):
    """A directory cannot be read as one dataset; the message says why, and what to do."""


def shards_of(folder: Path) -> list[Path]:
    """Returns the files of a dataset written by `Dataset.save_to_disk`, in the order of its rows.

    Raises:
        NotReadableError: it is not a dataset, or has several splits, or its rows are not in the order of its files.
        OSError: a file cannot be read.
    """
    try:
        splits = _json(folder / "dataset_dict.json")["splits"]
    except FileNotFoundError:
        pass
    else:
        raise NotReadableError(f"is a DatasetDict; name a split of it: {', '.join(str(folder / split) for split in splits)}")
    try:
        state = _json(folder / "state.json")
    except FileNotFoundError:
        raise NotReadableError(
            f"was not written by Dataset.save_to_disk: it has no state.json; name its files, for example {folder}/*.arrow"
        ) from None
    if any(state[key] for key in state if key.startswith("_indices")):
        raise NotReadableError(
            "has its rows in another order than its files, given by indices; save it again after flatten_indices()"
        )
    try:
        return [folder / Path(file["filename"]).name for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise NotReadableError("has a state.json that names no _data_files; save it again") from None


def _json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in the file; raises `NotReadableError` if it holds none."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise NotReadableError(f"has a {path.name} that is damaged; save it again")
    return content
