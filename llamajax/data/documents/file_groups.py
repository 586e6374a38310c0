"""A source's files in groups, each known by what its files hold.

Files are hashed once: the hash is kept in the cache under the names, sizes and times of the files, a file for every group
and, so that a start opens few files, one for all of a source. A source is hashed by one process at a time, in several
threads, while others that want the same wait.
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
"""Small files are put together up to this size."""
SPAN_BYTES = 2**26
"""Larger files are cut at multiples of this, where they can be: some ten seconds of tokenizing."""
ANNOUNCED_BYTES = 2**30
"""Before work on as many bytes a line says so; on fewer it takes seconds."""
HASH_THREADS = 8
"""Files read at once to be hashed, which waits for the disk as much as for the processor."""
READ_BYTES = 2**20
"""Read from a file at once."""
UNSETTLED_S = 2.0
"""Seconds after a change in which a file may change again without a new time stamp on a coarse clock."""

_LOOK_EVERY_S = 0.1
_FOLDERS = {False: "content", True: "content-2"}
"""Where hashes are kept, by whether they are marked: those of files of text in the first folder know nothing of marks."""


class FileIdentity(NamedTuple):
    """What changes when a file is changed or replaced: cheap to ask, unlike its content."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def file_identity(file: File) -> FileIdentity:
    """The identity of the file as it is now; of a remote one as it was found, by its address and version."""
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
    """Of the files, before anything was read of them."""
    span: Span | None = None
    """Of the one file, if that is cut."""

    @property
    def num_bytes(self) -> int:
        """Size of the files, or of the span."""
        if self.span is not None:
            return self.span.end - self.span.start
        return sum(identity.size for identity in self.identities)

    @property
    def is_chat(self) -> bool:
        """Whether the documents are conversations."""
        return self.source.format.is_chat

    @property
    def is_marked(self) -> bool:
        """Whether the hash knows of `Format.mark`; not of remote files: a copy that was removed would be fetched again."""
        return self.source.format.fields_of_form > 0 and not any(isinstance(file, RemoteFile) for file in self.files)

    @property
    def newest(self) -> float:
        """When a file of it was changed last, in seconds since 1970."""
        return max(max(file.mtime_ns, file.ctime_ns) for file in self.identities) / 1e9

    @property
    def key(self) -> str:
        """Hash of the names, sizes and times of the files."""
        return cache.key_of(self.identities, self.span) if self.span is not None else cache.key_of(self.identities)

    @property
    def may_be_long(self) -> bool:
        """Whether a document of it may come in pieces, as far as the sizes of its files tell."""
        is_packed = self.source.format.is_packed or any(file.suffix in COMPRESSIONS for file in self.files)
        return is_packed or any(identity.size > MAX_DOCUMENT_CHARS for identity in self.identities)

    def documents(self) -> Iterator[Document]:
        """All documents, in order.

        Raises:
            DataError: a file cannot be read, or has changed since the group was found.
            DiskError: the disk fails.
        """
        for document in self.source.documents(self.files, self.span):
            progress.gets_on()
            yield document
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises `DataError` if a file is no longer the one that was found."""
        for path, identity in zip(self.files, self.identities, strict=True):
            if isinstance(path, RemoteFile):  # of which nobody changes the copy
                continue
            with self.source.format.reading(path):
                unchanged = path.exists() and file_identity(path) == identity
            if not unchanged:
                raise DataError(
                    f"{path}: {self.source.key}.paths: was changed while it was read; run again when it is at rest"
                )


@dataclass(frozen=True)
class HashedGroup(FileGroup):
    """A group that is known by its content: it has a cache entry."""

    content: str = field(kw_only=True)
    """SHA-256 of all that decides which documents its files give."""


def find_groups(source: Source, log: Callable[[str], None] = lambda line: None) -> list[FileGroup]:
    """The source's files in order, small ones together, large ones cut into spans where their format allows it.

    Args:
        source: whose files they are.
        log: takes a line if something is left out.

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
        log(f"left out   {source.key}: {looked.num_left_out:,} of what systems write beside files ({names})")
    if looked.folders:
        one = looked.folders[0]
        log(
            f"left out   {source.key}: directories that a pattern matches: {len(looked.folders):,}, such as {one}; name them"
        )
    if looked.others:
        number, one = len(looked.others), looked.others[0]
        log(f"left out   {source.key}: {number:,} of other names in a directory, such as {one}; name those that are meant")
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
    """The source's groups, hashed.

    Raises:
        DataError: a file is missing or cannot be read.
        DiskError: the disk fails.
    """
    groups = find_groups(source, log)
    return list(map(_with_hash, groups, content_hashes(groups, cache_dir, log)))


