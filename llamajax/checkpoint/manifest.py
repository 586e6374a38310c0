"""The SHA-256 manifest of a directory: written last, and checked before any other file in the directory is used.

Array files carry no checksum of their own that detects every flipped bit, so the manifest distinguishes a good checkpoint
from a damaged one. `manifest.json` holds the size and SHA-256 of every file below the directory, and the SHA-256 of that
table.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

import jax

from llamajax.data import progress
from llamajax.disk import files_below, read_again, sync
from llamajax.errors import CheckpointError, EnvironmentMismatchError
from llamajax.processes.peers import everyones, of_first

MANIFEST = "manifest.json"

# hashlib releases the interpreter lock, so threads hash in parallel.
_HASHING_THREADS = min(16, os.cpu_count() or 1)

_BLOCK_BYTES = 1 << 20  # bytes hashed at once

_TOLD = 10  # maximum number of bad files in a line, and in a process's report to the others

_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
_DAMAGED = {errno.EBADMSG, errno.EUCLEAN}  # reported by file systems that keep checksums


class FileRecord(TypedDict):
    """Expected properties of a file: size in bytes and SHA-256 of its content in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Damage:
    """Problems with the files of a step; false if there are none."""

    told: list[str]
    """One `path: problem` text for each of the first bad files."""
    number: int
    """Number of all bad files."""

    def __bool__(self) -> bool:
        return self.number > 0


def list_files(directory: Path) -> list[str]:
    """Returns the sorted paths of all files below `directory`, relative to it, without the manifest."""
    paths = (parent / name for parent, _, names in files_below(directory) for name in names)
    return sorted(path.relative_to(directory).as_posix() for path in paths if path != directory / MANIFEST)


def records_of(directory: Path, paths: Iterable[str]) -> dict[str, FileRecord]:
    """Flushes the files in `paths`, relative to `directory`, to the disk and returns the record of each.

    Raises:
        OSError: a file cannot be read, or its content cannot be written.
    """

    def record(path: str) -> FileRecord:
        sync(directory / path)
        return _record(directory / path)

    paths = list(paths)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return dict(zip(paths, pool.map(record, paths), strict=True))


