"""A source's files in groups, each known by what its files hold.

Files are hashed once: the hash is kept in the cache under the names, sizes and times of the files. A source is hashed by
one process at a time, in several threads, while others that want the same wait.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llamajax import disk
from llamajax.data import cache, progress
from llamajax.data.sources import Document, Source
from llamajax.errors import DataError

GROUP_BYTES = 2**26
"""Small files are put together up to this size."""
ANNOUNCED_BYTES = 2**30
"""Before work on as many bytes a line says so; on fewer it takes seconds."""
HASH_THREADS = 8
"""Files read at once to be hashed, which waits for the disk as much as for the processor."""
READ_BYTES = 2**20
"""Read from a file at once."""
UNSETTLED_S = 2.0
"""Seconds after a change in which a file may change again without a new time stamp on a coarse clock."""


class FileIdentity(NamedTuple):
    """What changes when a file is changed or replaced: cheap to ask, unlike its content."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def file_identity(path: Path) -> FileIdentity:
    """The identity of the file as it is now."""
    status = path.stat()
    return FileIdentity(str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True)
class FileGroup:
    """Consecutive files of a source that share a cache entry: one large file, or small ones up to `GROUP_BYTES`."""

    source: Source
    files: tuple[Path, ...]
    content: str
    """SHA-256 of all that decides which documents they give."""
    identities: tuple[FileIdentity, ...]
    """Of the files, before they were hashed."""

    @property
    def is_chat(self) -> bool:
        """Whether the documents are conversations."""
        return self.source.config.kind == "chat"

    @property
    def num_bytes(self) -> int:
        """Size of the files."""
        return sum(identity.size for identity in self.identities)

    def documents(self) -> Iterator[Document]:
        """All documents, in order.

        Raises:
            DataError: a file cannot be read, or has changed since it was hashed.
            DiskError: the disk fails.
        """
        for document in self.source.documents(self.files):
            progress.gets_on()
            yield document
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises `DataError` if a file is no longer the one that was hashed."""
        for path, identity in zip(self.files, self.identities, strict=True):
            with self.source.reading(path):
                unchanged = path.exists() and file_identity(path) == identity
            if not unchanged:
                raise DataError(
                    f"{path}: {self.source.key}.paths: was changed while it was read; run again when it is at rest"
                )


def group_files(source: Source, cache_dir: Path, log: Callable[[str], None]) -> list[FileGroup]:
    """The source's files in order, grouped and hashed.

    Raises:
        DataError: a file is missing or cannot be read.
        DiskError: the disk fails.
    """
    groups: list[list[Path]] = []
    identities: list[list[FileIdentity]] = []
    size = 0
    for path in source.files():
        with source.reading(path):
            identity = file_identity(path)
        size += identity.size
        if not groups or size > GROUP_BYTES:
            groups.append([])
            identities.append([])
            size = identity.size
        groups[-1].append(path)
        identities[-1].append(identity)

    described = []
    contents = content_hashes(source, groups, identities, cache_dir, log)
    for files, of_files, content in zip(groups, identities, contents, strict=True):
        suffixes = [path.suffix for path in files]  # they decide how JSONL is decompressed
        of_kind = source.config.chat_format if source.config.kind == "chat" else source.config.text_key
        key = cache.key_of(source.config.kind, of_kind, suffixes, content)
        described.append(FileGroup(source, tuple(files), key, tuple(of_files)))
    return described


def content_hashes(
    source: Source,
    groups: Sequence[Sequence[Path]],
    identities: Sequence[Sequence[FileIdentity]],
    cache_dir: Path,
    log: Callable[[str], None],
) -> list[str]:
    """SHA-256 over the content of the files of each group; groups that have not changed since are not read again.

    Raises:
        DataError: a file cannot be read.
        DiskError: the disk fails.
    """
    paths = [cache_dir / "content" / cache.key_of(of_group) / "hash" for of_group in identities]
    hashes = [_known_hash(path) for path in paths]
    unknown = [index for index, known in enumerate(hashes) if known is None]
    if unknown:
        with disk.locked(cache_dir / "hashing" / cache.key_of(identities)):
            for index in unknown:
                hashes[index] = _known_hash(paths[index])
                if hashes[index] is None and paths[index].exists():
                    log(f"damaged    {paths[index]}; hashing the files again")
            unknown = [index for index in unknown if hashes[index] is None]
            num_files = sum(len(groups[index]) for index in unknown)
            num_bytes = sum(identity.size for index in unknown for identity in identities[index])
            if num_bytes >= ANNOUNCED_BYTES:
                log(f"hashing    {num_files:,} files, {num_bytes / 1e9:,.1f} GB, of {source.key}")
            newest = [max(max(file.mtime_ns, file.ctime_ns) for file in of_group) / 1e9 for of_group in identities]
            started = time.time()
            # Times that are still to come do not tell when a file was changed last: but not within this wait.
            if any(newest[index] > started for index in unknown):
                time.sleep(UNSETTLED_S)
            with contextlib.closing(_hash_groups(source, [groups[index] for index in unknown])) as hashed:
                for index, content in zip(unknown, hashed, strict=True):
                    hashes[index] = content
                    # A file that was changed just now may be changed again within the same tick of the clock.
                    if not started - UNSETTLED_S <= newest[index] <= started:
                        with disk.locked(paths[index].parent):
                            cache.write_arrays(paths[index], {}, {"sha256": content})
    return [known for known in hashes if known is not None]


def _known_hash(path: Path) -> str | None:
    """The hash that is kept in the file, if that is there and whole."""
    with contextlib.suppress(cache.DamagedError):
        return cache.read_arrays(path).info["sha256"]


def _hash_groups(source: Source, groups: Sequence[Sequence[Path]]) -> Generator[str, None, None]:
    """The hash of each group, in order, made in several threads."""
    stop = threading.Event()
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash") as threads:
        try:
            yield from threads.map(lambda files: _hash_files(source, files, stop), groups)
        finally:
            stop.set()  # a large file takes minutes, which neither a signal nor an error waits for


def _hash_files(source: Source, files: Sequence[Path], stop: threading.Event) -> str:
    combined = hashlib.sha256()
    for path in files:
        content = hashlib.sha256()
        with source.reading(path), path.open("rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                if stop.is_set():
                    raise CancelledError
                content.update(block)
                progress.gets_on()
        combined.update(content.digest())
    return combined.hexdigest()
