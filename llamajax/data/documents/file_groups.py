"""Groups a source's files and identifies each group by a hash of its content.

Files are hashed once: the cache keeps each hash under the names, sizes and times of its files, in one file per group and,
to open fewer files at start, in one file for the whole source. One process at a time hashes a source, in several threads;
others that need the same hashes wait for it.
"""

import contextlib
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from llamajax import disk
from llamajax.data import cache, progress
from llamajax.data.documents.formats import MAX_DOCUMENT_CHARS, Document
from llamajax.data.documents.lines import Span
from llamajax.data.documents.remote import File, RemoteFile
from llamajax.data.documents.sources import BESIDE, Source
from llamajax.data.documents.text_files import COMPRESSIONS
from llamajax.errors import DataError

GROUP_BYTES = 2**26
"""Small files are grouped up to this size."""
SPAN_BYTES = 2**26
"""Larger files are cut at multiples of this size if their format allows it: about ten seconds of tokenizing."""
ANNOUNCED_BYTES = 2**30
"""Work on at least this many bytes is announced by a log line; less takes seconds."""
HASH_THREADS = 8
"""Number of files hashed at a time. Hashing waits for the disk as much as for the processor."""
READ_BYTES = 2**20
"""Number of bytes read from a file at a time."""
UNSETTLED_S = 2.0
"""Seconds after a change during which, on a coarse clock, another change may get the same time stamp."""

_LOOK_EVERY_S = 0.1
_FOLDERS = {False: "content", True: "content-2"}
"""Folder of the hashes by `is_marked`. Hashes of text files in the first folder do not include marks."""


class FileIdentity(NamedTuple):
    """Properties that change when a file is changed or replaced. Unlike its content, they are cheap to read."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def file_identity(file: File) -> FileIdentity:
    """Returns the identity of the file as it is now, or for a remote file as it was listed, by address and version."""
    if isinstance(file, RemoteFile):
        return FileIdentity(f"{file.url} {file.version}", file.size, 0, 0, 0)
    status = file.stat()
    return FileIdentity(str(file.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True)
class FileGroup:
    """A unit of work: one large file or a span of it, or consecutive small files of a source up to `GROUP_BYTES`."""

    source: Source
    files: tuple[File, ...]
    identities: tuple[FileIdentity, ...]
    """Identities of the files before anything was read from them."""
    span: Span | None = None
    """Span of the one file, if it is cut."""

    @property
    def num_bytes(self) -> int:
        """Size of the files, or of the span."""
        if self.span is not None:
            return self.span.end - self.span.start
        return sum(identity.size for identity in self.identities)

    @property
    def has_targets(self) -> bool:
        """Whether documents say which of their tokens are trained on."""
        return self.source.format.has_targets

    @property
    def has_preferences(self) -> bool:
        """Whether documents are preferences."""
        return self.source.format.has_preferences

    @property
    def has_prompts(self) -> bool:
        """Whether documents are prompts."""
        return self.source.format.has_prompts

    @property
    def is_marked(self) -> bool:
        """Whether the hash includes `Format.mark`. Remote files are left out: it would fetch copies that were removed."""
        return self.source.format.fields_of_form > 0 and not any(isinstance(file, RemoteFile) for file in self.files)

    @property
    def newest(self) -> float:
        """Time of the last change to any of the files, in seconds since 1970."""
        return max(max(file.mtime_ns, file.ctime_ns) for file in self.identities) / 1e9

    @property
    def key(self) -> str:
        """Hash of the names, sizes and times of the files."""
        return cache.key_of(self.identities, self.span) if self.span is not None else cache.key_of(self.identities)

    @property
    def may_be_long(self) -> bool:
        """Whether a document may be read in pieces, judging by the sizes of the files."""
        is_packed = self.source.format.is_packed or any(file.suffix in COMPRESSIONS for file in self.files)
        return is_packed or any(identity.size > MAX_DOCUMENT_CHARS for identity in self.identities)

    def documents(self) -> Iterator[Document]:
        """Yields all documents, in order.

        Raises:
            DataError: a file cannot be read, or has changed since the group was found.
            DiskError: the disk fails.
        """
        for document in self.source.documents(self.files, self.span):
            progress.gets_on()
            yield document
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises `DataError` if a file has changed since it was found."""
        for path, identity in zip(self.files, self.identities, strict=True):
            if isinstance(path, RemoteFile):  # its copy never changes
                continue
            with self.source.format.reading(path):
                unchanged = path.exists() and file_identity(path) == identity
            if not unchanged:
                raise DataError(
                    f"{path}: {self.source.key}.paths: changed while it was read; run again once it no longer changes"
                )


@dataclass(frozen=True)
class HashedGroup(FileGroup):
    """A group identified by its content, with a cache entry."""

    content: str = field(kw_only=True)
    """SHA-256 of everything that decides the documents in its files."""


