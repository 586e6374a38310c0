"""Reads the records of a file or of a span of it, with their places: lines, or the elements of a single JSON array."""

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
    """A byte range of a file.

    It contains the lines or row groups that begin in it. All records of a compressed file or of a JSON array begin at 0.
    """

    start: int
    """First byte of the span."""
    end: int
    """First byte after the span."""


class Place(NamedTuple):
    """Place of a line, shown as `file:line`. The lines before its span are counted only when the text is needed."""

    path: Path
    start: int
    """Byte offset of the first line of the span."""
    number: int
    """Line number within the span, from 1."""

    def __str__(self) -> str:
        return f"{self.path}:{self.number + lines_before(self.path, self.start)}"


class ElementPlace(NamedTuple):
    """Place of an array element, shown as `file:line: record N`."""

    path: Path
    line: int
    """Line that the element begins on, from 1."""
    number: int
    """Number of the element, from 1."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: record {self.number}"


class Line(NamedTuple):
    """A line that is not blank, or an element of an array."""

    text: bytes
    """The line with its line ending; only the beginning if it is too long."""
    place: Place | ElementPlace
    bytes_read: int
    """Approximate end of the line, in bytes of the file on disk (compressed if it is), counted from the span's start."""


def read_lines(path: Path, max_bytes: int, span: Span | None = None) -> Iterator[Line]:
    """Yields the lines that are not blank, or the elements of an array, each cut to `max_bytes` + 1 bytes.

    Raises:
        BrokenArrayError: the array is truncated, or something follows it.
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
    """Returns where the first record that begins in `span` starts and where the last one ends, in bytes; equal if none does.

    Raises:
        As `form_of`.
    """
    if form_of(path).is_whole:
        return (0, 0) if span.start else (0, path.stat().st_size)
    with path.open("rb") as file:
        return _next_line(file, span.start), _next_line(file, span.end)


def _next_line(file: io.BufferedReader, at: int) -> int:
    """Returns the offset of the first line that begins at or after `at`, or the end of the file."""
    if at == 0:
        return 0
    file.seek(at - 1)
    while (rest := file.readline(READ_BYTES)) and not rest.endswith(b"\n"):
        pass
    return file.tell()


def lines_before(path: Path, end: int) -> int:
    """Returns how many lines end before byte `end` of the file. Counting resumes where the last call stopped."""
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
