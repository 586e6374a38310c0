"""Documents of a configured source: streamed from its files, in one fixed order.

Whatever is wrong with a file ends as one `DataError` that names the file, the line and the remedy; a disk that fails, as a
`DiskError`. Memory stays bounded whatever the size of a file: a document above `MAX_DOCUMENT_CHARS` comes in pieces, which
end with lines where there are any.
"""

import codecs
import contextlib
import json
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import orjson
import pyarrow
import pyarrow.parquet

from llamajax.config.data import DEFAULT_CACHE_DIR, SourceConfig
from llamajax.data.documents.columns import NoSuchKeyError, NoTextError, Row, RowGroups, arrow_rows, parquet_rows, value_at
from llamajax.data.documents.conversations import Conversation, conversation_of
from llamajax.data.documents.lines import Span, lines_extent, read_lines
from llamajax.data.documents.remote import File, shown
from llamajax.data.documents.source_files import Found, find_files, reading, source_error
from llamajax.data.documents.split import HEAD_CHARS, split_hash
from llamajax.data.documents.text_files import COMPRESSIONS, READ_BYTES, mark_of, opened
from llamajax.errors import DataError

MAX_DOCUMENT_CHARS = 2 * HEAD_CHARS
"""Longest document that is not read in pieces: about half a million tokens."""
MAX_LINE_BYTES = 2**28
"""Longest JSONL line, decompressed; what is longer is a mistake or a decompression bomb."""
MAX_CONVERSATION_BYTES = 2**22
"""Longest conversation: about a million tokens, of which no more than a row is learnt."""

_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_HELP_TEXTS = Path("pydoc_data/topics.py")


class Document(NamedTuple):
    """One text, or a piece of one, possibly empty."""

    text: str
    """Of a conversation: all that is said in it; empty if nothing of that is learnt."""
    bytes_read: int
    """How far into the source's files this document ends, bytes, for progress reports."""
    split_hash: int = 0
    """Decides whether it is held out; all pieces of a text have the same."""
    conversation: Conversation | None = None
    """What the text was made from, in a `chat` source."""
    error: str = ""
    """What is wrong with the line or row, if it is left out for that; its text is empty."""
    goes_on: bool = False
    """Whether the next one is a further piece of its text."""