def find_groups(source: Source, log: Callable[[str], None] = lambda line: None) -> list[FileGroup]:
    """Returns the source's files in order, with small ones grouped and large ones cut into spans if the format allows it.

    Args:
        source: the source of the files.
        log: receives a line for files that are left out.

    Raises:
        DataError: a file is missing or cannot be read.
        DiskError: the disk fails.
    """
    found: list[FileGroup] = []
    together: list[tuple[File, FileIdentity]] = []
    size = 0

    def end_group() -> None:
        nonlocal size
        if together:
            files, identities = zip(*together, strict=True)
            found.append(FileGroup(source, files, identities))
        together.clear()
        size = 0

    looked = source.look()
    if looked.num_left_out:
        names = ", ".join(BESIDE)
        log(f"left out   {source.key}: {looked.num_left_out:,} files that systems write beside data ({names})")
    if looked.folders:
        one = looked.folders[0]
        log(
            f"left out   {source.key}: {len(looked.folders):,} directories that match a pattern, such as {one};"
            " name them to use them"
        )
    if looked.others:
        number, one = len(looked.others), looked.others[0]
        log(f"left out   {source.key}: {number:,} files of other names in a directory, such as {one}; name those to read")
    for path in looked.files:
        with source.format.reading(path):
            identity = file_identity(path)
        is_cut = source.format.has_spans(path) and identity.size > SPAN_BYTES
        if is_cut or size + identity.size > GROUP_BYTES:
            end_group()
        if is_cut:
            spans = [Span(at, min(at + SPAN_BYTES, identity.size)) for at in range(0, identity.size, SPAN_BYTES)]
            found += [FileGroup(source, (path,), (identity,), span) for span in spans]
        else:
            together.append((path, identity))
            size += identity.size
    end_group()
    return found


def group_files(source: Source, cache_dir: Path, log: Callable[[str], None]) -> list[HashedGroup]:
    """Returns the source's groups with their hashes.

    Raises:
        DataError: a file is missing or cannot be read.
        DiskError: the disk fails.
    """
    groups = find_groups(source, log)
    return list(map(_with_hash, groups, content_hashes(groups, cache_dir, log)))


def known_groups(source: Source, cache_dir: Path, log: Callable[[str], None]) -> list[HashedGroup] | None:
    """Returns the same as `group_files` if one file of the cache has all hashes, else None; nothing is hashed."""
    groups = find_groups(source, log)
    hashes = _known_hashes(groups, cache_dir, lambda line: None)
    return None if hashes is None else list(map(_with_hash, groups, hashes))


def hashed(group: FileGroup, cache_dir: Path) -> HashedGroup:
    """Returns the group with its hash, and keeps the hash; raises the errors of `group_files`.

    Two processes that need the same hash at once both compute it. A file that has just changed is waited for.
    """
    if (known := known_group(group, cache_dir)) is not None:
        return known
    while abs(group.newest - time.time()) <= UNSETTLED_S:
        time.sleep(_LOOK_EVERY_S)
    started = time.time()
    sha256 = _hash(group, threading.Event())
    _keep(group, sha256, started, cache_dir)
    return _with_hash(group, sha256)


def known_group(group: FileGroup, cache_dir: Path) -> HashedGroup | None:
    """Returns the group with its hash if the cache has it."""
    sha256 = _known_hash(_kept(group, cache_dir))
    return None if sha256 is None else _with_hash(group, sha256)


def _with_hash(group: FileGroup, sha256: str) -> HashedGroup:
    config, suffixes = group.source.config, [path.suffix for path in group.files]  # a hash may not cover these
    read_by = config.form.key if group.has_targets else config.text_key
    content = cache.key_of(config.kind, read_by, suffixes, sha256)
    return HashedGroup(group.source, group.files, group.identities, group.span, content=content)


