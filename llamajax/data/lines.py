"""Lines of a file, or of a stretch of it, that know where they are."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow

READ_BYTES = 2**20
"""Read from a file at once."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""By the end of a file's name; a compressed file is read from its beginning only."""

_counted: dict[Path, tuple[int, int]] = {}
_counting = threading.Lock()


class Span(NamedTuple):
    """A stretch of a file. It has the lines, or the row groups, that begin in it."""

    start: int
    """Bytes before it."""
    end: int
    """Where it ends, bytes from the beginning of the file."""


class Place(NamedTuple):
    """Where a line is, as `file:line`; lines before the stretch it is in are counted when that is asked for."""

    path: Path
    start: int
    """Where the first line of the stretch begins, bytes."""
    number: int
    """Of the line in its stretch, from 1."""

    def __str__(self) -> str:
        return f"{self.path}:{self.number + lines_before(self.path, self.start)}"


class Line(NamedTuple):
    """A line that is not blank."""

    text: bytes
    """With its end; of a line that is too long, the beginning."""
    place: Place
    bytes_read: int
    """How far into the file, as it lies on the disk, or into the stretch it ends, roughly."""


def read_lines(path: Path, max_bytes: int, span: Span | None = None) -> Iterator[Line]:
    """The lines that are not blank, at most `max_bytes` and one byte of each; of a compressed file those of what it holds.

    Raises:
        OSError: the file cannot be read.
    """
    compression = COMPRESSIONS.get(path.suffix)
    assert span is None or compression is None
    with path.open("rb", buffering=0) as file:
        start, end = (0, None) if span is None else lines_extent(path, span)
        file.seek(start)
        stream = pyarrow.CompressedInputStream(file, compression) if compression else file
        lines = io.BufferedReader(stream, READ_BYTES)  # pyright: ignore[reportArgumentType] (pyarrow's reads like io's)
        number, at = 0, start
        while (end is None or at < end) and (line := lines.readline(max_bytes + 1)):
            number += 1
            at += len(line)
            rest = line
            while len(line) > max_bytes and rest and not rest.endswith(b"\n"):
                rest = lines.readline(READ_BYTES)
                at += len(rest)
            if not line.isspace():
                yield Line(line, Place(path, start, number), file.tell() - start)


def lines_extent(path: Path, span: Span) -> tuple[int, int]:
    """Where the first line that begins in `span` starts and the last one ends, bytes; twice the same place if none does.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return _next_line(file, span.start), _next_line(file, span.end)


def _next_line(file: io.BufferedReader, at: int) -> int:
    """Where the first line begins that does so at `at` or behind it; the end of the file if none does."""
    if at == 0:
        return 0
    file.seek(at - 1)
    while (rest := file.readline(READ_BYTES)) and not rest.endswith(b"\n"):
        pass
    return file.tell()


def lines_before(path: Path, end: int) -> int:
    """How many lines end before byte `end` of the file, counted on from where that was asked last."""
    if end == 0:
        return 0
    with _counting:
        start, count = _counted.get(path, (0, 0))
        if start > end:
            start = count = 0
        with path.open("rb") as file:
            file.seek(start)
            while start < end and (block := file.read(min(READ_BYTES, end - start))):
                start += len(block)
                count += block.count(b"\n")
        _counted[path] = (end, count)
        return count
