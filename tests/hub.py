"""A Hugging Face Hub on loopback, as far as huggingface_hub asks for models, that fails as the real one does."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from huggingface_hub import constants

FIRST, SECOND = "1" * 40, "2" * 40
"""Names of commits."""


@dataclasses.dataclass
class Hub:
    """Serves models; what `trouble` gives for a request and its number, from 1, is done instead of an answer."""

    url: str = ""
    commits: dict[str, dict[str, dict[str, bytes]]] = dataclasses.field(default_factory=dict)
    """Files of each commit of each model."""
    branches: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    """Commit of each branch of each model."""
    token: dict[str, str] = dataclasses.field(default_factory=dict)
    """Token that a gated model asks for."""
    trouble: Callable[[str, str, int], int | str | None] = lambda method, path, number: None
    """An HTTP status; or `drop`, in the middle of the content."""
    requests: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Method and path of each, without its query."""
    ranges: list[str] = dataclasses.field(default_factory=list)

    def add(self, repository: str, commit: str, directory: Path, others: Mapping[str, bytes] | None = None) -> None:
        """Pushes the contents of a directory and other files to the model's main branch."""
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        self.commits.setdefault(repository, {})[commit] = files | dict(others or {})
        self.branches.setdefault(repository, {})["main"] = commit

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        return sorted(path.rpartition("/")[2] for method, path in self.requests if method == "GET" and "/resolve/" in path)


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_GET(self) -> None:
        self._answer("GET")

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, method: str) -> None:
        hub, path = self.hub, urllib.parse.unquote(self.path.partition("?")[0])
        hub.requests.append((method, path))
        trouble = hub.trouble(method, path, hub.requests.count((method, path)))
        if isinstance(trouble, int):
            self._send({}, b"", trouble)
            return
        is_listing = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models" if is_listing else "").split("/")
        repository, revision, name = "/".join(parts[1:3]), parts[4] if len(parts) > 4 else "main", "/".join(parts[5:])
        commits, has_token = hub.commits.get(repository), self.headers.get("Authorization") is not None
        if commits is None:
            self._send({"X-Error-Code": "RepoNotFound"}, b"", 404 if has_token else 401)
            return
        commit = hub.branches[repository].get(revision, revision)
        if commit not in commits:
            self._send({"X-Error-Code": "RevisionNotFound"}, b"", 404)
        elif is_listing:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in commits[commit].items()]
            body = {"id": repository, "sha": commit, "siblings": siblings}
            self._send({"Content-Type": "application/json"}, json.dumps(body).encode())
        elif repository in hub.token and self.headers.get("Authorization") != f"Bearer {hub.token[repository]}":
            self._send({"X-Error-Code": "GatedRepo"}, b"", 403 if has_token else 401)
        elif name not in commits[commit]:
            self._send({"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"", 404)
        else:
            content = commits[commit][name]
            etag = hashlib.sha256(content).hexdigest()
            self._send({"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, content, drop=trouble == "drop")

    def _send(self, headers: Mapping[str, str], content: bytes, status: int = 200, *, drop: bool = False) -> None:
        if status == 200 and (wanted := self.headers.get("Range")):
            self.hub.ranges.append(wanted)
            start, size = int(wanted.removeprefix("bytes=").rstrip("-")), len(content)
            headers, content = {**headers, "Content-Range": f"bytes {start}-{size - 1}/{size}"}, content[start:]
            status = 206
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content[: len(content) // 2] if drop else content)
            self.close_connection = self.close_connection or drop


@contextlib.contextmanager
def served() -> Iterator[Hub]:
    """A Hub, while the block runs."""
    hub = Hub()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Makes huggingface_hub ask the Hub at this address, with an empty cache, as HF_ENDPOINT and HF_HUB_CACHE would."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
