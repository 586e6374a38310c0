"""Yields the elements of one JSON array one at a time, however large the array is.

This module looks only at brackets, strings and commas, as bytes. The caller parses each element as JSON.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from llamajax.data.documents.text_files import READ_BYTES

# All quantifiers are possessive (no backtracking), so each byte is looked at once.
_INSIDE = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_IN_STRING = re.compile(_INSIDE, re.DOTALL)
_TO_BRACKET = re.compile(rb'(?:[^][{}"]++|"' + _INSIDE + rb'")*+', re.DOTALL)
_TO_BRACKET_OR_COMMA = re.compile(rb'(?:[^][{}",]++|"' + _INSIDE + rb'")*+', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
_QUOTE, _COMMA, _OPEN, _END, _CLOSE = b'"'[0], b","[0], b"[{", b"]"[0], b"]}"


class Element(NamedTuple):
    """One element of the array."""

    text: bytes
    """The element as written; only the beginning if it is too long."""
    line: int
    """Line that the element begins on, from 1."""
    number: int
    """Number of the element, from 1."""


class BrokenArrayError(ValueError):
    """The array does not end as it should, so the rest of it is unknown."""

    def __init__(self, message: str, line: int, number: int) -> None:
        """Stores the message, and the line and number of the element being read."""
        super().__init__(message)
        self.line, self.number = line, number


def array_elements(stream: BinaryIO, max_bytes: int) -> Iterator[Element]:
    """Yields the elements of the array that fills a stream, each cut to `max_bytes` + 1 bytes.

    Raises:
        BrokenArrayError: the stream ends within the array, or continues after it.
        As `stream.read`.
    """
    scan = _Scan(stream, max_bytes)
    while True:
        sign = scan.pass_element()
        element = scan.take_element()
        if sign == _END and not element.text and element.number == 1:
            break
        yield element
        if sign == _END:
            break
    scan.check_nothing_follows()


class _Scan:
    """Reading position in the array."""

    def __init__(self, stream: BinaryIO, max_bytes: int) -> None:
        self._stream, self._max_bytes = stream, max_bytes
        self._buffer = bytearray()
        self._begin = self._at = 0
        # Buffer offsets: the start of the current element, and the first byte not yet looked at.
        self._line, self._number = 1, 1
        # The current element's first line, and its number.
        self._beginning, self._lines_passed = b"", 0
        # For an element that is too long: its beginning, and the count of its line ends that have left the buffer.
        self._skip_space()
        assert self._buffer[self._at] == _OPEN[0], "the caller has seen the bracket"
        self._begin = self._at = self._at + 1

    def _skip_space(self) -> bool:
        """Moves to the next byte that is not white space, where an element begins; returns False at the stream's end."""
        while True:
            match = _SPACE.match(self._buffer, self._at)
            assert match is not None
            self._line += self._buffer.count(b"\n", self._at, match.end())
            self._begin = self._at = match.end()
            if self._at < len(self._buffer):
                return True
            if not self._reads_on():
                return False

    def pass_element(self) -> int:
        """Moves past the comma or bracket that ends the current element, and returns that byte."""
        depth, in_string = 0, False
        self._skip_space()
        while True:
            pattern = _IN_STRING if in_string else _TO_BRACKET if depth else _TO_BRACKET_OR_COMMA
            match = pattern.match(self._buffer, self._at)
            assert match is not None
            self._at = match.end()
            sign = self._buffer[self._at] if self._at < len(self._buffer) else None
            if sign is None or (in_string and sign != _QUOTE):  # a backslash; the escaped byte is still to come
                if not self._reads_on():
                    raise self._broken("the file ends before its array does")
                continue
            self._at += 1
            if sign == _QUOTE:  # only of a string that crosses the buffer's end; patterns skip all others
                in_string = not in_string
            elif sign in _OPEN:
                depth += 1
            elif depth and sign in _CLOSE:
                depth -= 1
            elif sign in (_COMMA, _END):
                return sign

    def take_element(self) -> Element:
        """Returns the element that was just passed; the next one begins here."""
        text = self._beginning or bytes(self._buffer[self._begin : self._at - 1])
        if len(text) <= self._max_bytes:
            text = text.rstrip()
        element = Element(text[: self._max_bytes + 1], self._line, self._number)
        self._line += self._lines_passed + self._buffer.count(b"\n", self._begin, self._at)
        self._number += 1
        self._begin, self._beginning, self._lines_passed = self._at, b"", 0
        return element

    def check_nothing_follows(self) -> None:
        """Raises `BrokenArrayError` if anything follows the array."""
        if self._skip_space():
            raise self._broken("the file continues after its array")

    def _reads_on(self) -> bool:
        """Reads more into the buffer and drops what is no longer needed; returns False at the end of the stream."""
        if self._at - self._begin > self._max_bytes:
            self._beginning = self._beginning or bytes(self._buffer[self._begin : self._begin + self._max_bytes + 1])
            self._lines_passed += self._buffer.count(b"\n", self._begin, self._at)
            self._begin = self._at
        del self._buffer[: self._begin]
        self._at -= self._begin
        self._begin = 0
        block = self._stream.read(READ_BYTES)
        self._buffer += block
        return bool(block)

    def _broken(self, message: str) -> BrokenArrayError:
        return BrokenArrayError(message, self._line, self._number)
