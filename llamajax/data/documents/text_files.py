"""Opens text files in whatever form they have: compressed or not, with or without a byte-order mark.

The first bytes decide how a file is read. Names do not: many a `.jsonl` is really gzip.
"""

import contextlib
import io
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow

READ_BYTES = 2**20
"""Number of bytes read from a file at a time."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
"""Compression formats by file name suffix, in lower case."""
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
"""Suffixes of JSON files, before the suffix of a compression."""
BOM = b"\xef\xbb\xbf"
"""The byte-order mark of UTF-8, which is not part of the text."""

_HEAD_BYTES = 2**12
# The first zstd frame may be a skippable one without data, as pzstd writes it.
_MAGICS = {
    "gzip": re.compile(rb"\x1f\x8b\x08"), "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), "xz": re.compile(rb"\xfd7zXZ\x00"),
}  # fmt: skip
_OTHERS = {
    "a parquet file": re.compile(rb"PAR1\x15"),
    "an Arrow file": re.compile(rb"ARROW1\0\0|\xff\xff\xff\xff.{3}\0", re.DOTALL),
    "a zip archive": re.compile(rb"PK\x03\x04"), "a tar archive": re.compile(rb".{257}ustar", re.DOTALL),
}  # fmt: skip
_SEEN_BY_NAME = {".gz": "gzip", ".zst": "zstd"}


class NoTextFileError(ValueError):
    """A file has another format; the message names it."""

    def remedy(self, kind: str) -> str:
        """Returns what to do about it for a source of this kind."""
        of_table = {"a parquet file": "parquet", "an Arrow file": "arrow"}.get(str(self))
        if of_table is None:
            return "unpack it, and name the files in it"
        if kind in ("chat", "preference", "prompt", "tokenized"):
            return f"let its name end in .{of_table}"
        return f"set kind: {of_table}, or name other files"


class Form(NamedTuple):
    """Encoding of the text in a file."""

    compression: str | None = None
    has_bom: bool = False
    is_array: bool = False
    """Whether the text begins with `[`: a JSON file is then one array instead of lines."""

    @property
    def is_whole(self) -> bool:
        """Whether records can be read only from the beginning of the file."""
        return self.compression is not None or self.is_array


def form_of(path: Path) -> Form:
    """Returns the form of a file, as its first bytes show it.

    Raises:
        NoTextFileError: the file has another format.
        OSError, EOFError, lzma.LZMAError, pyarrow.ArrowException: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        return _form(path, file.read(_HEAD_BYTES))


class TextFile(NamedTuple):
    """An open file."""

    stream: BinaryIO
    """The text as bytes, without a byte-order mark."""
    raw: io.FileIO
    """The file on disk; its position shows how much has been read."""
    form: Form


def mark_of(path: Path) -> list[str | bool | None]:
    """Returns the part of a file's form that goes into the hash of its content.

    It is empty for plain files and for those that were always decompressed because of their suffix, so that their hashes
    stay the same.

    Raises:
        As `form_of`, but the contents of a compressed file are not checked if its suffix names the compression.
    """
    with path.open("rb", buffering=0) as file:
        begin = file.read(_HEAD_BYTES)
    compression = _compression(begin)
    if compression is not None and compression == _SEEN_BY_NAME.get(path.suffix):
        return []
    form = _form(path, begin)
    return [*form] if any(form) else []


def holds_records(path: Path) -> bool:
    """Returns whether a file holds records rather than one text: its name says JSON lines, or its content is one array.

    Raises:
        As `form_of`.
    """
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    suffix = name.suffix.lower()
    return suffix in JSON_SUFFIXES and (suffix != ".json" or form_of(path).is_array)


@contextlib.contextmanager
def opened(path: Path, at: int = 0) -> Iterator[TextFile]:
    """Opens the file for reading.

    Args:
        path: the file.
        at: the byte to start at, for an uncompressed file.

    Raises:
        NoTextFileError: the file has another format.
        OSError, EOFError, lzma.LZMAError, pyarrow.ArrowException: the file cannot be read; later reads raise them too.
    """
    with path.open("rb", buffering=0) as file:
        form = _form(path, file.read(_HEAD_BYTES))
        file.seek(at)
        stream = _decompressed(file, form.compression)
        if form.has_bom and not at:
            stream.read(len(BOM))
        yield TextFile(stream, file, form)


def _form(path: Path, begin: bytes) -> Form:
    """Returns the form of a file that begins with these bytes."""
    compression = _compression(begin)
    if compression is not None:
        with path.open("rb", buffering=0) as file:
            begin = _decompressed(file, compression).read(_HEAD_BYTES)
    for name, magic in _OTHERS.items():
        if magic.match(begin):
            raise NoTextFileError(name)
    has_bom = begin.startswith(BOM)
    return Form(compression, has_bom, is_array=begin.removeprefix(BOM).lstrip(b" \t\r\n").startswith(b"["))


def _compression(begin: bytes) -> str | None:
    return next((name for name, magic in _MAGICS.items() if magic.match(begin)), None)


def _decompressed(file: io.FileIO, compression: str | None) -> BinaryIO:
    if compression == "xz":  # not supported by pyarrow
        return io.BufferedReader(lzma.open(file), READ_BYTES)
    stream = file if compression is None else pyarrow.CompressedInputStream(file, compression)
    return io.BufferedReader(stream, READ_BYTES)  # pyright: ignore[reportArgumentType] (pyarrow's reads like io's)
