"""Records of a file, or of a span of it, that know where they are: its lines, or the elements of its one JSON array."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llamajax.data.documents.json_arrays import array_elements
from llamajax.data.documents.text_files import BOM, READ_BYTES, TextFile, form_of, opened

_counted: dict[Path, tuple[int, int]] = {}
_counting = threading.Lock()


class Span(NamedTuple):
    """A stretch of a file. It has the lines, or the row groups, that begin in it; all records of a file that is compressed,
    or one array, begin at 0."""

    start: int
    """Bytes before it."""
    end: int
    """Where it ends, bytes from the beginning of the file."""


class Place(NamedTuple):
    """Where a line is, as `file:line`; lines before the span it is in are counted when that is asked for."""

    path: Path
    start: int
    """Where the first line of the span begins, bytes."""
    number: int
    """Of the line in its span, from 1."""

    def __str__(self) -> str:
        return f"{self.path}:{self.number + lines_before(self.path, self.start)}"


class ElementPlace(NamedTuple):
    """Where an element of a file's array is, as `file:line: record N`."""

    path: Path
    line: int
    """That it begins in, from 1."""
    number: int
    """From 1."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: record {self.number}"


class Line(NamedTuple):
    """A line that is not blank, or an element of an array."""

    text: bytes
    """Of a line, with its end; of what is too long, the beginning."""
    place: Place | ElementPlace
    bytes_read: int
    """How far into the file, as it lies on the disk, or into the span it ends, roughly."""


def read_lines(path: Path, max_bytes: int, span: Span | None = None) -> Iterator[Line]:
    """The lines that are not blank, or the elements of an array, at most `max_bytes` and one byte of each.

    Raises:
        BrokenArrayError: the array does not end as it should.
        As `opened`.
    """
    if span is not None and form_of(path).is_whole:
        if span.start:
            return
        span = None
    start, end = (0, None) if span is None else lines_extent(path, span)
    with opened(path, start) as file:
        if file.form.is_array and start == 0:
            yield from _read_elements(path, file, max_bytes)
            return
        lines, number = file.stream, 0
        at = start + (len(BOM) if file.form.has_bom and start == 0 else 0)
        while (end is None or at < end) and (line := lines.readline(max_bytes + 1)):
            number += 1
            at += len(line)
            rest = line
            while len(line) > max_bytes and rest and not rest.endswith(b"\n"):
                rest = lines.readline(READ_BYTES)
                at += len(rest)
            if not line.isspace():
                yield Line(line, Place(path, start, number), file.raw.tell() - start)


def _read_elements(path: Path, file: TextFile, max_bytes: int) -> Iterator[Line]:
    for element in array_elements(file.stream, max_bytes):
        yield Line(element.text, ElementPlace(path, element.line, element.number), file.raw.tell())


def lines_extent(path: Path, span: Span) -> tuple[int, int]:
    """Where the first record that begins in `span` starts and the last one ends, bytes; twice the same place if none does.

    Raises:
        As `form_of`.
    """
    if form_of(path).is_whole:
        return (0, 0) if span.start else (0, path.stat().st_size)
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
