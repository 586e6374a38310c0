"""Requests that nobody would send: each gets an answer that says why, none an error of the server's own; memory stays."""

import contextlib
import json
import os
import random
import socket
from typing import Any

import pytest

from llamajax.serving.fields import CHAT, COMPLETION
from tests.serving.served import Running, make_served

PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
EXPECTED = {200, 400, 403, 404, 405, 408, 413, 429}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    served = make_served(tmp_path_factory.mktemp("served"))
    served.engine.compile()
    with Running(served) as running:
        yield running


def anything(draw: random.Random, depth: int = 0) -> Any:
    """A value of JSON, often one that is nearly right."""
    texts = [
        "",
        "the model",
        "\ud800",
        "\x00",
        "a" * 5000,
        "\U0001f600",
        "</s><|end|>",
        "user",
        "assistant",
        "tool",
        "{{ 1 }}",
    ]
    numbers = [0, 1, -1, 2, 16, 20, 21, 64, 65, 2**31, 2**63, -(2**63), 2**64, 1e308, 0.5, 1.0, -0.0, 1e-320]
    kinds = [lambda: draw.choice(texts), lambda: draw.choice(numbers), lambda: draw.choice([None, True, False])]
    if depth < 4:
        kinds += [lambda: [anything(draw, depth + 1) for _ in range(draw.randrange(4))], lambda: message(draw, depth + 1)]
        kinds.append(lambda: {draw.choice(texts): anything(draw, depth + 1) for _ in range(draw.randrange(3))})
    return draw.choice(kinds)()


def message(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": draw.choice(["{}", "{", {}, None])}}
    whole = {
        "role": draw.choice(["system", "user", "assistant", "tool", "developer", "nobody"]),
        "content": draw.choice(["the", None, [{"type": "text", "text": "a row"}], [{"type": "image_url"}], 3]),
        "tool_calls": [call] * draw.randrange(3),
        "name": anything(draw, depth + 1),
    }
    return {key: value for key, value in whole.items() if draw.random() < 0.8}


GOOD: dict[str, list[Any]] = {
    "prompt": ["the model", "", ["a", "b"], [1, 5, 9], [[1], [2, 3]], "of " * 90],
    "messages": [[{"role": "user", "content": "which one"}]],
    "max_tokens": [0, 1, 3],
    "max_completion_tokens": [1, 2],
    "model": ["tiny"],
    "stream": [True, False],
    "stop": ["a", ["the", "\n"]],
    "n": [1, 2],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "chat_template_kwargs": [{}, {"messages": 1}, {"a": "b"}],
    "logprobs": [0, 3, True],
    "temperature": [0, 1, 2.5],
}
"""Values that requests may have, so that most of what is odd comes alone."""


def body(draw: random.Random, path: str) -> bytes:
    """A request that is good but for a few things, or is no JSON at all."""
    parameters = PATHS[path]
    required = "prompt" if path == "/v1/completions" else "messages"
    given = {required: draw.choice(GOOD[required])}
    for name in draw.sample(sorted(parameters), draw.randrange(5)):
        given[name] = draw.choice(GOOD[name]) if name in GOOD and draw.random() < 0.6 else anything(draw)
    if draw.random() < 0.2:
        given[draw.choice(["modle", "\ud800", "", "x" * 200, "functions"])] = anything(draw)
    if draw.random() < 0.3 and required == "messages":
        given["messages"] = [message(draw) for _ in range(draw.randrange(4))]
    text = json.dumps(given).encode()
    if draw.random() < 0.15:
        text = bytes(draw.choice([draw.randrange(256), byte]) if draw.random() < 0.02 else byte for byte in text)
    if draw.random() < 0.05:
        text = text[: draw.randrange(len(text))]
    return text


def raw(draw: random.Random) -> bytes:
    """Bytes on a connection, hardly HTTP."""
    lines = [
        b"POST /v1/completions HTTP/1.1\r\n", b"GET / HTTP/9.9\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n", b"\r\n",
        b"Host: localhost\r\n", b"Host: \xff\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999999\r\n",
        b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"ffffffff\r\n", b"0\r\n\r\n",
        b"Authorization: \x00\r\n",
        b"{}", draw.randbytes(20), b"GET http://other/ HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n", b"Expect: 100-continue\r\n",
    ]  # fmt: skip
    return b"".join(draw.choices(lines, k=draw.randrange(1, 6))) + draw.choice([b"", b"\r\n"])


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fuzz(running: Running, seeds: range, capfd: pytest.CaptureFixture[str]) -> dict[int, int]:
    """Returns how many requests got each status."""
    statuses: dict[int, int] = {}
    for seed in seeds:
        draw = random.Random(seed)
        if seed % 10 == 0:
            answer = b""
            with running.connect() as connection, contextlib.suppress(OSError):  # it may close before it has read all
                connection.sendall(raw(draw))
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(10_000):
                    answer += part
            status = int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 400
        else:
            path = draw.choice(list(PATHS))
            status, answer, _ = running.ask(path, body(draw, path))
            if status != 200:
                assert isinstance(answer["error"]["message"], str), (seed, answer)
        assert status in EXPECTED, (seed, status, answer)
        statuses[status] = statuses.get(status, 0) + 1
    running.wait_until_idle()
    assert running.ask("/health")[0] == 200
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err
    return statuses


@pytest.mark.slow
def test_300_odd_requests_are_answered(running, capfd):
    statuses = fuzz(running, range(300), capfd)
    assert statuses[200] > 50
    assert statuses[400] > 100


@pytest.mark.long
def test_10_000_odd_requests_are_answered_in_bounded_memory(running, capfd):
    fuzz(running, range(1_000_000, 1_001_000), capfd)
    before = resident_bytes()
    statuses = fuzz(running, range(1_001_000, 1_010_000), capfd)
    with capfd.disabled():
        print(f"\n{statuses}; memory {before / 2**20:.0f} -> {resident_bytes() / 2**20:.0f} MiB")
    assert resident_bytes() < before + 50 * 2**20
