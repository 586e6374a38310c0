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
from dataclasses import dataclass
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


class Extent(NamedTuple):
    """A unit of work: one large file or a stretch of it, or consecutive small files of a source up to `GROUP_BYTES`."""

    files: tuple[File, ...]
    identities: tuple[FileIdentity, ...]
    """Of the files, before anything was read of them."""
    span: Span | None = None
    """Of the one file, if that is cut."""

    @property
    def num_bytes(self) -> int:
        """Size of the files, or of the stretch."""
        if self.span is not None:
            return self.span.end - self.span.start
        return sum(identity.size for identity in self.identities)

    @property
    def is_remote(self) -> bool:
        """Whether files of it lie elsewhere."""
        return any(isinstance(file, RemoteFile) for file in self.files)

    @property
    def key(self) -> str:
        """Hash of the names, sizes and times of the files."""
        return cache.key_of(self.identities, self.span) if self.span is not None else cache.key_of(self.identities)


@dataclass(frozen=True)
class FileGroup:
    """An extent that is known by its content: it has a cache entry."""

    source: Source
    extent: Extent
    content: str
    """SHA-256 of all that decides which documents they give."""

    @property
    def files(self) -> tuple[File, ...]:
        """Consecutive files of the source."""
        return self.extent.files

    @property
    def is_chat(self) -> bool:
        """Whether the documents are conversations."""
        return self.source.format.is_chat

    @property
    def num_bytes(self) -> int:
        """Size of what is read."""
        return self.extent.num_bytes

    @property
    def may_be_long(self) -> bool:
        """Whether a document of it may come in pieces, as far as the sizes of its files tell."""
        is_packed = self.source.format.is_packed or any(f.suffix in COMPRESSIONS for f in self.files)
        return is_packed or any(identity.size > MAX_DOCUMENT_CHARS for identity in self.extent.identities)

    def documents(self) -> Iterator[Document]:
        """All documents, in order.

        Raises:
            DataError: a file cannot be read, or has changed since it was hashed.
            DiskError: the disk fails.
        """
        for document in self.source.documents(self.files, self.extent.span):
            progress.gets_on()
            yield document
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises `DataError` if a file is no longer the one that was hashed."""
        for path, identity in zip(self.files, self.extent.identities, strict=True):
            if isinstance(path, RemoteFile):  # of which nobody changes the copy
                continue
            with self.source.format.reading(path):
                unchanged = path.exists() and file_identity(path) == identity
            if not unchanged:
                raise DataError(
                    f"{path}: {self.source.key}.paths: was changed while it was read; run again when it is at rest"
                )


def extents(source: Source, log: Callable[[str], None] | None = None) -> list[Extent]:
    """The source's files in order, small ones together, large ones in stretches where their kind allows it.

    Args:
        source: whose files they are.
        log: takes a line if something is left out.

    Raises:
        DataError: a file is missing or cannot be read.
        DiskError: the disk fails.
    """
    found: list[Extent] = []
    together: list[tuple[Path | RemoteFile, FileIdentity]] = []
    size = 0

    def end_group() -> None:
        nonlocal size
        if together:
            files, identities = zip(*together, strict=True)
            found.append(Extent(files, identities))
        together.clear()
        size = 0

    looked = source.look()
    if looked.num_left_out and log is not None:
        names = ", ".join(BESIDE)
        log(f"left out   {source.key}: {looked.num_left_out:,} of what systems write beside files ({names})")
    if looked.folders and log is not None:
        one = looked.folders[0]
        log(
            f"left out   {source.key}: directories that a pattern matches: {len(looked.folders):,}, such as {one}; name them"
        )
    if looked.others and log is not None:
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
            found += [Extent((path,), (identity,), span) for span in spans]
        else:
            together.append((path, identity))
            size += identity.size
    end_group()
    return found


def group_files(source: Source, cache_dir: Path, log: Callable[[str], None]) -> list[FileGroup]:
    """The source's extents, hashed.

    Raises:
        DataError: a file is missing or cannot be read.
        DiskError: the disk fails.
    """
    found = extents(source, log)
    return _groups(source, found, content_hashes(source, found, cache_dir, log))


def known_groups(source: Source, cache_dir: Path, log: Callable[[str], None]) -> list[FileGroup] | None:
    """As `group_files`, if one file of the cache knows the hashes of all of them; nothing is hashed."""
    found = extents(source, log)
    contents = _known_hashes(source, found, cache_dir, lambda line: None)
    return None if contents is None else _groups(source, found, contents)


def hashed(source: Source, extent: Extent, cache_dir: Path) -> FileGroup:
    """The extent as a group, whose hash is kept; errors as of `group_files`.

    Two processes that want the same at once both hash it. A file that was changed just now is waited for.
    """
    if (known := known_group(source, extent, cache_dir)) is not None:
        return known
    while abs(_newest(extent) - time.time()) <= UNSETTLED_S:
        time.sleep(_LOOK_EVERY_S)
    started = time.time()
    content = _hash(source, extent, threading.Event())
    _keep(source, extent, content, started, cache_dir)
    return _groups(source, [extent], [content])[0]


def known_group(source: Source, extent: Extent, cache_dir: Path) -> FileGroup | None:
    """The extent as a group, if the cache knows its hash."""
    content = _known_hash(_kept(source, extent, cache_dir))
    return None if content is None else _groups(source, [extent], [content])[0]


def _groups(source: Source, found: Sequence[Extent], contents: Sequence[str]) -> list[FileGroup]:
    return [FileGroup(source, extent, _key(source, extent, of_it)) for extent, of_it in zip(found, contents, strict=True)]


def _key(source: Source, extent: Extent, content: str) -> str:
    suffixes = [path.suffix for path in extent.files]  # which need not be in the hash of the content
    of_kind = source.config.chat_format if source.format.is_chat else source.config.text_key
    return cache.key_of(source.config.kind, of_kind, suffixes, content)


def content_hashes(source: Source, of: Sequence[Extent], cache_dir: Path, log: Callable[[str], None]) -> list[str]:
    """SHA-256 over the content of each extent; those that have not changed since are not read again.

    Raises:
        DataError: a file cannot be read.
        DiskError: the disk fails.
    """
    if (known := _known_hashes(source, of, cache_dir, log)) is not None:
        return known
    of_all, paths = _kept_together(source, of, cache_dir), [_kept(source, extent, cache_dir) for extent in of]
    hashes = [_known_hash(path) for path in paths]
    unknown = [index for index, known in enumerate(hashes) if known is None]
    kept = True
    if unknown:
        with disk.locked(cache_dir / "hashing" / of_all.parent.name):
            for index in unknown:
                hashes[index] = _known_hash(paths[index])
                if hashes[index] is None and paths[index].exists():
                    log(f"damaged    {paths[index]}; hashing the files again")
            unknown = [index for index in unknown if hashes[index] is None]
            num_bytes = sum(of[index].num_bytes for index in unknown)
            if num_bytes >= ANNOUNCED_BYTES:
                num_files = len({path for index in unknown for path in of[index].files})
                log(f"hashing    {num_files:,} files, {num_bytes / 1e9:,.1f} GB, of {source.key}")
            announce_fetching((of[index] for index in unknown), log)
            started = time.time()
            # Times that are still to come do not tell when a file was changed last: but not within this wait.
            if any(_newest(of[index]) > started for index in unknown):
                time.sleep(UNSETTLED_S)
            with contextlib.closing(_hash_all(source, [of[index] for index in unknown])) as hashed:
                for index, content in zip(unknown, hashed, strict=True):
                    hashes[index] = content
                    kept &= _keep(source, of[index], content, started, cache_dir)
    contents = [known for known in hashes if known is not None]
    if kept and len(of) > 1:
        with disk.locked(of_all.parent):
            cache.write_arrays(of_all, {"sha256": cache.hashes_to_array(contents)}, {})
    return contents


def announce_fetching(of: Iterable[Extent], log: Callable[[str], None]) -> None:
    """Says how much is to be fetched of what is read now, if that is much."""
    files = {file for extent in of for file in extent.files if isinstance(file, RemoteFile) and not file.path.exists()}
    num_bytes = sum(file.size for file in files)
    if num_bytes >= ANNOUNCED_BYTES:
        log(f"fetching   {len(files):,} files, {num_bytes / 1e9:,.1f} GB")


def _newest(extent: Extent) -> float:
    """When a file of it was changed last, in seconds since 1970."""
    return max(max(file.mtime_ns, file.ctime_ns) for file in extent.identities) / 1e9


def _keep(source: Source, extent: Extent, content: str, started: float, cache_dir: Path) -> bool:
    """Keeps a hash that was begun with at `started`; not of a file that was changed just before, which may be changed again
    within the same tick of the clock."""
    if started - UNSETTLED_S <= _newest(extent) <= started:
        return False
    path = _kept(source, extent, cache_dir)
    with disk.locked(path.parent):
        cache.write_arrays(path, {}, {"sha256": content})
    return True


def _kept(source: Source, extent: Extent, cache_dir: Path) -> Path:
    """Where the hash of an extent is kept."""
    return cache_dir / _folder(source, [extent]) / extent.key / "hash"


def _kept_together(source: Source, of: Sequence[Extent], cache_dir: Path) -> Path:
    """Where those of several are kept together."""
    return cache_dir / _folder(source, of) / cache.key_of([extent.key for extent in of]) / "hashes"


def _folder(source: Source, of: Sequence[Extent]) -> str:
    """Where hashes are kept. Those of files of text in the first folder know nothing of `Format.mark`; of remote ones they
    are taken nevertheless, for copies that were removed would have to be fetched again."""
    is_marked = source.format.fields_of_form > 0 and not any(extent.is_remote for extent in of)
    return "content-2" if is_marked else "content"


def _known_hash(path: Path) -> str | None:
    """The hash that is kept in the file, if that is there and whole."""
    with contextlib.suppress(cache.DamagedError):
        return cache.read_arrays(path).info["sha256"]


def _known_hashes(source: Source, of: Sequence[Extent], cache_dir: Path, log: Callable[[str], None]) -> list[str] | None:
    """The hashes of all extents, if one file knows them, and is whole."""
    if len(of) == 1:
        known = _known_hash(_kept(source, of[0], cache_dir))
        return None if known is None else [known]
    path = _kept_together(source, of, cache_dir)
    try:
        return cache.hashes_of_array(cache.read_arrays(path).arrays["sha256"][:])
    except cache.DamagedError:
        if path.exists():
            log(f"damaged    {path}; making it again")
        return None


def _hash_all(source: Source, of: Sequence[Extent]) -> Generator[str, None, None]:
    """The hash of each extent, in order, made in several threads, of remote files once all are here."""
    stop = threading.Event()
    remote = dict.fromkeys(file for extent in of for file in extent.files if isinstance(file, RemoteFile))
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash") as threads:
        try:
            for _ in threads.map(lambda file: source.local(file, stop), remote):
                pass  # else all would wait for the one file whose stretches they hash
            yield from threads.map(lambda extent: _hash(source, extent, stop), of)
        finally:
            stop.set()  # a large file takes minutes, which neither a signal nor an error waits for


def _hash(source: Source, extent: Extent, stop: threading.Event) -> str:
    format, span = source.format, extent.span
    combined = hashlib.sha256()
    for file in extent.files:
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