def known_groups(source: Source, cache_dir: Path, log: Callable[[str], None]) -> list[HashedGroup] | None:
    """As `group_files`, if one file of the cache knows the hashes of all of them; nothing is hashed."""
    groups = find_groups(source, log)
    hashes = _known_hashes(groups, cache_dir, lambda line: None)
    return None if hashes is None else list(map(_with_hash, groups, hashes))


def hashed(group: FileGroup, cache_dir: Path) -> HashedGroup:
    """The group with its hash, which is kept; errors as of `group_files`.

    Two processes that want the same at once both hash it. A file that was changed just now is waited for.
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
    """The group with its hash, if the cache knows that."""
    sha256 = _known_hash(_kept(group, cache_dir))
    return None if sha256 is None else _with_hash(group, sha256)


def _with_hash(group: FileGroup, sha256: str) -> HashedGroup:
    config, suffixes = group.source.config, [path.suffix for path in group.files]  # which need not be in the hash
    read_by = config.chat_format if group.is_chat else config.text_key
    content = cache.key_of(config.kind, read_by, suffixes, sha256)
    return HashedGroup(group.source, group.files, group.identities, group.span, content=content)


def content_hashes(groups: Sequence[FileGroup], cache_dir: Path, log: Callable[[str], None]) -> list[str]:
    """SHA-256 over the content of each of a source's groups; those that have not changed since are not read again.

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
            # Times that are still to come do not tell when a file was changed last: but not within this wait.
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
    """Says how much is to be fetched of what is read now, if that is much."""
    files = {file for group in groups for file in group.files if isinstance(file, RemoteFile) and not file.path.exists()}
    num_bytes = sum(file.size for file in files)
    if num_bytes >= ANNOUNCED_BYTES:
        log(f"fetching   {len(files):,} files, {num_bytes / 1e9:,.1f} GB")


def _keep(group: FileGroup, sha256: str, started: float, cache_dir: Path) -> bool:
    """Keeps a hash that was begun with at `started`; not of a file that was changed just before, which may be changed again
    within the same tick of the clock."""
    if started - UNSETTLED_S <= group.newest <= started:
        return False
    path = _kept(group, cache_dir)
    with disk.locked(path.parent):
        cache.write_arrays(path, {}, {"sha256": sha256})
    return True


def _kept(group: FileGroup, cache_dir: Path) -> Path:
    """Where the hash of a group is kept."""
    return cache_dir / _FOLDERS[group.is_marked] / group.key / "hash"


def _kept_together(groups: Sequence[FileGroup], cache_dir: Path) -> Path:
    """Where those of several are kept together."""
    is_marked = all(group.is_marked for group in groups)
    return cache_dir / _FOLDERS[is_marked] / cache.key_of([group.key for group in groups]) / "hashes"


def _known_hash(path: Path) -> str | None:
    """The hash that is kept in the file, if that is there and whole."""
    with contextlib.suppress(cache.DamagedError):
        return cache.read_arrays(path).info["sha256"]


def _known_hashes(groups: Sequence[FileGroup], cache_dir: Path, log: Callable[[str], None]) -> list[str] | None:
    """The hashes of all groups, if one file knows them, and is whole."""
    if len(groups) == 1:
        known = _known_hash(_kept(groups[0], cache_dir))
        return None if known is None else [known]
    path = _kept_together(groups, cache_dir)
    try:
        return cache.hashes_of_array(cache.read_arrays(path).arrays["sha256"][:])
    except cache.DamagedError:
        if path.exists():
            log(f"damaged    {path}; making it again")
        return None


def _hash_all(groups: Sequence[FileGroup]) -> Generator[str, None, None]:
    """The hash of each group, in order, made in several threads, of remote files once all are here."""
    stop = threading.Event()
    remote = {file: group.source for group in groups for file in group.files if isinstance(file, RemoteFile)}
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash") as threads:
        try:
            for _ in threads.map(lambda file: remote[file].local(file, stop), remote):
                pass  # else all would wait for the one file whose spans they hash
            yield from threads.map(lambda group: _hash(group, stop), groups)
        finally:
            stop.set()  # a large file takes minutes, which neither a signal nor an error waits for


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
