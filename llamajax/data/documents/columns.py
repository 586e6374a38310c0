"""Texts in a column of parquet and Arrow files, of which nothing else is decoded.

A column of bytes is taken for one of UTF-8: Spark's old writers, among others, do not say that it is.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet

from llamajax.data.documents.lines import Span
from llamajax.data.documents.row_groups import RowGroups
from llamajax.data.documents.text_keys import NoSuchKeyError, column_at

PARQUET_ROWS = 256
"""Decoded from a parquet file at once."""

_AS_BYTES = {
    pyarrow.binary(): pyarrow.binary(), pyarrow.large_binary(): pyarrow.large_binary(),
    pyarrow.binary_view(): pyarrow.binary_view(),
    pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary(),
    pyarrow.string_view(): pyarrow.binary_view(),
}  # fmt: skip
_FILE_MAGIC = b"ARROW1"


class NoTextError(NoSuchKeyError):
    """A column is there, but holds neither strings nor bytes."""


class Row(NamedTuple):
    """What a row has for a text."""

    number: int
    """Of the row in its file, from 1."""
    text: pyarrow.Scalar
    """Null, or a string or bytes, which may not be UTF-8."""
    bytes_read: int
    """How far into the file, or into the stretch, it ends, roughly."""

    def value(self) -> object:
        """The text; raises `UnicodeDecodeError` if it is not UTF-8."""
        value = self.text.as_py()
        return value.decode() if isinstance(value, bytes) else value


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