def content_hashes(groups: Sequence[FileGroup], cache_dir: Path, log: Callable[[str], None]) -> list[str]:
    """Returns the SHA-256 of the content of each group of a source; unchanged files are not read again.

    Raises:
        DataError: a file cannot be read.
        DiskError: the disk fails.
    """
    if (known := _known_hashes(groups, cache_dir, log)) is not None:
        return known
    of_all, paths = _kept_together(groups, cache_dir), [_kept(group, cache_dir) for group in groups]
    hashes = [_known_hash(path) for path in paths]
    kept = True
    if None in hashes:
        with disk.locked(cache_dir / "hashing" / of_all.parent.name):
            for index, path in enumerate(paths):
                hashes[index] = hashes[index] or _known_hash(path)
                if hashes[index] is None and path.exists():
                    log(f"damaged    {path}; hashing the files again")
            unknown = [group for group, sha256 in zip(groups, hashes, strict=True) if sha256 is None]
            num_bytes = sum(group.num_bytes for group in unknown)
            if num_bytes >= ANNOUNCED_BYTES:
                num_files = len({path for group in unknown for path in group.files})
                log(f"hashing    {num_files:,} files, {num_bytes / 1e9:,.1f} GB, of {groups[0].source.key}")
            announce_fetching(unknown, log)
            started = time.time()
            # A time stamp in the future does not show when the file last changed, except that it was not during this wait.
            if any(group.newest > started for group in unknown):
                time.sleep(UNSETTLED_S)
            with contextlib.closing(_hash_all(unknown)) as made:
                for index, group in enumerate(groups):
                    if hashes[index] is None:
                        hashes[index] = sha256 = next(made)
                        kept &= _keep(group, sha256, started, cache_dir)
    known = [sha256 for sha256 in hashes if sha256 is not None]
    if kept and len(groups) > 1:
        with disk.locked(of_all.parent):
            cache.write_arrays(of_all, {"sha256": cache.hashes_to_array(known)}, {})
    return known


def announce_fetching(groups: Iterable[FileGroup], log: Callable[[str], None]) -> None:
    """Logs how much is fetched for these groups, if it is much."""
    files = {file for group in groups for file in group.files if isinstance(file, RemoteFile) and not file.path.exists()}
    num_bytes = sum(file.size for file in files)
    if num_bytes >= ANNOUNCED_BYTES:
        log(f"fetching   {len(files):,} files, {num_bytes / 1e9:,.1f} GB")


def _keep(group: FileGroup, sha256: str, started: float, cache_dir: Path) -> bool:
    """Keeps a hash that was begun at `started` and returns True.

    A hash of a file that changed just before is not kept: the file may change again within the same tick of the clock.
    """
    if started - UNSETTLED_S <= group.newest <= started:
        return False
    path = _kept(group, cache_dir)
    with disk.locked(path.parent):
        cache.write_arrays(path, {}, {"sha256": sha256})
    return True


def _kept(group: FileGroup, cache_dir: Path) -> Path:
    """Returns where the hash of a group is kept."""
    return cache_dir / _FOLDERS[group.is_marked] / group.key / "hash"


def _kept_together(groups: Sequence[FileGroup], cache_dir: Path) -> Path:
    """Returns where the hashes of several groups are kept in one file."""
    is_marked = all(group.is_marked for group in groups)
    return cache_dir / _FOLDERS[is_marked] / cache.key_of([group.key for group in groups]) / "hashes"


def _known_hash(path: Path) -> str | None:
    """Returns the hash kept in the file if it exists and is intact."""
    with contextlib.suppress(cache.DamagedError):
        return cache.read_arrays(path).info["sha256"]


def _known_hashes(groups: Sequence[FileGroup], cache_dir: Path, log: Callable[[str], None]) -> list[str] | None:
    """Returns the hashes of all groups if one intact file has them."""
    if len(groups) == 1:
        known = _known_hash(_kept(groups[0], cache_dir))
        return None if known is None else [known]
    path = _kept_together(groups, cache_dir)
    try:
        return cache.hashes_of_array(cache.read_arrays(path).arrays["sha256"][:])
    except cache.DamagedError:
        if path.exists():
            log(f"damaged    {path}; rebuilding it")
        return None


def _hash_all(groups: Sequence[FileGroup]) -> Generator[str, None, None]:
    """Yields the hash of each group, in order, computed in several threads; remote files are fetched first."""
    stop = threading.Event()
    remote = {file: group.source for group in groups for file in group.files if isinstance(file, RemoteFile)}
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash") as threads:
        try:
            for _ in threads.map(lambda file: remote[file].local(file, stop), remote):
                pass  # else all threads would wait for the one file they hash spans of
            yield from threads.map(lambda group: _hash(group, stop), groups)
        finally:
            stop.set()  # signals and errors do not wait minutes for a large file


def _hash(group: FileGroup, stop: threading.Event) -> str:
    source, format, span = group.source, group.source.format, group.span
    combined = hashlib.sha256()
    for file in group.files:
        path = source.local(file, stop)
        with format.reading(path):
            start, end, rest = (0, sys.maxsize, format.mark(path)) if span is None else format.extent(path, span)
            content = _hash_bytes(path, start, end, stop)
        content.update(rest)
        combined.update(content.digest())
    return combined.hexdigest()


def _hash_bytes(path: Path, start: int, end: int, stop: threading.Event) -> "hashlib._Hash":
    content = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while block := file.read(min(READ_BYTES, end - start)):
            if stop.is_set():
                raise CancelledError
            content.update(block)
            start += len(block)
            progress.gets_on()
    return content
