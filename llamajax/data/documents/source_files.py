"""Which files a source has: those that its paths name, match, or hold below them."""

import contextlib
import fnmatch
import glob
import lzma
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

import pyarrow

from llamajax import disk
from llamajax.config.data import SourceConfig, is_remote
from llamajax.data.documents.columns import NotReadableError, shards_of
from llamajax.data.documents.json_arrays import BrokenArrayError
from llamajax.data.documents.remote import File, RemoteFile, listed, shown
from llamajax.data.documents.text_files import COMPRESSIONS, JSON_SUFFIXES, NoTextFileError
from llamajax.errors import DataError

BESIDE = ("._*", ".DS_Store", "_SUCCESS", "*.crc", "_started_*", "_committed_*", "_metadata", "_common_metadata")
"""Names of what macOS, Spark and Hadoop write beside the files that are meant, under whatever patterns these have."""
_UNFINISHED = ("_temporary", "_delta_log")
"""Names of directories in which Spark and Delta Lake keep what is no file of a table, or not yet."""

_SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": ("",), "jsonl": JSON_SUFFIXES, "chat": JSON_SUFFIXES, "parquet": (".parquet",), "megatron": (".idx",),
}  # fmt: skip
"""How the names of files of a kind end that a directory stands for."""
_READ_WITH: dict[str, tuple[str, ...]] = {"megatron": (".bin",)}
"""How the names of those end that are read together with files of a kind."""


class Found(NamedTuple):
    """A source's files."""

    files: list[File]
    num_left_out: int
    """Those that `BESIDE` names."""
    folders: Sequence[Path] = ()
    """Directories that patterns match: these stand for no files."""
    others: Sequence[PurePath] = ()
    """Files in directories that are named, neither of the source's kind, by their names, nor hidden."""


def find_files(config: SourceConfig, key: str, cache_dir: Path) -> Found:
    """The source's files, each once, under whichever of its names comes first: local ones sorted, then remote ones.

    Args:
        config: the source, of a kind that has paths.
        key: of the source, for messages.
        cache_dir: where copies of remote files are kept.

    Raises:
        DataError: a path matches nothing, or is not a regular file, or may not be read.
        DiskError: the disk fails, or network or server do.
        EnvironmentMismatchError: a package for remote files is missing.
    """
    places: dict[Path, tuple[Path, int]] = {}  # by which they are sorted
    remote: dict[str, RemoteFile] = {}
    folders: list[Path] = []
    others: list[PurePath] = []

    def is_meant(path: PurePath) -> bool:
        stands = _stands_for(config.kind, path)
        if not stands and _is_other(config.kind, path):
            others.append(path)
        return stands

    for pattern in config.patterns:
        if is_remote(pattern):
            found = listed(pattern, key, cache_dir, is_meant)
            remote.update((file.url, file) for file in found if not _is_unfinished(PurePath(file.url), pattern))
            continue
        for path in _matches(config.kind, pattern, key, folders, others):
            for number, file in enumerate(_shards(path, key) if config.kind == "arrow" else [path]):
                places.setdefault(file, (path, number))
    meant = [path for path in places if not _is_beside(path.name)]
    meant_remote = [url for url in remote if not _is_beside(PurePath(shown(url)).name)]
    files: dict[object, Path] = {}
    for path in sorted(meant, key=places.__getitem__):
        _check_regular(path, key)
        with reading(path, key):
            files.setdefault(_file_behind(path), path)
    if not files and not meant_remote:
        names = ", ".join(BESIDE)
        raise DataError(f"{key}.paths: all that they name is what systems write beside files ({names}); name others")
    num_left_out = len(places) - len(meant) + len(remote) - len(meant_remote)
    others = sorted({*others} - {*places})
    return Found([*files.values(), *(remote[url] for url in sorted(meant_remote))], num_left_out, folders, others)


def source_error(key: str, where: object, message: str, field: str = "paths") -> DataError:
    """An error of the source of this key, in its field."""
    return DataError(f"{where}: {key}.{field}: {message}")


@contextlib.contextmanager
def reading(path: object, key: str, kind: str = "") -> Iterator[None]:
    """Turns what goes wrong with a file in the block into an error that names it, and the key of its source.

    Raises:
        DataError: something is wrong with the file.
        DiskError: the disk fails.
    """
    remedy = "replace or remove the file"
    try:
        yield
    except OSError as error:
        raise disk.cannot_read(error, f"{path}: {key}.paths: cannot be read", remedy) from error
    except (pyarrow.ArrowException, EOFError, lzma.LZMAError) as error:
        raise source_error(key, path, f"cannot be read: {str(error).splitlines()[0]}; {remedy}") from error
    except UnicodeDecodeError as error:  # pyarrow's, of what describes a table; texts are looked at one by one
        message = f"cannot be read: the name of a column is not UTF-8; {remedy}"
        raise source_error(key, path, message) from error
    except NoTextFileError as error:
        raise source_error(key, path, f"is {error}, which kind={kind} does not read; {error.remedy(kind)}") from error
    except BrokenArrayError as error:
        where = f"{path}:{error.line}: record {error.number}"
        raise source_error(key, where, f"{error}; correct the file, or copy it again") from error


