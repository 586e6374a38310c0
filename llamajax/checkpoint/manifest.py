"""A directory's SHA-256 manifest: written last, checked before anything else in the directory is believed.

Array files carry no checksum of their own that survives every flipped bit, so the manifest is what tells a good
checkpoint from a damaged one. `manifest.json` holds the size and SHA-256 of every file below the directory, and
the SHA-256 of that table.
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

# hashlib lets go of the interpreter lock, so threads hash in parallel.
_HASHING_THREADS = min(16, os.cpu_count() or 1)

_BLOCK_BYTES = 1 << 20  # that are hashed at once

_TOLD = 10  # bad files that a line names, and that a process tells the others

_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
_DAMAGED = {errno.EBADMSG, errno.EUCLEAN}  # a file system that keeps checksums says so


class FileRecord(TypedDict):
    """What a file must be: its size in bytes and the SHA-256 of its content in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Damage:
    """What is wrong with the files of a step; false if nothing is."""

    told: list[str]
    """One `path: problem` text for each of the first bad files."""
    number: int
    """Of all bad files."""

    def __bool__(self) -> bool:
        return self.number > 0


def list_files(directory: Path) -> list[str]:
    """The paths of all files below `directory`, relative to it, sorted; the manifest itself is left out."""
    paths = (parent / name for parent, _, names in files_below(directory) for name in names)
    return sorted(path.relative_to(directory).as_posix() for path in paths if path != directory / MANIFEST)


def records_of(directory: Path, paths: Iterable[str]) -> dict[str, FileRecord]:
    """The record of each file in `paths`, which are relative to `directory`; they then are on the disk itself.

    Raises:
        OSError: a file cannot be read, or what is in it not be written.
    """

    def record(path: str) -> FileRecord:
        sync(directory / path)
        return _record(directory / path)

    paths = list(paths)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return dict(zip(paths, pool.map(record, paths), strict=True))


def write_file(path: Path, content: bytes | memoryview) -> FileRecord:
    """Writes a file onto the disk itself; its record is of what it is to hold, whatever the disk makes of it.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def shares(sizes: Mapping[str, int], num_processes: int) -> list[list[str]]:
    """The files of these sizes in bytes, divided so that each process gets about as many bytes; alike in all of them."""
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
        directory: what the manifest is of.
        records: of all files there, which `records_of` and `write_file` have brought onto the disk itself.

    Raises:
        OSError: something cannot be written.
    """
    (directory / MANIFEST).write_bytes(_text(records))
    sync(directory / MANIFEST)
    for parent, _, _ in files_below(directory):
        sync(parent)


def read(directory: Path) -> dict[str, FileRecord]:
    """The records in the manifest of `directory`.

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
    """What is wrong with the files in `records`, one `path: problem` text per file; empty if nothing is.

    Files that no record names are ignored: nothing reads them.

    Raises:
        OSError: the disk fails, which says nothing of the files.
    """
    return list(_problems(directory, records).values())


def _problems(directory: Path, records: Mapping[str, FileRecord]) -> dict[str, str]:
    """Those of `problems`, by path."""

    def problem(path: str) -> str | None:
        try:
            status = read_again((directory / path).stat)
            if not stat.S_ISREG(status.st_mode):  # what is read of a pipe or a device may have no end
                return f"{path} is not a regular file"
            if (size := status.st_size) != records[path]["size"]:
                return f"{path} has {size} bytes instead of {records[path]['size']}"
            if read_again(lambda: _record(directory / path)) != records[path]:
                return f"{path} does not match its SHA-256"
        except OSError as error:
            if error.errno in _NOT_THERE:
                return f"{path} is missing"
            if error.errno in _DAMAGED:
                return f"{path} is damaged, says its file system"
            raise OSError(error.errno, error.strerror, str(directory / path)) from error
        return None

    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        found = zip(records, pool.map(problem, records), strict=True)
        return {path: text for path, text in found if text is not None}


def damage(directory: Path) -> Damage:
    """What is wrong with the files of a step; every process checks a share and all return the same.

    Raises:
        EnvironmentMismatchError: another process sees damage where process 0 does not, so it sees another directory.
        OSError: the disk fails for one of them, after several attempts; the same in all.
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
    if doubted:  # process 0 sets steps aside, and not on another's word
        seen = of_first(_seen_too(directory, records, found) if jax.process_index() == 0 else None)
        for rank in doubted:
            if rank not in seen:
                raise EnvironmentMismatchError(
                    f"{directory}: {next(iter(found[rank].values()))} for process {rank}, but not for process 0; nothing was"
                    " changed; see to the file system there, on which all processes must see the same"
                )
    told = sorted({text for share in found for text in share.values()})
    return Damage(told[:_TOLD], len(told) + sum(numbers) - sum(map(len, found)))  # all name the manifest, if it is that


def _seen_too(directory: Path, records: Mapping[str, FileRecord], found: Sequence[Mapping[str, str]]) -> list[int]:
    """On process 0: the processes that name a file that is bad here too. `found` is what all name, `records` are its own."""
    if MANIFEST in found[0]:  # it cannot tell what is good
        return list(range(len(found)))
    named = {path for share in found[1:] for path in share} & records.keys()
    bad = _problems(directory, {path: records[path] for path in sorted(named)})
    return [rank for rank, share in enumerate(found) if share.keys() & bad.keys()]


def damage_line(directory: Path, step: int, found: Damage) -> str:
    """One line that names a damaged step and its bad files."""
    rest = found.number - len(found.told)
    return f"{directory / str(step)} is damaged: {', '.join(found.told)}{f' (and {rest} more)' if rest else ''}"


def none_good_line(directory: Path, damaged: Mapping[int, Damage]) -> str:
    """What to tell a user whose run has no step to restore: one line for every damaged one, and the remedy."""
    if not damaged:
        return f"{directory} has no checkpoint; is this the run_dir of a run that has saved one?"
    lines = [damage_line(directory, step, found) for step, found in damaged.items()]
    return "\n".join([*lines, f"{directory} has no good checkpoint; bring the files back, or choose another run_dir"])


def _record(path: Path) -> FileRecord:
    sha256, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            sha256.update(block)
            size += len(block)
            progress.gets_on()
    return {"size": size, "sha256": sha256.hexdigest()}


def _is_below(path: str, record: Any) -> bool:
    """Whether it is an entry as `write` makes them: of a file below the directory."""
    match record:
        case {"size": int(), "sha256": str()}:
            plain = PurePosixPath(path)
            return path.isprintable() and plain.as_posix() == path and not plain.is_absolute() and ".." not in plain.parts
    return False


def _text(records: Mapping[str, FileRecord]) -> bytes:
    """The whole manifest, to the byte."""
    sha256 = hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()
    return (json.dumps({"files": dict(records), "sha256": sha256}, indent=1) + "\n").encode()
