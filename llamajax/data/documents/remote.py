"""Files of object stores and web servers, brought whole into the cache when they are read first.

A listing tells a remote file's address, size and version, and by these it is known: nothing is fetched to learn whether it
has changed. One process of a machine fetches a file; a copy that is there is whole, and everything reads the copy.
"""

import http
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import fsspec
import fsspec.callbacks
import fsspec.config
import fsspec.core

from llamajax import disk
from llamajax.data import cache, progress
from llamajax.errors import DataError, DiskError, EnvironmentMismatchError, UserError, without_passwords

PAUSES_S = (1.0, 5.0, 20.0)
"""Before each further attempt at what the network or a server may get over."""
ASKED_AT_ONCE = 8
"""Files whose size and version are asked for at a time."""

_FOLDER = "remote"
_WEB = ("http://", "https://")
# What stores say of a file's version, the surest first; some say several of these.
_VERSIONS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "blob_id", "generation", "checksum",
    "LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created",
)  # fmt: skip
# Errors of networks, by the package that raises them, which need not be there: of the web, of Hugging
# Face, of S3, of Google.
_OF_NETWORKS = {
    "aiohttp.ClientError", "httpx.TransportError", "httpx2.TransportError", "botocore.ConnectionError",
    "botocore.HTTPClientError", "botocore.IncompleteReadError", "urllib3.HTTPError", "google.TransportError",
    "requests.RequestException",
}  # fmt: skip
_DEFINITE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_MAY_PASS = {408, 425, 429}
_CONNECT_S, _READ_S = 30, 120

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store, as a listing knows it."""

    url: str
    size: int
    """Bytes."""
    version: str
    """What its store says that is another for another content; empty where it says nothing."""
    cache_dir: Path
    """Where the copy is kept."""

    @property
    def path(self) -> Path:
        """The local copy, which may not be there yet. Errors in it are told by this, so it has the names of the address."""
        scheme, _, rest = shown(self.url).partition("://")
        names = [re.sub(r"[^\w.@=+-]", "_", part, flags=re.ASCII)[-200:] for part in rest.split("/") if part.strip(".")]
        *folders, name = [scheme, *names][-12:]
        key = cache.key_of(self.url, self.size, self.version)[:16]
        return self.cache_dir.joinpath(_FOLDER, *folders, f"{name}-{key}", f"copy{PurePosixPath(name).suffix}")

    @property
    def suffix(self) -> str:
        """How its name ends, with the dot, as of a `Path`."""
        return PurePosixPath(shown(self.url)).suffix

    def __str__(self) -> str:
        return shown(self.url)

    def fetched(self, key: str, stop: threading.Event) -> Path:
        """The local copy, made now if it is not there.

        Args:
            key: of the source, for messages.
            stop: another thread sets it when the file is no longer wanted.

        Raises:
            CancelledError: `stop` was set in the middle.
            DataError: the file is gone, has changed since it was listed, or may not be read.
            DiskError: network, server or store fails, several times.
            OSError: the cache's disk fails, or is full.
        """
        path = self.path
        if not path.exists():
            with disk.locked(path.parent):
                if not path.exists():
                    _reached(f"{self}: {key}.paths", lambda: self._fetch(path, key, stop))
        return path

    def _fetch(self, path: Path, key: str, stop: threading.Event) -> None:
        store, name = _store(self.url)
        with disk.file_made_whole(path, keep=True) as file:  # which may be open
            store.get_file(name, file.name, callback=_Arriving(stop))
            came = os.fstat(file.fileno()).st_size
            store.invalidate_cache()
            if _size_and_version(store.info(name)) != (self.size, self.version):
                raise DataError(f"{self}: {key}.paths: was changed while it was read; run again when it is at rest")
            if came != self.size:
                raise ConnectionError(f"{came:,} of {self.size:,} bytes came")


File = Path | RemoteFile
"""A file of a source."""


class _Arriving(fsspec.callbacks.NoOpCallback):
    """Says that a file arrives. Not any callback: with others `hf://` asks for every five megabytes by themselves."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop

    def relative_update(self, inc: int = 1) -> None:
        if self._stop.is_set():
            raise CancelledError
        progress.gets_on()


def listed(pattern: str, key: str, cache_dir: Path, is_meant: Callable[[PurePath], bool]) -> list[RemoteFile]:
    """The files that an address names, that match it, or that a directory holds, in the order of their addresses.

    Args:
        pattern: an address, perhaps with `*`, `**`, `?` (not of web servers) or `[...]`.
        key: of the source, for messages.
        cache_dir: where copies are kept.
        is_meant: whether a directory stands for its file at this path in it.

    Raises:
        DataError: there is none, or it may not be read.
        DiskError: network, server or store fails, several times.
        EnvironmentMismatchError: a package for such addresses is missing.
    """
    where = f"{shown(pattern)}: {key}.paths"
    store, path = _reached(where, lambda: _store(pattern))
    urls = {pattern: path}
    if re.search(r"[*\[]" if pattern.startswith(_WEB) else r"[*?\[]", pattern):
        found = map(str, _reached(where, lambda: store.glob(path)))
        urls = {store.unstrip_protocol(name): name for name in found}
    infos = _asked(store, urls, key)
    if infos.get(pattern, {}).get("type") == "directory":
        below = [PurePosixPath(str(name)) for name in _reached(where, lambda: store.find(path))]
        depth = len(PurePosixPath(path).parts)
        meant = [str(name) for name in below if is_meant(PurePosixPath(*name.parts[depth:]))]
        infos = _asked(store, {store.unstrip_protocol(name): name for name in meant}, key)
    files = []
    for url, info in sorted(infos.items()):
        if info.get("type") == "directory":
            continue
        size, version = _size_and_version(info)
        if size is None:
            raise DataError(f"{shown(url)}: {key}.paths: its server does not tell its size; fetch it by hand and name that")
        files.append(RemoteFile(url, size, version, cache_dir))
    if not files:
        raise DataError(f"{key}.paths: {shown(pattern)!r} matches no file; correct it or remove it")
    return files


