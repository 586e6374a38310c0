"""The HTTP side of a server: addresses, access, sizes, streams and errors, as an ASGI application."""

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llamajax.config.serve import LOOPBACK
from llamajax.serving.answers import Answers, Limits
from llamajax.serving.chat import ChatRequest
from llamajax.serving.completions import CompletionRequest
from llamajax.serving.fields import CHAT, COMPLETION, Parameter, RequestError, read_body
from llamajax.serving.metrics import CONTENT_TYPE, Metrics
from llamajax.serving.models import Served, find_model
from llamajax.serving.worker import Worker

PAGE = Path(__file__).with_name("page.html")
OPEN_PATHS = ("/", "/health")
"""Addresses that need no token: the page, which asks for it, and the state of the server."""
BODY_S = 30.0
"""Seconds that a client may take to send a body."""
_GONE = Response(status_code=499)
"""Answer to a client that has gone; nobody reads it."""


@dataclass(kw_only=True)
class Server:
    """All that the answers to requests need."""

    models: Mapping[str, Served]
    worker: Worker
    limits: Limits
    metrics: Metrics
    token: str | None
    """Bearer token of all requests but those of `OPEN_PATHS`; None: none is needed."""
    hosts: tuple[str, ...] = LOOPBACK
    """Names by which the server may be addressed without a token."""
    log: Callable[[str], None] = lambda line: None
    is_draining: bool = False

    def app(self) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """Returns the ASGI application."""
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={RequestError: _refused, HTTPException: _refused, Exception: _refused},
        )

    async def _page(self, request: Request) -> Response:
        self._check(request)
        text = await asyncio.to_thread(PAGE.read_text, encoding="utf-8")
        return Response(text, media_type="text/html", headers=page_headers(text))

    async def _health(self, request: Request) -> Response:
        self._check(request)
        if self.worker.failure is not None or self.is_draining:
            return _json({"status": "failed" if self.worker.failure is not None else "draining"}, 503)
        return _json({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        self._check(request)
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def _models(self, request: Request) -> Response:
        self._check(request)
        return _json({"object": "list", "data": [_about(served) for served in self.models.values()]})

    async def _model(self, request: Request) -> Response:
        self._check(request)
        return _json(_about(find_model(self.models, request.path_params["name"])))

    async def _completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, COMPLETION, "prompt")

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, CHAT, "messages")

    async def _generate(
        self,
        request: Request,
        kind: type[CompletionRequest] | type[ChatRequest],
        parameters: Mapping[str, Parameter],
        required: str,
    ) -> Response:
        """Answers a request for texts; counts and logs it."""
        status = 500
        try:
            self._check(request)
            if self.is_draining:
                raise RequestError("the server is about to end; ask another", status=503, code="draining", retry_after=1)
            values = read_body(await _body(request, self.limits.max_body_bytes), parameters, required)
            served = find_model(self.models, values["model"])
            asked = await kind.read(served, values, self.limits)
            answers = Answers(self.worker, served, asked.works, self.limits, self.metrics)
            answer = {"id": f"{asked.id_prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": served.name}
            if values["stream"]:
                status = 200
                return EventStream(self._stream(request, asked, answers, answer), answers.close)
            try:
                whole = await _unless_gone(request, answers.all())
                if whole is None:
                    status = 499
                    return _GONE
                status = 200
                return _json(answer | {"object": asked.object, "choices": asked.choices(whole), "usage": answers.usage})
            finally:
                answers.close()
                self._log(request, status, answers.about)
        except ClientDisconnect:
            status = 499
            return _GONE
        except RequestError as error:
            status = error.status
            self._log(request, status, error.message)
            raise
        finally:
            self.metrics.requests.labels(request.url.path, status).inc()

    async def _stream(
        self, request: Request, asked: CompletionRequest | ChatRequest, answers: Answers, answer: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        """Yields the events of a stream; an error after its start is one of them."""
        with_usage = bool((asked.values["stream_options"] or {}).get("include_usage"))
        head = answer | {"object": asked.chunk_object}
        status = 499
        try:
            async for choices in asked.chunks(answers):
                yield _event(head | {"choices": choices} | ({"usage": None} if with_usage else {}))
            if with_usage:
                yield _event(head | {"choices": [], "usage": answers.usage})
            status = 200
            yield b"data: [DONE]\n\n"
        except RequestError as error:
            status = error.status
            yield _event(error.body)
        finally:
            self._log(request, status, answers.about)

    def _log(self, request: Request, status: int, about: str) -> None:
        self.log(f"request    {request.method} {request.url.path} {status}: {about}")

    def _check(self, request: Request) -> None:
        """Checks who asks.

        Raises:
            RequestError: without the token; or from the page of another site, which a browser may send here.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise RequestError("requests from other sites' pages are refused", status=403, code="origin")
        if self.token is None:
            # A name that resolves to this machine would let the pages of another site ask here.
            if re.sub(r":\d*$", "", host).strip("[]").lower() not in self.hosts:
                raise RequestError(f"the server has no name {host[:60]!r}; start it with a token", status=403, code="host")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self.token.encode())
        if request.url.path not in OPEN_PATHS and not (scheme.lower() == "bearer" and is_right):
            raise RequestError("a bearer token is needed: Authorization: Bearer TOKEN", status=401, code="invalid_api_key")


class EventStream(Response):
    """An answer of server-sent events. It ends when its client goes, and calls `close` in any case."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        """Creates the answer; nothing is sent yet."""
        super().__init__(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
        )
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""

        async def send_all() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await _unless_gone(Request(scope, receive), send_all())
        except OSError:
            pass  # the client has gone
        finally:
            self._close()


async def _unless_gone(request: Request, work: Any) -> Any:
    """Returns the result of a coroutine, or None if the client goes before; then the work is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _body(request: Request, most: int) -> bytes:
    """Returns the body of a request.

    Raises:
        RequestError: it is too large, or too slow.
    """
    too_large = RequestError(f"the body has more than {most:,} bytes", status=413, code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError as error:
        raise RequestError(f"the body took longer than {BODY_S:g} s", status=408, code="body_too_slow") from error
    return bytes(body)


def page_headers(text: str) -> dict[str, str]:
    """Returns headers by which a browser runs only the page's own script, and sends data only to this server."""
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def _about(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "llamajax",
        "parent": served.parent,
        "max_model_len": served.engine.max_seq_len,
        "has_chat": served.template is not None,
    }


async def _refused(request: Request, error: Exception) -> Response:
    """Returns the answer for an error, in OpenAI's form; an unexpected one is also printed with its traceback."""
    if isinstance(error, HTTPException):
        error = RequestError(f"{request.method} {request.url.path[:100]}: {error.detail}", status=error.status_code)
    if not isinstance(error, RequestError):
        error = RequestError("the server made a mistake; its log says more", status=500, code="internal")
    retry = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return _json(error.body, error.status, retry)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")


def _event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
