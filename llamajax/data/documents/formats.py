"""File formats of documents, one class each, and the table that maps a source's `kind` to its format.

Anything wrong with a file becomes one `DataError` that names the file, the line and the remedy; a failing disk becomes a
`DiskError`. Memory stays bounded for files of any size: a document above `MAX_DOCUMENT_CHARS` is read in pieces, which end
at line ends where possible.
"""

import codecs
import contextlib
import json
import lzma
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import orjson
import pyarrow
import pyarrow.parquet

from llamajax import disk
from llamajax.config.data import SourceConfig
from llamajax.data.documents.columns import (
    NoSuchKeyError,
    NoTextError,
    Row,
    RowGroups,
    arrow_rows,
    parquet_rows,
    value_at,
)
from llamajax.data.documents.conversations import Conversation
from llamajax.data.documents.json_arrays import BrokenArrayError
from llamajax.data.documents.lines import Span, lines_extent, read_lines
from llamajax.data.documents.preferences import Preference
from llamajax.data.documents.prompts import PromptRecord
from llamajax.data.documents.remote import File, shown
from llamajax.data.documents.split import HEAD_CHARS, split_hash
from llamajax.data.documents.text_files import COMPRESSIONS, JSON_SUFFIXES, READ_BYTES, NoTextFileError, mark_of, opened
from llamajax.data.documents.token_records import Encoded
from llamajax.errors import DataError

MAX_DOCUMENT_CHARS = 2 * HEAD_CHARS
"""Maximum length of a document that is read in one piece: about half a million tokens."""

_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_HELP_TEXTS = Path("pydoc_data/topics.py")
_NOT_UTF8 = "is not UTF-8; convert the file, for example with iconv"


class Document(NamedTuple):
    """One text or a piece of one; may be empty."""

    text: str
    """For a conversation: everything said in it, or empty if none of it is trained on. For a preference: the prompt and its
    answers, or empty if one is empty. For a prompt: all said in it, or empty. For tokens: the ids as text."""
    bytes_read: int
    """End of this document in the source's files, in bytes, for progress reports."""
    split_hash: int = 0
    """Hash that decides whether the text is held out; equal for all pieces of a text."""
    conversation: Conversation | None = None
    """The conversation behind the text, in a `chat` source."""
    encoded: Encoded | None = None
    """The tokens, in a `tokenized` source."""
    preference: Preference | None = None
    """The answers behind the text, in a `preference` source."""
    prompt: PromptRecord | None = None
    """The prompt behind the text, in a `prompt` source."""
    where: object = None
    """Place of these tokens, for messages."""
    error: str = ""
    """Reason why this line or row is left out; its text is empty then."""
    goes_on: bool = False
    """Whether the next document continues this text."""


