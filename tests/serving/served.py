"""A server of a tiny model with random weights, as tests ask it: over HTTP, in this process."""

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from converters.hf_tokenizer import convert_sentencepiece
from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.model import Llama
from llamajax.serving.answers import Limits
from llamajax.serving.app import Server
from llamajax.serving.engine import Engine
from llamajax.serving.listening import Listener, bind
from llamajax.serving.metrics import Metrics
from llamajax.serving.models import Served
from llamajax.serving.worker import Worker
from llamajax.step.state import init_state
from tests.runs import WORDS
from tests.tiny import single_device_mesh, tiny_config

SETTINGS = {
    "vocab_size": 325, "embed_dim": 16, "mlp_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "max_seq_len": 128, "init_std": 0.3,
}  # fmt: skip
"""Of the model; the tokenizer has 321 ids."""
MAX_SEQ_LEN = 96
TEMPLATE = (
    "{# calls are written as <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LIMITS = Limits(max_body_bytes=20_000, max_tokens=64, max_queue=100, max_time_s=60.0)


def write_tokenizer(directory: Path) -> Tokenizer:
    """A tokenizer in Hugging Face's form, with a special token for the end of a turn."""
    body = convert_sentencepiece(train_sentencepiece([" ".join(WORDS)] * 20, vocab_size=320), bos_id=1)
    assert body is not None
    model = json.loads(body)
    token = {"id": 320, "content": "<|end|>", "special": True}
    model["added_tokens"].append(dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | token)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(model))
    return load_tokenizer(directory)


def tiny_model(changes: Mapping[str, Any] = MappingProxyType({})) -> Llama:
    """The model, on the current mesh, with changes of its configuration."""
    config = tiny_config().changed({f"model.{key}": value for key, value in SETTINGS.items()})
    return init_state(config.changed(changes)).model


def make_engine(model: Llama, vocab_size: int, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"num_slots": 4, "max_seq_len": MAX_SEQ_LEN, "tokens_per_step": 32} | changes
    return Engine(model, vocab_size=vocab_size, **settings)


def make_served(directory: Path, name: str = "tiny", **changes: Any) -> Served:
    """The model with its tokenizer and template, on one device."""
    jax.set_mesh(single_device_mesh())
    tokenizer = write_tokenizer(directory)
    engine = make_engine(tiny_model(), tokenizer.vocab_size, **changes)
    return Served(
        name=name,
        engine=engine,
        tokenizer=tokenizer,
        template=ChatTemplate(TEMPLATE, tokenizer, "a test"),
        end_ids={tokenizer.eos_id, 320},
        num_rows=SETTINGS["vocab_size"],
    )


class _Listener(Listener):
    """Without signals, which only the main thread may handle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Running:
    """A server that answers on a port of this machine, in a thread."""

    def __init__(self, *models: Served, limits: Limits = LIMITS, token: str | None = None) -> None:
        self.lines: list[str] = []
        table = {served.name: served for served in models}
        self.server = Server(
            models=table,
            worker=Worker([served.engine for served in models]),
            limits=limits,
            metrics=Metrics(table),
            token=token,
            log=self.lines.append,
        )
        self._listener = bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = _Listener(self.server, 10, 100, lambda: None)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        import asyncio

        async def run() -> None:
            self.server.worker.start(asyncio.get_running_loop())
            await self._http.serve([self._listener])

        asyncio.run(run())

    def __enter__(self) -> "Running":
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._http.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._http.should_exit = True
        self._thread.join()
        self.server.worker.stop()

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
        """Returns status, JSON or text, and headers of an answer; sends `body` as JSON, bytes as they are."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"} | (headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, content, got = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            status, content, got = error.code, error.read(), error.headers
        is_json = got.get_content_type() == "application/json"
        return status, json.loads(content) if is_json else content.decode(), got

    def post(self, path: str, **body: Any) -> Any:
        """Returns the JSON of an answer that must succeed."""
        status, answer, _ = self.ask(path, body)
        assert status == 200, answer
        return answer

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Returns the events of a stream that must succeed."""
        status, text, headers = self.ask(path, body | {"stream": True})
        assert status == 200, text
        assert headers.get_content_type() == "text/event-stream"
        events = text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def connect(self) -> socket.socket:
        """A connection for requests that no client sends."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def wait_until_idle(self) -> None:
        """Returns once no slot is in use and none waits."""
        deadline = time.monotonic() + 30
        while any(s.num_open or s.engine.is_busy for s in self.server.models.values()):
            assert time.monotonic() < deadline, "a slot is still in use"
            time.sleep(0.005)
