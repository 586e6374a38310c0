"""Copies files of object stores and web servers into the cache, whole, when they are first read.

A listing reports a remote file's address, size and version, which identify it: nothing is fetched to learn whether it has
changed. One process of a machine fetches a file; a copy that exists is complete, and every reader uses the copy.
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
"""Pauses before each retry after an error of the network or a server that may be temporary."""
ASKED_AT_ONCE = 8
"""Number of files listed at a time."""

_FOLDER = "remote"
_WEB = ("http://", "https://")
# Names of the fields in which stores report a file's version, the most reliable first; some report several.
_VERSIONS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "blob_id", "generation", "checksum",
    "LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created",
)  # fmt: skip
# Network errors by the packages that raise them, which may not be installed: packages for the web, Hugging Face, S3 and
# Google.
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
    """A file of a store, as listed."""

    url: str
    size: int
    """Size in bytes."""
    version: str
    """The version that the store reports, which differs for different content; empty if it reports none."""
    cache_dir: Path
    """Directory for copies."""

    @property
    def path(self) -> Path:
        """Path of the local copy, which may not exist yet. Messages show it, so it has the address's names."""
        scheme, _, rest = shown(self.url).partition("://")
        names = [re.sub(r"[^\w.@=+-]", "_", part, flags=re.ASCII)[-200:] for part in rest.split("/") if part.strip(".")]
        *folders, name = [scheme, *names][-12:]
        key = cache.key_of(self.url, self.size, self.version)[:16]
        return self.cache_dir.joinpath(_FOLDER, *folders, f"{name}-{key}", f"copy{PurePosixPath(name).suffix}")

    @property
    def suffix(self) -> str:
        """Suffix of the file name, with the dot, as `Path.suffix` has it."""
        return PurePosixPath(shown(self.url)).suffix

    def __str__(self) -> str:
        return shown(self.url)

    def fetched(self, key: str, stop: threading.Event) -> Path:
        """Returns the local copy; fetches it if it is missing.

        Args:
            key: configuration key of the source, for messages.
            stop: set by another thread when the file is no longer needed.

        Raises:
            CancelledError: `stop` was set during the fetch.
            DataError: the file is gone, has changed since it was listed, or may not be read.
            DiskError: the network, the server or the store fails, several times.
            OSError: the cache's disk fails or is full.
        """
        path = self.path
        if not path.exists():
            with disk.locked(path.parent):
                if not path.exists():
                    _reached(f"{self}: {key}.paths", lambda: self._fetch(path, key, stop))
        return path

    def _fetch(self, path: Path, key: str, stop: threading.Event) -> None:
        store, name = _store(self.url)
        with disk.file_made_whole(path, keep=True) as file:  # the file may be open elsewhere
            store.get_file(name, file.name, callback=_Arriving(stop))
            came = os.fstat(file.fileno()).st_size
            store.invalidate_cache()
            if _size_and_version(store.info(name)) != (self.size, self.version):
                raise DataError(f"{self}: {key}.paths: changed while it was read; run again once it no longer changes")
            if came != self.size:
                raise ConnectionError(f"{came:,} of {self.size:,} bytes arrived")


File = Path | RemoteFile
"""A file of a source."""


class _Arriving(fsspec.callbacks.NoOpCallback):
    """Reports progress. This is a subclass of `NoOpCallback` because with others `hf://` requests each 5 MB separately."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop

    def relative_update(self, inc: int = 1) -> None:
        if self._stop.is_set():
            raise CancelledError
        progress.gets_on()


def listed(pattern: str, key: str, cache_dir: Path, is_meant: Callable[[PurePath], bool]) -> list[RemoteFile]:
    """Lists the files that an address names or matches, or that its directory holds, sorted by address.

    Args:
        pattern: an address, which may contain `*`, `**`, `?` (except for web servers) or `[...]`.
        key: configuration key of the source, for messages.
        cache_dir: directory for copies.
        is_meant: returns whether a directory includes its file at this relative path.

    Raises:
        DataError: no file exists, or access is denied.
        DiskError: the network, the server or the store fails, several times.
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
            raise DataError(f"{shown(url)}: {key}.paths: its server does not report its size; download it and name the copy")
        files.append(RemoteFile(url, size, version, cache_dir))
    if not files:
        raise DataError(f"{key}.paths: {shown(pattern)!r} matches no file; correct it or remove it")
    return files