def write_file(path: Path, content: bytes | memoryview) -> FileRecord:
    """Writes a file and flushes it to the disk. The record describes the intended content, whatever the disk stores.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def shares(sizes: Mapping[str, int], num_processes: int) -> list[list[str]]:
    """Divides files of these sizes so that each process gets about as many bytes; the same result in every process."""
    divided: list[list[str]] = [[] for _ in range(num_processes)]
    loads = [0] * num_processes
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        least = loads.index(min(loads))
        divided[least].append(path)
        loads[least] += sizes[path]
    return divided


def write(directory: Path, records: Mapping[str, FileRecord]) -> None:
    """Writes the manifest; it and everything else below `directory` then survive a power failure.

    Args:
        directory: the directory that the manifest describes.
        records: records of all files there; `records_of` and `write_file` have flushed these files to the disk.

    Raises:
        OSError: something cannot be written.
    """
    (directory / MANIFEST).write_bytes(_text(records))
    sync(directory / MANIFEST)
    for parent, _, _ in files_below(directory):
        sync(parent)


def read(directory: Path) -> dict[str, FileRecord]:
    """Returns the records in the manifest of `directory`.

    Raises:
        CheckpointError: the manifest is missing or damaged; the message says only that.
        OSError: the disk fails.
    """
    try:
        content = read_again((directory / MANIFEST).read_bytes)
        records: dict[str, FileRecord] = json.loads(content)["files"]
        intact = content == _text(records) and all(_is_below(path, record) for path, record in records.items())
    except FileNotFoundError as error:
        raise CheckpointError(f"{MANIFEST} is missing") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged") from error
    if not intact:
        raise CheckpointError(f"{MANIFEST} is damaged")
    return records


def problems(directory: Path, records: Mapping[str, FileRecord]) -> list[str]:
    """Returns one `path: problem` text for each bad file in `records`; empty if all are good.

    Files without a record are ignored: nothing reads them.

    Raises:
        OSError: the disk fails, which says nothing about the files.
    """
    return list(_problems(directory, records).values())


def _problems(directory: Path, records: Mapping[str, FileRecord]) -> dict[str, str]:
    """Returns the result of `problems` by path."""

    def problem(path: str) -> str | None:
        try:
            status = read_again((directory / path).stat)
            if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
                return f"{path} is not a regular file"
            if (size := status.st_size) != records[path]["size"]:
                return f"{path} has {size} bytes instead of {records[path]['size']}"
            if read_again(lambda: _record(directory / path)) != records[path]:
                return f"{path} does not match its SHA-256"
        except OSError as error:
            if error.errno in _NOT_THERE:
                return f"{path} is missing"
            if error.errno in _DAMAGED:
                return f"{path} is damaged according to its file system"
            raise OSError(error.errno, error.strerror, str(directory / path)) from error
        return None

    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        found = zip(records, pool.map(problem, records), strict=True)
        return {path: text for path, text in found if text is not None}


def damage(directory: Path) -> Damage:
    """Checks the files of a step. Every process checks a share, and all return the same.

    Raises:
        EnvironmentMismatchError: another process sees damage where process 0 does not, so it sees another directory.
        OSError: the disk fails for one of them, after several attempts; the same error in all.
    """
    records: dict[str, FileRecord] = {}
    own: dict[str, str] = {}
    failure = None
    try:
        records = read(directory)
        share = shares({path: record["size"] for path, record in records.items()}, jax.process_count())[jax.process_index()]
        own = _problems(directory, {path: records[path] for path in share})
    except CheckpointError as error:
        own = {MANIFEST: str(error)}
    except OSError as error:
        failure = (error.errno, error.strerror, str(error.filename or directory))
    failures, found, numbers = zip(*everyones((failure, dict(sorted(own.items())[:_TOLD]), len(own))), strict=True)
    for failure in failures:
        if failure is not None:
            raise OSError(*failure)
    doubted = [rank for rank in range(1, len(found)) if found[rank]]
    if doubted:  # process 0 sets steps aside, and only for damage that it sees itself
        seen = of_first(_seen_too(directory, records, found) if jax.process_index() == 0 else None)
        for rank in doubted:
            if rank not in seen:
                raise EnvironmentMismatchError(
                    f"{directory}: {next(iter(found[rank].values()))} for process {rank}, but not for process 0; nothing was"
                    " changed; check the file system, on which all processes must see the same files"
                )
    told = sorted({text for share in found for text in share.values()})
    return Damage(told[:_TOLD], len(told) + sum(numbers) - sum(map(len, found)))  # all report a bad manifest


def _seen_too(directory: Path, records: Mapping[str, FileRecord], found: Sequence[Mapping[str, str]]) -> list[int]:
    """Returns the processes that report a file that is also bad on process 0, where this runs.

    `found` has the reports of all processes; `records` are those of process 0.
    """
    if MANIFEST in found[0]:  # without it, process 0 cannot verify the others' reports
        return list(range(len(found)))
    named = {path for share in found[1:] for path in share} & records.keys()
    bad = _problems(directory, {path: records[path] for path in sorted(named)})
    return [rank for rank, share in enumerate(found) if share.keys() & bad.keys()]


def damage_line(directory: Path, step: int, found: Damage) -> str:
    """Returns one line that names a damaged step and its bad files."""
    rest = found.number - len(found.told)
    return f"{directory / str(step)} is damaged: {', '.join(found.told)}{f' (and {rest} more)' if rest else ''}"


def none_good_line(directory: Path, damaged: Mapping[int, Damage]) -> str:
    """Returns the message for a run without a step to restore: one line for every damaged step, and the remedy."""
    if not damaged:
        return f"{directory} has no checkpoint; is this the run_dir of a run that has saved one?"
    lines = [damage_line(directory, step, found) for step, found in damaged.items()]
    return "\n".join([*lines, f"{directory} has no good checkpoint; restore the files, or choose another run_dir"])


def _record(path: Path) -> FileRecord:
    sha256, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            sha256.update(block)
            size += len(block)
            progress.gets_on()
    return {"size": size, "sha256": sha256.hexdigest()}


def _is_below(path: str, record: Any) -> bool:
    """Returns whether the entry is as `write` makes them: for a file below the directory."""
    match record:
        case {"size": int(), "sha256": str()}:
            plain = PurePosixPath(path)
            return path.isprintable() and plain.as_posix() == path and not plain.is_absolute() and ".." not in plain.parts
    return False


def _text(records: Mapping[str, FileRecord]) -> bytes:
    """Returns the exact contents of the manifest."""
    sha256 = hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()
    return (json.dumps({"files": dict(records), "sha256": sha256}, indent=1) + "\n").encode()
