"""Texts in a column of parquet and Arrow files, of which nothing else is decoded.

The text of a record, of a table or of JSON, is under a key of its own, or under `a.b`, the key b of what the key a holds.
A column of bytes is taken for one of UTF-8: Spark's old writers, among others, do not say that it is.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from llamajax.data.documents.lines import Span

PARQUET_ROWS = 256
"""Decoded from a parquet file at once."""

_AS_BYTES = {
    pyarrow.binary(): pyarrow.binary(), pyarrow.large_binary(): pyarrow.large_binary(),
    pyarrow.binary_view(): pyarrow.binary_view(),
    pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary(),
    pyarrow.string_view(): pyarrow.binary_view(),
}  # fmt: skip
_FILE_MAGIC = b"ARROW1"


class NoSuchKeyError(ValueError):
    """A record, or a table, has no such key; it says which part is missing, and what is there instead."""


def value_at(record: Mapping[str, object], key: str) -> object:
    """The value of the key in a JSON object; one of the whole name goes before one inside others.

    Raises:
        NoSuchKeyError: there is none.
    """
    if key in record:
        return record[key]
    value: object = record
    names = key.split(".")
    for depth, name in enumerate(names):
        if not isinstance(value, dict | Mapping):
            kind = "null" if value is None else type(value).__name__
            raise NoSuchKeyError(_no_holder(names, depth, f"{kind} and no JSON object"))
        if name not in value:
            raise NoSuchKeyError(_missing(names, depth, list(value)))
        value = value[name]
    return value


def column_at(schema: pyarrow.Schema, key: str) -> tuple[tuple[str, ...], pyarrow.DataType]:
    """The names of the column and of the fields inside it that lead to the key, and what is there.

    Raises:
        NoSuchKeyError: there is none, or two of a name.
    """
    names = [key] if key in schema.names else key.split(".")
    fields = list(schema)
    kind: pyarrow.DataType = pyarrow.struct([])
    for depth, name in enumerate(names):
        if depth and not pyarrow.types.is_struct(kind):
            raise NoSuchKeyError(_no_holder(names, depth, f"{kind} and no struct"))
        if depth:
            fields = list(kind)
        of_name = [field for field in fields if field.name == name]
        if not of_name:
            raise NoSuchKeyError(_missing(names, depth, [field.name for field in fields]))
        if len(of_name) > 1:
            raise NoSuchKeyError(f"has {len(of_name)} columns of the name {name!r}")
        kind = of_name[0].type
    return tuple(names), kind


def _missing(names: Sequence[str], depth: int, there: Sequence[str]) -> str:
    known = ", ".join(repr(name) for name in there[:8]) or "nothing"
    where = f" in {'.'.join(names[:depth])!r}" if depth else f" of {'.'.join(names)!r}" if len(names) > 1 else ""
    return f"has no {names[depth]!r}{where}, only {known}"


def _no_holder(names: Sequence[str], depth: int, instead: str) -> str:
    return f"has no {names[depth]!r} in {'.'.join(names[:depth])!r}, which is {instead}"


class NoTextError(NoSuchKeyError):
    """A column is there, but holds neither strings nor bytes."""


class Row(NamedTuple):
    """What a row has for a text."""

    number: int
    """Of the row in its file, from 1."""
    text: pyarrow.Scalar
    """Null, or a string or bytes, which may not be UTF-8."""
    bytes_read: int
    """How far into the file, or into the span, it ends, roughly."""

    def value(self) -> object:
        """The text; raises `UnicodeDecodeError` if it is not UTF-8."""
        value = self.text.as_py()
        return value.decode() if isinstance(value, bytes) else value


class RowGroups(NamedTuple):
    """Consecutive row groups of a file."""

    numbers: list[int]
    """Which they are, from 0."""
    first_row: int
    """Rows of the file before them."""
    num_rows: int
    """Theirs."""

    @classmethod
    def of(cls, file: pyarrow.parquet.ParquetFile, span: Span | None) -> "RowGroups":
        """Those that begin in `span`, or all."""
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
        """Where they start and end in the file, bytes, and what the file says of them elsewhere."""
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
    """The rows of a parquet file, or of the row groups that begin in `span`.

    Raises:
        NoSuchKeyError: there is no such column.
        NoTextError: it holds no strings.
        OSError: the file cannot be read.
        pyarrow.ArrowException: it is not what it should be.
    """
    with pyarrow.parquet.ParquetFile(path) as file:
        names = _names_of_text(file.schema_arrow, key)
        groups = RowGroups.of(file, span)
        row, size = groups.first_row, path.stat().st_size if span is None else span.end - span.start
        for batch in file.iter_batches(PARQUET_ROWS, row_groups=groups.numbers, columns=[".".join(names)]):
            for value in _inside(batch.column(names[0]), names[1:]):
                row += 1
                yield Row(row, value, size * (row - groups.first_row) // groups.num_rows)


def arrow_rows(path: Path, key: str) -> Iterator[Row]:
    """The rows of a file in Arrow's IPC format, that of streams, as `datasets` writes, or that of files.

    Raises:
        As `parquet_rows`.
    """
    with pyarrow.OSFile(str(path)) as file:  # not mapped: where the disk fails, the process would end with SIGBUS
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
    """The field of a struct that the names lead to; null where what holds it is."""
    for name in names:
        column = column.flatten()[column.type.get_field_index(name)]
    return column


def _checked(column: pyarrow.Array, names: Sequence[str]) -> pyarrow.Array:
    """As `_inside`, of what nobody has looked at: a damaged file could have texts that reach beyond its memory.

    Raises:
        pyarrow.ArrowException: it has.
    """
    column.validate()
    texts = _inside(column, names)
    if isinstance(texts, pyarrow.DictionaryArray):
        _check_texts(texts.dictionary)
        return pyarrow.DictionaryArray.from_arrays(texts.indices, texts.dictionary)  # which compares the indices
    _check_texts(texts)
    return texts


def _check_texts(texts: pyarrow.Array) -> None:
    """As bytes: which of them are not UTF-8 is told row by row."""
    texts.view(_AS_BYTES[texts.type]).validate(full=True)


class NotReadableError(ValueError):
    """A directory that cannot be read as one dataset; it says why, and what to do."""


def shards_of(folder: Path) -> list[Path]:
    """The files of a dataset of `Dataset.save_to_disk`, in the order of its rows.

    Raises:
        NotReadableError: it is none, or several, or its rows are others than those of the files.
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
            f"is no directory of Dataset.save_to_disk, it has no state.json; name its files, for example {folder}/*.arrow"
        ) from None
    if any(state[key] for key in state if key.startswith("_indices")):
        raise NotReadableError(
            "has its rows in another order than its files, by a list of indices; save it again after flatten_indices()"
        )
    try:
        return [folder / Path(file["filename"]).name for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise NotReadableError("has a state.json that names no _data_files; save it again") from None


def _json(path: Path) -> dict[str, Any]:
    """Raises `NotReadableError` if it is no JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise NotReadableError(f"has a {path.name} that is damaged; save it again")
    return content
