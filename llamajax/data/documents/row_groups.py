"""Row groups of a parquet file, or those of a stretch of it."""

import json
from typing import NamedTuple

import pyarrow.parquet

from llamajax.data.documents.lines import Span


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
