"""A web server that fails as real ones do."""

import contextlib
import dataclasses
import http.server
import threading
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass
class Web:
    """Serves `files`; what `trouble` gives for a request and its number, from 1, is done instead of an answer."""

    url: str = ""
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    trouble: Callable[[str, str, int], int | str | None] = lambda method, path, number: None
    """An HTTP status; or `drop`, in the middle of the content; or `slow`, a megabyte each tenth of a second."""
    requests: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Method and path of each, without its query."""

    def fetched(self, path: str) -> int:
        return self.requests.count(("GET", path))


class _Handler(http.server.BaseHTTPRequestHandler):
    web: Web

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_GET(self) -> None:
        self._answer("GET")

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, method: str) -> None:
        path = self.path.partition("?")[0]
        self.web.requests.append((method, path))
        trouble = self.web.trouble(method, path, self.web.requests.count((method, path)))
        content = self.web.files.get(path)
        if isinstance(trouble, int) or content is None:
            self.send_error(trouble if isinstance(trouble, int) else 404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        for name, value in self.web.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if method == "HEAD":
            return
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(content) // 2 if trouble == "drop" else len(content), 2**20):
                self.wfile.write(content[at : min(at + 2**20, len(content) // 2 if trouble == "drop" else len(content))])
                time.sleep(0.1 if trouble == "slow" else 0)


@contextlib.contextmanager
def served() -> Iterator[Web]:
    """A server on loopback, while the block runs."""
    web = Web()
    handler = type("Handler", (_Handler,), {"web": web})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        web.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join()
