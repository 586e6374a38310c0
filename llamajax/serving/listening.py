"""Listens for requests until a signal: the first one drains the server, the second one ends it at once."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from llamajax.errors import ConfigError
from llamajax.serving.app import Server
from llamajax.watch.console import say

CONNECTIONS_PER_REQUEST = 4
"""Connections that are accepted for each request that may be in work or wait."""


class Listener(uvicorn.Server):
    """uvicorn's server with signals of our own."""

    def __init__(self, server: Server, drain_s: float, max_requests: int, on_ready: Callable[[], object]) -> None:
        """Prepares a listener for `server`, which has up to `drain_s` after the first signal to finish its answers.

        It calls `on_ready` once it listens.
        """
        super().__init__(
            uvicorn.Config(
                server.app(),
                access_log=False,
                log_level="error",
                lifespan="off",
                ws="none",
                server_header=False,
                limit_concurrency=CONNECTIONS_PER_REQUEST * max_requests,
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )
        self._server, self._on_ready = server, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals while the server runs; afterwards the earlier handlers are back."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drains at the first signal, and ends the process at the second."""
        if self.should_exit:
            say("stopped    at the second signal; unfinished answers are lost")
            os._exit(128 + sig)
        self._server.is_draining = True
        self.should_exit = True
        running = sum(served.num_open for served in self._server.models.values())
        say(f"draining   {running} continuations; no more requests; another signal ends at once")


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at this address.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"port: {host}:{port}: {error.strerror or error}; choose another port or host") from error
    listener.set_inheritable(True)
    return listener


def listen(
    server: Server, listener: socket.socket, *, drain_s: float, max_requests: int, on_ready: Callable[[], object]
) -> None:
    """Answers requests until a signal ends the server; see `Listener`.

    Raises:
        BaseException: the error that ended the worker.
    """
    http = Listener(server, drain_s, max_requests, on_ready)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server.worker.on_failure = lambda: loop.call_soon_threadsafe(setattr, http, "should_exit", True)
        server.worker.start(loop)
        await http.serve([listener])

    try:
        asyncio.run(run())
    finally:
        server.worker.stop()
    if server.worker.failure is not None:
        raise server.worker.failure