def _matches(kind: str, pattern: str, key: str, folders: list[Path], others: list[PurePath]) -> list[Path]:
    """The files that a pattern stands for; adds to `folders` and `others` what it does not, see `Found`."""
    path = Path(pattern).expanduser()
    with reading(path, key):
        is_prefix = kind == "megatron" and disk.status(path) is None
        folder = Path(pattern.removesuffix(".idx")).expanduser() if is_prefix else path
        about = disk.status(folder)
        if kind != "arrow" and about is not None and stat.S_ISDIR(about.st_mode):
            return _files_below(kind, folder, key, others)
        if not glob.has_magic(pattern):
            return [path]
        matches, beside = [], []
        for match in map(Path, disk.matching(str(path))):
            if not _is_unfinished(match, pattern):
                (beside if match != path and match.is_dir() else matches).append(match)
    if not matches and beside:
        raise DataError(
            f"{key}.paths: {pattern!r} matches directories alone, such as {beside[0]}; write {pattern + '/**'!r}"
        )
    if not matches:
        raise DataError(f"{key}.paths: {pattern!r} matches no file; correct it or remove it")
    if "**" not in path.parts:
        folders += beside
    return matches


def _files_below(kind: str, folder: Path, key: str, others: list[PurePath]) -> list[Path]:
    """The files that a directory stands for, of itself and of all directories in it, but hidden and unfinished ones; adds
    those to `others` for which it does not."""
    found = []
    for parent, folders, names in disk.files_below(folder, follow_links=True):
        folders[:] = (name for name in folders if not _is_passed_over(name))
        for name in map(PurePath, names):
            if _stands_for(kind, name):
                found.append(parent / name)
            elif _is_other(kind, name):
                others.append(parent / name)
    if not found:
        raise source_error(key, folder, f"is a directory without {_of_kind(kind)}; correct the path, or name files")
    return found


def _stands_for(kind: str, path: PurePath) -> bool:
    """Whether a directory stands for its file at this path, or that is one which is left out and counted."""
    name = path.name
    if any(map(_is_passed_over, path.parts[:-1])):
        return False
    if name.startswith("."):
        return _is_beside(name)
    stem, dot, suffix = name.lower().rpartition(".")
    is_compressed = kind in ("jsonl", "chat") and dot + suffix in COMPRESSIONS
    return _is_beside(name) or (stem if is_compressed else name.lower()).endswith(_SUFFIXES.get(kind, ("",)))


def _is_other(kind: str, path: PurePath) -> bool:
    """Whether a file for which a directory does not stand is one that may have been meant."""
    hidden = path.name.startswith(".") or any(map(_is_passed_over, path.parts[:-1]))
    return not hidden and not path.name.lower().endswith(_READ_WITH.get(kind, ()))


def _of_kind(kind: str) -> str:
    names = ", ".join(f"*{suffix}" for suffix in _SUFFIXES[kind])
    return f"files of kind={kind} ({names})" if names != "*" else "files"


def _is_passed_over(folder: str) -> bool:
    return folder.startswith(".") or folder in _UNFINISHED


def _is_unfinished(path: PurePath, pattern: str) -> bool:
    """Whether the path goes through such a directory, which its pattern does not name."""
    return any(folder in _UNFINISHED and folder not in pattern for folder in path.parts[:-1])


def _is_beside(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in BESIDE)


def _shards(path: Path, key: str) -> list[Path]:
    """The files of a saved dataset, or the one file."""
    if not os.path.isdir(path):
        return [path]
    try:
        with reading(path, key):
            return shards_of(path)
    except NotReadableError as error:
        raise source_error(key, path, str(error)) from error


def _check_regular(path: Path, key: str) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise disk.cannot_read(error, f"{path}: {key}.paths", "correct or remove the path") from error
    if not stat.S_ISREG(mode):
        raise source_error(key, path, "is not a regular file; name files")


def _file_behind(path: Path) -> object:
    """What is the same for all names of a file: relative and absolute ones, symbolic and hard links."""
    status = path.stat()  # only of files with several hard links, since some file systems number files all alike
    return (status.st_dev, status.st_ino) if status.st_nlink > 1 else path.resolve()