@dataclass(frozen=True)
class Format:
    """Finds and reads the files of a source. A new format needs a subclass and a row of `FORMATS`."""

    config: SourceConfig
    """Configuration of the source."""
    key: str
    """Configuration key of the source, named in error messages."""

    suffixes: ClassVar[tuple[str, ...]] = ("",)
    """File name suffixes to look for in a directory."""
    paired: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the files that accompany them. A path may then name just the prefix that both share."""
    fields_of_form: ClassVar[int] = 0
    """How many fields of a text file's `Form` affect its documents; 0 if its form is not checked."""
    is_packed: ClassVar[bool] = False
    """Whether a document may be longer than the file that holds it, because of compression."""
    has_targets: ClassVar[bool] = False
    """Whether documents say which of their tokens are trained on: conversations, and records of tokens."""
    has_preferences: ClassVar[bool] = False
    """Whether documents are preferences: two answers to one prompt, or one with a label."""
    has_prompts: ClassVar[bool] = False
    """Whether documents are prompts, which the model completes, with their records."""
    is_tokenized: ClassVar[bool] = False
    """Whether the files hold tokens instead of documents."""

    def described(self) -> str:
        """Returns a readable description of the files."""
        return ", ".join(map(shown, self.config.paths))

    def own_files(self) -> list[File] | None:
        """Returns the files of a format that has no paths, else None."""
        return None

    def is_dataset(self, folder: Path) -> bool:
        """Returns whether a directory is one dataset written by `Dataset.save_to_disk`."""
        return False

    def documents(self, path: Path, span: Span | None) -> Iterator[Document]:
        """Yields the documents of a file, or those that begin in `span` if the file `has_spans`; bad ones carry an `error`.

        Raises:
            The errors of `reading`.
        """
        raise TypeError(f"{self.key}: kind={self.config.kind} holds tokens, and no documents")

    def has_spans(self, file: File) -> bool:
        """Returns whether the file is cut into spans.

        It is if it has row groups or if its name says that it holds uncompressed lines. If the name is wrong, all records
        begin in the first span.
        """
        return False

    def extent(self, path: Path, span: Span) -> tuple[int, int, bytes]:
        """Returns the start and end of the records that begin in the span, in bytes, and what else decides its documents."""
        return *lines_extent(path, span), self.mark(path) if span.start == 0 else b""

    def mark(self, path: Path) -> bytes:
        """Returns what decides a file's documents besides its bytes and its name: the form that it is read in."""
        mark = mark_of(path) if self.fields_of_form else []
        return json.dumps(mark).encode() if any(mark[: self.fields_of_form]) else b""

    def error(self, where: object, message: str, field: str = "paths") -> DataError:
        """Returns an error about a field of the source."""
        return DataError(f"{where}: {self.key}.{field}: {message}")

    @contextlib.contextmanager
    def reading(self, path: object) -> Iterator[None]:
        """Turns errors with a file in this block into ones that name the file and the key of its source.

        Raises:
            DataError: the file is invalid.
            DiskError: the disk fails.
        """
        remedy = "replace or remove the file"
        try:
            yield
        except OSError as error:
            raise disk.cannot_read(error, f"{path}: {self.key}.paths: cannot be read", remedy) from error
        except (pyarrow.ArrowException, EOFError, lzma.LZMAError) as error:
            raise self.error(path, f"cannot be read: {str(error).splitlines()[0]}; {remedy}") from error
        except UnicodeDecodeError as error:  # from pyarrow, in a table's schema; texts are checked one by one
            raise self.error(path, f"cannot be read: the name of a column is not UTF-8; {remedy}") from error
        except NoTextFileError as error:
            kind = self.config.kind
            raise self.error(path, f"is {error}, which kind={kind} does not read; {error.remedy(kind)}") from error
        except BrokenArrayError as error:
            place = f"{path}:{error.line}: record {error.number}"
            raise self.error(place, f"{error}; correct the file, or copy it again") from error

    def checked_text(self, text: object, where: object) -> str:
        """Returns the text of a record, or raises `DataError` if it is not a valid string."""
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            message = f"{self.config.text_key!r} must be a string, not {kind}; correct or remove it"
            raise self.error(where, message, "text_key")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"{self.config.text_key!r} has half a surrogate pair, which is not a character; correct or remove it"
            raise self.error(where, message, "text_key") from error
        return text

    def no_such_key(self, where: object, error: NoSuchKeyError) -> DataError:
        """Returns the error for a record or file that lacks the text's key."""
        return self.error(where, f"{error}; correct the key or the file", "text_key")


class Text(Format):
    """One document per file."""

    fields_of_form = 2

    def documents(self, path: Path, span: Span | None) -> Iterator[Document]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        line, pending = 1, ""
        hash_of_all = None
        with opened(path) as file:
            at_end = False
            while not at_end:
                block = file.stream.read(READ_BYTES)
                at_end = not block
                try:
                    pending += decoder.decode(block, at_end)
                except UnicodeDecodeError as error:
                    line += error.object[: error.start].count(b"\n")
                    raise self.error(f"{path}:{line}", _NOT_UTF8) from error
                line += block.count(b"\n")
                if hash_of_all is None and len(pending) > MAX_DOCUMENT_CHARS:
                    hash_of_all = split_hash(pending)
                *pieces, pending = _cut(pending)
                for piece in pieces:
                    assert hash_of_all is not None
                    yield Document(piece, file.raw.tell(), hash_of_all, goes_on=True)
            yield Document(pending, file.raw.tell(), split_hash(pending) if hash_of_all is None else hash_of_all)


class Stdlib(Text):
    """Sources and help texts of this Python."""

    fields_of_form = 0

    def described(self) -> str:
        return f"this Python's own sources and help texts in {sysconfig.get_path('stdlib')}, found through sysconfig"

    def own_files(self) -> list[File]:
        root = Path(sysconfig.get_path("stdlib"))
        with self.reading(root):
            found = sorted(root.rglob("*.py"))
        files: list[File] = [path for path in found if not _STDLIB_LEFT_OUT & set(path.relative_to(root).parts)]
        if not files:
            raise DataError(f"{self.key}.kind: this Python has no sources in {root}; use another kind of source")
        return files

    def documents(self, path: Path, span: Span | None) -> Iterator[Document]:
        if path.parts[-2:] != _HELP_TEXTS.parts:
            yield from super().documents(path, span)
            return
        from pydoc_data.topics import topics

        for topic in sorted(topics):
            yield Document(topics[topic], path.stat().st_size, split_hash(topics[topic]))


