"""Sources of the configuration: the files that their paths name, match or have inside them, and the documents in these."""

import fnmatch
import glob
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import NamedTuple

from llamajax import disk
from llamajax.config.data import DEFAULT_CACHE_DIR, SourceConfig, is_remote
from llamajax.data.documents.columns import NotReadableError, shards_of
from llamajax.data.documents.formats import Document, Format
from llamajax.data.documents.lines import Span
from llamajax.data.documents.record_formats import FORMATS
from llamajax.data.documents.remote import File, RemoteFile, listed, shown
from llamajax.data.documents.text_files import COMPRESSIONS
from llamajax.errors import DataError

BESIDE = ("._*", ".DS_Store", "_SUCCESS", "*.crc", "_started_*", "_committed_*", "_metadata", "_common_metadata")
"""Names of files that macOS, Spark and Hadoop write beside data files. They are left out even if a pattern matches them."""
_UNFINISHED = ("_temporary", "_delta_log")
"""Directories in which Spark and Delta Lake keep files that are not, or not yet, part of a table."""


class Found(NamedTuple):
    """Files of a source."""

    files: list[File]
    num_left_out: int
    """Number of files left out because of `BESIDE`."""
    folders: Sequence[Path] = ()
    """Directories that match a pattern; their files are not included."""
    others: Sequence[PurePath] = ()
    """Other visible files in named directories: by their names they are not of the source's kind."""


@dataclass(frozen=True)
class Source:
    """A source of the configuration, and the key under which its errors are reported."""

    config: SourceConfig
    key: str
    cache_dir: Path = field(default_factory=lambda: Path(DEFAULT_CACHE_DIR).expanduser())
    """Directory for copies of remote files."""

    @property
    def format(self) -> Format:
        """Format of the files."""
        return FORMATS[self.config.kind](self.config, self.key)

    def __str__(self) -> str:
        return f"{self.config.kind}: {self.format.described()}"

    def files(self) -> list[Path]:
        """Returns the files that `look` finds; remote files as local copies, fetched if missing.

        Raises:
            As `look` and `local`.
        """
        return [self.local(file) for file in self.look().files]

    def local(self, file: File, stop: threading.Event | None = None) -> Path:
        """Returns where the file can be read on this machine: its own path, or a copy, which is fetched if missing.

        Raises:
            CancelledError: another thread set `stop` during the fetch.
            DataError: a remote file is gone, has changed since it was found, or may not be read.
            DiskError: the network or the server fails.
            OSError: the cache's disk fails or is full.
        """
        return file if isinstance(file, Path) else file.fetched(self.key, stop or threading.Event())

    def look(self) -> Found:
        """Finds the source's files, each once under the first of its names: local ones sorted, then remote ones.

        Raises:
            DataError: a path matches nothing, or is not a regular file, or access is denied.
            DiskError: the disk, the network or a server fails.
            EnvironmentMismatchError: a package for remote files is missing.
        """
        format, key = self.format, self.key
        if (own := format.own_files()) is not None:
            return Found(own, 0)
        places: dict[Path, tuple[Path, int]] = {}  # sort keys
        remote: dict[str, RemoteFile] = {}
        folders: list[Path] = []
        others: list[PurePath] = []

        def is_meant(path: PurePath) -> bool:
            stands = _stands_for(format, path)
            if not stands and _is_other(format, path):
                others.append(path)
            return stands

        for pattern in format.config.patterns:
            if is_remote(pattern):
                found = listed(pattern, key, self.cache_dir, is_meant)
                remote.update((file.url, file) for file in found if not _is_unfinished(PurePath(file.url), pattern))
                continue
            for path in _matches(format, pattern, folders, others):
                for number, file in enumerate(_shards(format, path)):
                    places.setdefault(file, (path, number))
        meant = [path for path in places if not _is_beside(path.name)]
        meant_remote = [url for url in remote if not _is_beside(PurePath(shown(url)).name)]
        files: dict[object, Path] = {}
        for path in sorted(meant, key=places.__getitem__):
            _check_regular(format, path)
            with format.reading(path):
                files.setdefault(_file_behind(path), path)
        if not files and not meant_remote:
            names = ", ".join(BESIDE)
            raise DataError(f"{key}.paths: all files are ones that systems write beside data ({names}); name others")
        num_left_out = len(places) - len(meant) + len(remote) - len(meant_remote)
        others = sorted({*others} - {*places})
        return Found([*files.values(), *(remote[url] for url in sorted(meant_remote))], num_left_out, folders, others)

    def documents(self, files: Sequence[File], span: Span | None = None) -> Iterator[Document]:
        """Yields the documents of `files`, in order; a bad one that the configuration allows is empty and carries its error.

        Args:
            files: some of the files that `look` finds.
            span: reads only what begins in this span of the one file; only for files that `Format.has_spans`.

        Raises:
            DataError: a file cannot be read as the source's kind says.
            DiskError: the disk fails.
            As `local`.
        """
        format = self.format
        bytes_before = num_bad = 0
        for file in files:
            path = self.local(file)
            with format.reading(path):
                size = path.stat().st_size
                for document in format.documents(path, span):
                    num_bad += bool(document.error)
                    if num_bad > self.config.max_bad_records:
                        raise self.too_many_bad(document.error)
                    yield document._replace(bytes_read=bytes_before + document.bytes_read)
            bytes_before += size

    def too_many_bad(self, error: str) -> DataError:
        """Returns the error that stops reading once more records are bad than allowed; `error` is the last of them."""
        allowed = self.config.max_bad_records
        return DataError(f"{error}; {self.key}.max_bad_records: {allowed} allows no more" if allowed else error)