def _asked(store: fsspec.AbstractFileSystem, urls: dict[str, str], key: str) -> dict[str, dict[str, Any]]:
    """What the store says of each file, by its address."""

    def asked(url: str) -> dict[str, Any]:
        progress.gets_on()
        return _reached(f"{shown(url)}: {key}.paths", lambda: store.info(urls[url]))

    with ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="list") as threads:
        return dict(zip(urls, threads.map(asked, urls), strict=True))


def shown(url: str) -> str:
    """The address without password and, of web servers, without what comes behind a question mark: that may be a key."""
    return without_passwords(url.partition("?")[0] if url.startswith(_WEB) else url)


def _store(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The store of an address, and what the store calls the file."""
    options: dict[str, Any] = {}
    if url.startswith(_WEB):
        import aiohttp  # a package that base fsspec does without

        given = fsspec.config.conf.get(url.partition(":")[0], {})
        of_client = {
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S),  # else five minutes
            "auto_decompress": False,  # a .gz that is served as such is to be stored as it lies there
            "trust_env": True,
        }
        options["headers"] = {"Accept-Encoding": "identity", **given.get("headers", {})}
        options["client_kwargs"] = of_client | given.get("client_kwargs", {})
    return fsspec.core.url_to_fs(url, **options)


def _size_and_version(info: dict[str, Any]) -> tuple[int | None, str]:
    return info.get("size"), next((f"{name} {info[name]}" for name in _VERSIONS if info.get(name)), "")


def _reached(where: str, call: Callable[[], T]) -> T:
    """What `call` returns; where the network or a server fails in a way that may pass, after further attempts.

    Raises:
        DataError, DiskError, EnvironmentMismatchError: it fails; the line begins with `where`.
        OSError: the disk here is full.
    """
    pauses = iter(PAUSES_S)
    while True:
        try:
            return call()
        except (UserError, CancelledError):
            raise
        except ImportError as error:
            reason = " ".join(str(error).split())
            raise EnvironmentMismatchError(f"{where}: {reason}; run pip install 'llamajax[remote]'") from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno in disk.FULL:
                raise
            failure = _Failure.of(error)
            pause_s = next(pauses, None) if failure.may_pass else None
            if pause_s is None:
                raise failure.told(where) from error
        time.sleep(pause_s)


class _Failure(NamedTuple):
    """What an error of a store's library comes from."""

    cause: BaseException
    status: int | None
    """Of HTTP."""
    may_pass: bool

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        """By the first in the chain of causes that tells: a server's failure is the cause of a missing file for some."""
        each: BaseException | None = error
        while each is not None:
            if (status := _status(each)) is not None:
                return cls(each, status, status >= 500 or status in _MAY_PASS)
            names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(each).__mro__}
            if names & _OF_NETWORKS or isinstance(each, ConnectionError | TimeoutError):
                return cls(each, None, may_pass=True)
            each = each.__cause__
        # One without a number is a store's own word, such as gcsfs's of what is forbidden.
        of_system = isinstance(error, OSError) and error.errno is not None
        return cls(error, None, of_system and not isinstance(error, _DEFINITE))

    def told(self, where: str) -> UserError:
        """The one line about it, without what may be a key."""
        if self.status is None:
            text = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1", " ".join(str(self.cause).split()))
            reason = without_passwords(text)[:300] or type(self.cause).__name__
        else:
            known = self.status in set(http.HTTPStatus)
            reason = f"HTTP {self.status} {http.HTTPStatus(self.status).phrase if known else ''}".rstrip()
        if self.may_pass:
            tries = f"{len(PAUSES_S) + 1} times"
            remedy = "see to network and server and run the same command again"
            return DiskError(f"{where}: cannot be fetched: {reason}, {tries}; {remedy}")
        if self.status in (401, 403) or isinstance(self.cause, PermissionError):
            remedy = "see to your credentials for this store, or correct the path"
            return DataError(f"{where}: may not be read: {reason}; {remedy}")
        if self.status in (404, 410) or isinstance(self.cause, FileNotFoundError):
            return DataError(f"{where}: there is no such file; correct or remove the path")
        return DataError(f"{where}: cannot be fetched: {reason}; correct or remove the path")


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error is about, wherever its library keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif response is not None:  # of huggingface_hub
        status = getattr(response, "status_code", None)
    else:  # of aiohttp; of gcsfs
        status = getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) and 400 <= status < 600 else None