@dataclass(frozen=True)
class Source:
    """A source of the configuration, and the key that its mistakes are reported under."""

    config: SourceConfig
    key: str
    cache_dir: Path = field(default_factory=lambda: Path(DEFAULT_CACHE_DIR).expanduser())
    """Where copies of remote files are kept."""

    def __str__(self) -> str:
        if self.config.kind == "stdlib":
            where = f"this Python's own sources and help texts in {sysconfig.get_path('stdlib')}, found through sysconfig"
        else:
            where = ", ".join(map(shown, self.config.paths))
        return f"{self.config.kind}: {where}"

    def files(self) -> list[Path]:
        """The source's files, as `found`; of remote ones the local copies, which are fetched where they are missing.

        Raises:
            As `found` and `local`.
        """
        return [self.local(file) for file in self.found()]

    def local(self, file: File, stop: threading.Event | None = None) -> Path:
        """Where the file can be read on this machine: itself, or its copy, which is fetched if it is not there.

        Raises:
            CancelledError: another thread set `stop` while it was fetched.
            DataError: a remote file is gone, has changed since it was found, or may not be read.
            DiskError: network or server fails.
            OSError: the cache's disk fails, or is full.
        """
        return file if isinstance(file, Path) else file.fetched(self.key, stop or threading.Event())

    def found(self) -> list[File]:
        """The source's files; errors as of `find_files`."""
        return self.look().files

    def look(self) -> Found:
        """The source's files, and what is left out; errors as of `find_files`."""
        if self.config.kind == "stdlib":
            return Found([*self._stdlib_files()], 0)
        return find_files(self.config, self.key, self.cache_dir)

    def has_spans(self, file: File) -> bool:
        """Whether the file is cut into stretches: it has row groups or, by its name, lines that are not compressed. Where a
        name is wrong, all that the file has begins in the first stretch."""
        kind = self.config.kind
        return kind == "parquet" or (kind in ("jsonl", "chat") and file.suffix.lower() not in COMPRESSIONS)

    def extent(self, path: Path, span: Span) -> tuple[int, int, bytes]:
        """Where what begins in the span starts and ends in the file, bytes, and what else decides its documents.

        Raises:
            DataError: the file cannot be read as the source's kind says.
            DiskError: the disk fails.
        """
        with self.reading(path):
            if self.config.kind != "parquet":
                return *lines_extent(path, span), self.mark(path) if span.start == 0 else b""
            with pyarrow.parquet.ParquetFile(path) as file:
                return RowGroups.of(file, span).extent(file)

    def mark(self, path: Path) -> bytes:
        """What decides the documents of a file besides its bytes and its name: how it is read; errors as of `extent`."""
        if self.config.kind not in ("text", "jsonl", "chat"):
            return b""
        with self.reading(path):
            mark = mark_of(path)
        return json.dumps(mark).encode() if any(mark[: 2 if self.config.kind == "text" else 3]) else b""

    def documents(self, files: Sequence[File], span: Span | None = None) -> Iterator[Document]:
        """The documents of `files`, in order; what is left out, as the configuration allows, is empty and says why.

        Args:
            files: some of `found()`.
            span: reads only what begins in this stretch of the one file; for those that `has_spans`.

        Raises:
            DataError: a file cannot be read as the source's kind says.
            DiskError: the disk fails.
            As `local`.
        """
        read = {
            "text": lambda path, _: self._read_text(path),
            "jsonl": self._read_jsonl,
            "parquet": lambda path, span: self._read_rows(path, parquet_rows(path, self.config.text_key, span)),
            "arrow": lambda path, _: self._read_rows(path, arrow_rows(path, self.config.text_key)),
            "stdlib": lambda path, _: self._read_stdlib(path),
            "chat": self._read_chat,
        }[self.config.kind]
        bytes_before = num_bad = 0
        for file in files:
            path = self.local(file)
            with self.reading(path):
                size = path.stat().st_size
                for document in read(path, span):
                    num_bad += bool(document.error)
                    if num_bad > self.config.max_bad_records:
                        raise self.too_many_bad(document.error)
                    yield document._replace(bytes_read=bytes_before + document.bytes_read)
            bytes_before += size

    def too_many_bad(self, error: str) -> DataError:
        """The error to end with when more records are bad than the configuration allows, of which `error` is one."""
        allowed = self.config.max_bad_records
        return DataError(f"{error}; {self.key}.max_bad_records: {allowed} allows no more of them" if allowed else error)

    def reading(self, path: File) -> contextlib.AbstractContextManager[None]:
        """Turns what goes wrong with a file of this source in the block into an error that names it; see `reading`."""
        return reading(path, self.key, self.config.kind)

    def _stdlib_files(self) -> list[Path]:
        root = Path(sysconfig.get_path("stdlib"))
        with self.reading(root):
            found = sorted(root.rglob("*.py"))
        files = [path for path in found if not _STDLIB_LEFT_OUT & set(path.relative_to(root).parts)]
        if not files:
            raise DataError(f"{self.key}.kind: this Python has no sources in {root}; use another kind of source")
        return files

    def _read_stdlib(self, path: Path) -> Iterator[Document]:
        if path.parts[-2:] != _HELP_TEXTS.parts:
            yield from self._read_text(path)
            return
        from pydoc_data.topics import topics

        for topic in sorted(topics):
            yield Document(topics[topic], path.stat().st_size, split_hash(topics[topic]))

    def _read_text(self, path: Path) -> Iterator[Document]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        line, pending = 1, ""
        hash_of_all = None
        with opened(path) as file:
            while block := file.stream.read(READ_BYTES):
                try:
                    pending += decoder.decode(block)
                except UnicodeDecodeError as error:
                    line += error.object[: error.start].count(b"\n")
                    raise self._error(f"{path}:{line}", _NOT_UTF8) from error
                line += block.count(b"\n")
                if hash_of_all is None and len(pending) > MAX_DOCUMENT_CHARS:
                    hash_of_all = split_hash(pending)
                *pieces, pending = _cut(pending)
                for piece in pieces:
                    assert hash_of_all is not None
                    yield Document(piece, file.raw.tell(), hash_of_all, goes_on=True)
            try:
                decoder.decode(b"", final=True)
            except UnicodeDecodeError as error:
                raise self._error(f"{path}:{line}", _NOT_UTF8) from error
            size = file.raw.tell()
            yield Document(pending, size, split_hash(pending) if hash_of_all is None else hash_of_all)

    def _read_jsonl(self, path: Path, span: Span | None) -> Iterator[Document]:
        for line, where, bytes_read in read_lines(path, MAX_LINE_BYTES, span):
            try:
                text = self._text_of_record(line, where)
            except NoSuchKeyError as error:
                yield Document("", bytes_read, error=str(self._no_such_key(where, error)))
            except DataError as error:
                yield Document("", bytes_read, error=str(error))
            else:
                yield from _documents(text, bytes_read)

    def _read_chat(self, path: Path, span: Span | None) -> Iterator[Document]:
        for line, where, bytes_read in read_lines(path, MAX_CONVERSATION_BYTES, span):
            try:
                record = self._record(line, where, MAX_CONVERSATION_BYTES)
                conversation = conversation_of(record, self.config.chat_format, where)
            except DataError as error:
                yield Document("", bytes_read, error=str(error))
                continue
            except ValueError as error:
                yield Document("", bytes_read, error=str(self._error(where, str(error), "chat_format")))
                continue
            text = conversation.text
            yield Document(text, bytes_read, split_hash(text), conversation)

    def _text_of_record(self, line: bytes, where: object) -> str:
        with contextlib.suppress(orjson.JSONDecodeError, NoSuchKeyError):  # it takes half the time, and no half characters
            record = orjson.loads(line) if len(line) <= MAX_LINE_BYTES else None
            if isinstance(record, dict) and isinstance(text := value_at(record, self.config.text_key), str):
                return text
        # What is wrong, if anything is, is told by Python's own reader, which takes `NaN` as well.
        return self._checked_text(value_at(self._record(line, where, MAX_LINE_BYTES), self.config.text_key), where)

    def _record(self, line: bytes, where: object, max_bytes: int) -> dict[str, object]:
        if len(line) > max_bytes:
            raise self._error(where, f"a line may have at most {max_bytes:,} bytes; split the document")
        try:
            record = json.loads(line.rstrip(b"\r\n").decode())
        except UnicodeDecodeError as error:
            raise self._error(where, _NOT_UTF8) from error
        except RecursionError as error:
            raise self._error(where, "is nested too deeply; remove the line") from error
        except ValueError as error:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):
                line_of = f" of its line {error.lineno}" if error.lineno > 1 else ""
                reason = f"{error.msg} at column {error.colno}{line_of}"
            raise self._error(where, f"is not JSON: {reason}; correct or remove the line") from error
        if not isinstance(record, dict):
            raise self._error(where, f"must be a JSON object, not {type(record).__name__}; correct or remove the line")
        return record

    def _read_rows(self, path: Path, rows: Iterator[Row]) -> Iterator[Document]:
        try:
            for row in rows:
                where, bytes_read = f"{path}:{row.number}", row.bytes_read
                try:
                    text = self._checked_text(row.value(), where)
                except UnicodeDecodeError:
                    message = "is not UTF-8; correct or remove the row, or choose another column"
                    yield Document("", bytes_read, error=str(self._error(where, message)))
                except DataError as error:
                    yield Document("", bytes_read, error=str(error))
                else:
                    yield from _documents(text, bytes_read)
        except NoTextError as error:
            raise self._error(str(path), f"{error}; choose another column", "text_key") from error
        except NoSuchKeyError as error:
            raise self._no_such_key(path, error) from error

    def _checked_text(self, text: object, where: object) -> str:
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            message = f"{self.config.text_key!r} must be a string, not {kind}; correct or remove it"
            raise self._error(where, message, "text_key")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"{self.config.text_key!r} has half a surrogate pair, which is no character; correct or remove it"
            raise self._error(where, message, "text_key") from error
        return text

    def _no_such_key(self, where: object, error: NoSuchKeyError) -> DataError:
        return self._error(where, f"{error}; correct the key or the file", "text_key")

    def _error(self, where: object, message: str, field: str = "paths") -> DataError:
        return source_error(self.key, where, message, field)


_NOT_UTF8 = "is not UTF-8; convert the file, for example with iconv"


def _cut(text: str) -> Iterator[str]:
    """The text in parts of at most `MAX_DOCUMENT_CHARS`, each ending with a line if it can; at least one part."""
    start = 0
    while len(text) - start > MAX_DOCUMENT_CHARS:
        end = text.rfind("\n", start, start + MAX_DOCUMENT_CHARS) + 1 or start + MAX_DOCUMENT_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def _documents(text: str, bytes_read: int) -> Iterator[Document]:
    """The text in pieces as `_cut` makes them."""
    hash_of_all = split_hash(text)
    *pieces, last = _cut(text)
    yield from (Document(piece, bytes_read, hash_of_all, goes_on=True) for piece in pieces)
    yield Document(last, bytes_read, hash_of_all)


def utf8_length(text: str) -> int:
    """Bytes of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