def _matches(format: Format, pattern: str, folders: list[Path], others: list[PurePath]) -> list[Path]:
    """Returns the files that a pattern stands for; adds other matches to `folders` and `others`, see `Found`."""
    path = Path(pattern).expanduser()
    with format.reading(path):
        is_prefix = bool(format.paired) and disk.status(path) is None
        folder = Path(pattern.removesuffix(".idx")).expanduser() if is_prefix else path
        about = disk.status(folder)
        if about is not None and stat.S_ISDIR(about.st_mode) and not format.is_dataset(folder):
            return _files_below(format, folder, others)
        if not glob.has_magic(pattern):
            return [path]
        matches, beside = [], []
        for match in map(Path, disk.matching(str(path))):
            if not _is_unfinished(match, pattern):
                (beside if match != path and match.is_dir() else matches).append(match)
    if not matches and beside:
        raise DataError(
            f"{format.key}.paths: {pattern!r} matches only directories, such as {beside[0]}; write {pattern + '/**'!r}"
        )
    if not matches:
        raise DataError(f"{format.key}.paths: {pattern!r} matches no file; correct it or remove it")
    if "**" not in path.parts:
        folders += beside
    return matches


def _files_below(format: Format, folder: Path, others: list[PurePath]) -> list[Path]:
    """Returns the files that a directory stands for, in it and all its subdirectories except hidden and unfinished ones.

    The remaining files are added to `others`.
    """
    found = []
    for parent, folders, names in disk.files_below(folder, follow_links=True):
        folders[:] = (name for name in folders if not _is_passed_over(name))
        for name in map(PurePath, names):
            if _stands_for(format, name):
                found.append(parent / name)
            elif _is_other(format, name):
                others.append(parent / name)
    if not found:
        raise format.error(folder, f"is a directory without {_of_format(format)}; correct the path, or name files")
    return found


def _stands_for(format: Format, path: PurePath) -> bool:
    """Returns whether a directory includes its file at this path, or whether the file is left out and counted."""
    name = path.name
    if any(map(_is_passed_over, path.parts[:-1])):
        return False
    if name.startswith("."):
        return _is_beside(name)
    stem, dot, suffix = name.lower().rpartition(".")
    is_compressed = format.fields_of_form and dot + suffix in COMPRESSIONS
    return _is_beside(name) or (stem if is_compressed else name.lower()).endswith(format.suffixes)


def _is_other(format: Format, path: PurePath) -> bool:
    """Returns whether a file that its directory does not include may have been meant."""
    hidden = path.name.startswith(".") or any(map(_is_passed_over, path.parts[:-1]))
    return not hidden and not path.name.lower().endswith(format.paired)


def _of_format(format: Format) -> str:
    names = ", ".join(f"*{suffix}" for suffix in format.suffixes)
    return f"files of kind={format.config.kind} ({names})" if names != "*" else "files"


def _is_passed_over(folder: str) -> bool:
    return folder.startswith(".") or folder in _UNFINISHED


def _is_unfinished(path: PurePath, pattern: str) -> bool:
    """Returns whether the path goes through an `_UNFINISHED` directory that its pattern does not name."""
    return any(folder in _UNFINISHED and folder not in pattern for folder in path.parts[:-1])


def _is_beside(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in BESIDE)


def _shards(format: Format, path: Path) -> list[Path]:
    """Returns the files of a saved dataset, or the one file."""
    if not (os.path.isdir(path) and format.is_dataset(path)):
        return [path]
    try:
        with format.reading(path):
            return shards_of(path)
    except NotReadableError as error:
        raise format.error(path, str(error)) from error


def _check_regular(format: Format, path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise disk.cannot_read(error, f"{path}: {format.key}.paths", "correct or remove the path") from error
    if not stat.S_ISREG(mode):
        raise format.error(path, "is not a regular file; name files")


def _file_behind(path: Path) -> object:
    """Returns a key equal for all names of a file: relative and absolute ones, symbolic and hard links."""
    status = path.stat()  # only with several hard links: some file systems give all files one number
    return (status.st_dev, status.st_ino) if status.st_nlink > 1 else path.resolve()
