"""Stretches of a parquet file have each of its row groups once."""

import pyarrow
import pyarrow.parquet
import pytest

from llamajax.config.data import SourceConfig
from llamajax.data.documents.lines import Span
from llamajax.data.documents.row_groups import RowGroups
from llamajax.data.documents.sources import Source

TEXTS = [f"text {number} " * (number % 7) for number in range(1000)]


@pytest.fixture(params=["NONE", "ZSTD"])
def path(tmp_path, request):
    table = pyarrow.table({"id": range(1000), "text": TEXTS, "more": [["x"] * (n % 3) for n in range(1000)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=90, compression=request.param)
    return tmp_path / "a.parquet"


def spans(path, step):
    size = path.stat().st_size
    return [Span(at, min(at + step, size)) for at in range(0, size, step)]


@pytest.mark.parametrize("step", [1000, 4096, 10**6])
def test_stretches_have_every_row_once(path, step):
    source = Source(SourceConfig(kind="parquet", paths=(str(path),)), "data.sources[0]")
    found = [[document.text for document in source.documents([path], span)] for span in spans(path, step)]
    assert [text for of_span in found for text in of_span] == TEXTS
    assert {len(of_span) % 90 for of_span in found} <= {0, 10}


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
    """What lies beside it may be anything."""
    source = Source(SourceConfig(kind="parquet", paths=(str(path),)), "data.sources[0]")
    whole = path.read_bytes()
    last_end = 4
    for span in spans(path, 4096):
        expected = [document.text for document in source.documents([path], span)]
        if not expected:
            continue
        start, end, said = source.extent(path, span)
        assert last_end <= start < end
        assert b"total_compressed_size" in said
        last_end = end
        footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
        path.write_bytes(b"\0" * start + whole[start:end] + b"\0" * (footer - end) + whole[footer:])
        assert [document.text for document in source.documents([path], span)] == expected
        path.write_bytes(whole)
