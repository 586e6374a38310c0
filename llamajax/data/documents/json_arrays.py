"""The elements of one JSON array, one after the other, however large the array is.

Only brackets, strings and commas are looked at here, as bytes; whoever takes an element reads it as JSON.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from llamajax.data.documents.text_files import READ_BYTES

# No quantifier here gives back what it took, so that every byte is looked at once.
_INSIDE = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_IN_STRING = re.compile(_INSIDE, re.DOTALL)
_TO_BRACKET = re.compile(rb'(?:[^][{}"]++|"' + _INSIDE + rb'")*+', re.DOTALL)
_TO_BRACKET_OR_COMMA = re.compile(rb'(?:[^][{}",]++|"' + _INSIDE + rb'")*+', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
_QUOTE, _COMMA, _OPEN, _END, _CLOSE = b'"'[0], b","[0], b"[{", b"]"[0], b"]}"


class Element(NamedTuple):
    """One of them."""

    text: bytes
    """As it is written; of one that is too long, the beginning."""
    line: int
    """The line that it begins in, from 1."""
    number: int
    """From 1."""


class BrokenArrayError(ValueError):
    """The array does not end as it should, so that nobody knows what is missing."""

    def __init__(self, message: str, line: int, number: int) -> None:
        """Takes what is wrong, and the line and the number of the element that was read then."""
        super().__init__(message)
        self.line, self.number = line, number


def array_elements(stream: BinaryIO, max_bytes: int) -> Iterator[Element]:
    """The elements of the array that is all of a stream, at most `max_bytes` and one byte of each.

    Raises:
        BrokenArrayError: the stream ends within the array, or goes on behind it.
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
    """How far the array is read."""

    def __init__(self, stream: BinaryIO, max_bytes: int) -> None:
        self._stream, self._max_bytes = stream, max_bytes
        self._buffer = bytearray()
        self._begin = self._at = 0
        # In the buffer: where the present element begins, and up to where it was looked at.
        self._line, self._number = 1, 1
        # Of the present element: the line that it begins in, and which one it is.
        self._beginning, self._lines_passed = b"", 0
        # Of an element that is too long: what it begins with, and the ends of its lines before the buffer.
        self._skip_space()
        assert self._buffer[self._at] == _OPEN[0], "whoever calls has seen the bracket"
        self._begin = self._at = self._at + 1

    def _skip_space(self) -> bool:
        """Goes on to the next byte that is no white space, where an element begins; False at the end of the stream."""
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
        """Goes on behind the comma or the bracket that ends the present element, and returns that sign."""
        depth, in_string = 0, False
        self._skip_space()
        while True:
            pattern = _IN_STRING if in_string else _TO_BRACKET if depth else _TO_BRACKET_OR_COMMA
            match = pattern.match(self._buffer, self._at)
            assert match is not None
            self._at = match.end()
            sign = self._buffer[self._at] if self._at < len(self._buffer) else None
            if sign is None or (in_string and sign != _QUOTE):  # which is a backslash whose other half is to come
                if not self._reads_on():
                    raise self._broken("the file ends before its array does")
                continue
            self._at += 1
            if sign == _QUOTE:  # of a string that reaches beyond the buffer; all others are passed by the pattern
                in_string = not in_string
            elif sign in _OPEN:
                depth += 1
            elif depth and sign in _CLOSE:
                depth -= 1
            elif sign in (_COMMA, _END):
                return sign

    def take_element(self) -> Element:
        """The element that was passed; the next one begins here."""
        text = self._beginning or bytes(self._buffer[self._begin : self._at - 1])
        if len(text) <= self._max_bytes:
            text = text.rstrip()
        element = Element(text[: self._max_bytes + 1], self._line, self._number)
        self._line += self._lines_passed + self._buffer.count(b"\n", self._begin, self._at)
        self._number += 1
        self._begin, self._beginning, self._lines_passed = self._at, b"", 0
        return element

    def check_nothing_follows(self) -> None:
        """Raises `BrokenArrayError` if something stands behind the array."""
        if self._skip_space():
            raise self._broken("the file goes on behind its array")

    def _reads_on(self) -> bool:
        """Reads more into the buffer, and drops what is no longer needed; False at the end of the stream."""
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