def _asked(store: fsspec.AbstractFileSystem, urls: dict[str, str], key: str) -> dict[str, dict[str, Any]]:
    """Returns the store's information about each file, by address."""

    def asked(url: str) -> dict[str, Any]:
        progress.gets_on()
        return _reached(f"{shown(url)}: {key}.paths", lambda: store.info(urls[url]))

    with ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="list") as threads:
        return dict(zip(urls, threads.map(asked, urls), strict=True))


def shown(url: str) -> str:
    """Returns the address without a password and, for web servers, without the query string, which may be a key."""
    return without_passwords(url.partition("?")[0] if url.startswith(_WEB) else url)


def _store(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the store of an address, and the file's name in that store."""
    options: dict[str, Any] = {}
    if url.startswith(_WEB):
        import aiohttp  # optional for fsspec

        given = fsspec.config.conf.get(url.partition(":")[0], {})
        of_client = {
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S),  # default: 5 minutes
            "auto_decompress": False,  # store a .gz file unchanged
            "trust_env": True,
        }
        options["headers"] = {"Accept-Encoding": "identity", **given.get("headers", {})}
        options["client_kwargs"] = of_client | given.get("client_kwargs", {})
    return fsspec.core.url_to_fs(url, **options)


def _size_and_version(info: dict[str, Any]) -> tuple[int | None, str]:
    return info.get("size"), next((f"{name} {info[name]}" for name in _VERSIONS if info.get(name)), "")


def _reached(where: str, call: Callable[[], T]) -> T:
    """Returns the result of `call`, retrying after network and server errors that may be temporary.

    Raises:
        DataError, DiskError, EnvironmentMismatchError: the call fails; the message begins with `where`.
        OSError: the local disk is full.
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
    """The cause of an error from a store's library."""

    cause: BaseException
    status: int | None
    """HTTP status, if any."""
    may_pass: bool

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        """Returns the first clear cause in the chain: some libraries report a server's failure as a missing file."""
        each: BaseException | None = error
        while each is not None:
            if (status := _status(each)) is not None:
                return cls(each, status, status >= 500 or status in _MAY_PASS)
            names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(each).__mro__}
            if names & _OF_NETWORKS or isinstance(each, ConnectionError | TimeoutError):
                return cls(each, None, may_pass=True)
            each = each.__cause__
        # Without an errno it is the store's own error, such as gcsfs's for denied access.
        of_system = isinstance(error, OSError) and error.errno is not None
        return cls(error, None, of_system and not isinstance(error, _DEFINITE))

    def told(self, where: str) -> UserError:
        """Returns the one-line error to report, without anything that may be a key."""
        if self.status is None:
            text = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1", " ".join(str(self.cause).split()))
            reason = without_passwords(text)[:300] or type(self.cause).__name__
        else:
            known = self.status in set(http.HTTPStatus)
            reason = f"HTTP {self.status} {http.HTTPStatus(self.status).phrase if known else ''}".rstrip()
        if self.may_pass:
            tries = f"{len(PAUSES_S) + 1} times"
            remedy = "check the network and the server, and run the same command again"
            return DiskError(f"{where}: cannot be fetched: {reason}, {tries}; {remedy}")
        if self.status in (401, 403) or isinstance(self.cause, PermissionError):
            remedy = "check your credentials for this store, or correct the path"
            return DataError(f"{where}: may not be read: {reason}; {remedy}")
        if self.status in (404, 410) or isinstance(self.cause, FileNotFoundError):
            return DataError(f"{where}: does not exist; correct or remove the path")
        return DataError(f"{where}: cannot be fetched: {reason}; correct or remove the path")


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status of an error, wherever its library stores it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif response is not None:  # of huggingface_hub
        status = getattr(response, "status_code", None)
    else:  # of aiohttp; of gcsfs
        status = getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) and 400 <= status < 600 else None