class Jsonl(Format):
    """One document per line, or per element of a file that is one JSON array."""

    suffixes = JSON_SUFFIXES
    fields_of_form = 3
    max_line_bytes: ClassVar[int] = 2**28
    """Maximum length of a decompressed line; anything longer is a mistake or a decompression bomb."""

    def has_spans(self, file: File) -> bool:
        return file.suffix.lower() not in COMPRESSIONS

    def documents(self, path: Path, span: Span | None) -> Iterator[Document]:
        for line, where, bytes_read in read_lines(path, self.max_line_bytes, span):
            try:
                of_line = self._of_line(line, where, bytes_read)
            except DataError as error:
                yield Document("", bytes_read, error=str(error))
            else:
                yield from of_line

    def _of_line(self, line: bytes, where: object, bytes_read: int) -> Iterable[Document]:
        return _in_pieces(self._text(line, where), bytes_read)

    def _text(self, line: bytes, where: object) -> str:
        with contextlib.suppress(orjson.JSONDecodeError, NoSuchKeyError):  # twice as fast; rejects lone surrogates
            record = orjson.loads(line) if len(line) <= self.max_line_bytes else None
            if isinstance(record, dict) and isinstance(text := value_at(record, self.config.text_key), str):
                return text
        # On any failure Python's own parser reads the line again: it explains what is wrong, and it also accepts `NaN`.
        record = self._record(line, where)
        try:
            return self.checked_text(value_at(record, self.config.text_key), where)
        except NoSuchKeyError as error:
            raise self.no_such_key(where, error) from error

    def _record(self, line: bytes, where: object) -> dict[str, object]:
        if len(line) > self.max_line_bytes:
            raise self.error(where, f"a line may have at most {self.max_line_bytes:,} bytes; split the document")
        try:
            record = json.loads(line.rstrip(b"\r\n").decode())
        except UnicodeDecodeError as error:
            raise self.error(where, _NOT_UTF8) from error
        except RecursionError as error:
            raise self.error(where, "is nested too deeply; remove the line") from error
        except ValueError as error:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):
                line_of = f" of its line {error.lineno}" if error.lineno > 1 else ""
                reason = f"{error.msg} at column {error.colno}{line_of}"
            raise self.error(where, f"is not JSON: {reason}; correct or remove the line") from error
        if not isinstance(record, dict):
            raise self.error(where, f"must be a JSON object, not {type(record).__name__}; correct or remove the line")
        return record


class Arrow(Format):
    """One document per row of a file in Arrow's IPC format."""

    is_packed = True

    def is_dataset(self, folder: Path) -> bool:
        return True

    def documents(self, path: Path, span: Span | None) -> Iterator[Document]:
        try:
            for row in self._rows(path, span):
                where, bytes_read = f"{path}:{row.number}", row.bytes_read
                try:
                    text = self.checked_text(row.value(), where)
                except UnicodeDecodeError:
                    message = "is not UTF-8; correct or remove the row, or choose another column"
                    yield Document("", bytes_read, error=str(self.error(where, message)))
                except DataError as error:
                    yield Document("", bytes_read, error=str(error))
                else:
                    yield from _in_pieces(text, bytes_read)
        except NoTextError as error:
            raise self.error(str(path), f"{error}; choose another column", "text_key") from error
        except NoSuchKeyError as error:
            raise self.no_such_key(path, error) from error

    def _rows(self, path: Path, span: Span | None) -> Iterator[Row]:
        return arrow_rows(path, self.config.text_key)


class Parquet(Arrow):
    """One document per row of a parquet file."""

    suffixes = (".parquet",)

    def is_dataset(self, folder: Path) -> bool:
        return False

    def has_spans(self, file: File) -> bool:
        return True

    def extent(self, path: Path, span: Span) -> tuple[int, int, bytes]:
        with pyarrow.parquet.ParquetFile(path) as file:
            return RowGroups.of(file, span).extent(file)

    def _rows(self, path: Path, span: Span | None) -> Iterator[Row]:
        return parquet_rows(path, self.config.text_key, span)


class Megatron(Format):
    """Tokens in the files of Megatron-LM."""

    suffixes = (".idx",)
    paired = (".bin",)
    is_tokenized = True


def _cut(text: str) -> Iterator[str]:
    """Yields the text in parts of at most `MAX_DOCUMENT_CHARS`, cut at line ends where possible; at least one part."""
    start = 0
    while len(text) - start > MAX_DOCUMENT_CHARS:
        end = text.rfind("\n", start, start + MAX_DOCUMENT_CHARS) + 1 or start + MAX_DOCUMENT_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def _in_pieces(text: str, bytes_read: int) -> Iterator[Document]:
    """Yields a document per part of the text that `_cut` returns."""
    hash_of_all = split_hash(text)
    *pieces, last = _cut(text)
    yield from (Document(piece, bytes_read, hash_of_all, goes_on=True) for piece in pieces)
    yield Document(last, bytes_read, hash_of_all)


def utf8_length(text: str) -> int:
    """Returns the number of bytes of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
