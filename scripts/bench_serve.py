"""Measures a server: tokens per second and time to the first token, one by one and at once, beside llama.cpp's.

    python -m converters.hf export runs/quickstart quickstart_hf
    python llama.cpp/convert_hf_to_gguf.py quickstart_hf --outtype f32 --outfile quickstart.gguf
    python scripts/bench_serve.py --model quickstart_hf --gguf quickstart.gguf --llama_server PATH/llama-server

Starts the servers one after the other, with the same number of slots, and sends both the same prompts as token ids, streamed
and greedy, with the end of text ignored. Without --gguf only llamajax is measured.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.runs import free_address

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Timed:
    """An answer, in seconds."""

    first_s: float
    """From the request to its first token."""
    end_s: float
    tokens: int


@contextlib.contextmanager
def server(command: Sequence[str], url: str, log: Path) -> Iterator[float]:
    """Runs a server; yields the seconds until it is healthy."""
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"PYTHONPATH": str(ROOT)})
        try:
            while True:
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                if process.poll() is not None:
                    sys.exit(f"{command[0]} ended: {log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield time.monotonic() - started
        finally:
            process.terminate()
            process.wait()


def ask(url: str, body: dict[str, Any]) -> Timed:
    """Streams an answer of /v1/completions."""
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    started, first, tokens = time.monotonic(), None, 0
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            first = first or (time.monotonic() if event["choices"] else None)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    assert first is not None
    return Timed(first - started, time.monotonic() - started, tokens)


def measure(name: str, url: str, bodies: Sequence[dict[str, Any]], at_once: int) -> float:
    """Prints a row; returns tokens per second."""
    ask(url, bodies[0] | {"prompt": bodies[0]["prompt"][::-1]})  # first use of everything
    started = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda body: ask(url, body), bodies))
    seconds = time.monotonic() - started
    firsts = sorted(answer.first_s * 1000 for answer in answers)
    speed = sum(answer.tokens for answer in answers) / seconds
    p95 = firsts[min(len(firsts) - 1, round(0.95 * len(firsts)))]
    print(f"| {name} | {at_once} | {speed:,.0f} | {statistics.median(firsts):,.0f} | {p95:,.0f} |", flush=True)
    return speed


def main() -> None:
    """Measures and prints a table in Markdown."""
    parser = argparse.ArgumentParser(
        description="Measure a server beside one-by-one requests and beside llama.cpp's server."
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--llama_server", default="llama-server", help="llama.cpp's program")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--at_once", type=int, default=16, help="requests at once, and slots")
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=48)
    parser.add_argument("--shared_tokens", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--vocab_size", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama.cpp; llamajax takes all")
    parser.add_argument("--log_dir", type=Path, default=Path("."))
    given = parser.parse_args()
    draw = random.Random(0)
    shared = [draw.randrange(10, given.vocab_size) for _ in range(given.shared_tokens)]
    own = given.prompt_tokens - given.shared_tokens
    bodies = [
        {
            "prompt": shared + [draw.randrange(10, given.vocab_size) for _ in range(own)],
            "max_tokens": given.new_tokens, "temperature": 0, "ignore_eos": True,
        }
        for _ in range(given.requests)
    ]  # fmt: skip
    length = given.prompt_tokens + given.new_tokens
    address = free_address()
    url, port = f"http://{address}", address.rpartition(":")[2]
    ours = [
        sys.executable, "-m", "llamajax.serve", "--model", given.model, "--port", port, "--slots", str(given.at_once),
        "--max_seq_len", str(length), "--mesh.num_cpu_devices", "1", "--compute_dtype", "float32",
    ]  # fmt: skip
    theirs = [
        given.llama_server, "-m", str(given.gguf), "--port", port, "--parallel", str(given.at_once), "--threads",
        str(given.threads), "--ctx-size", str(length * given.at_once), "--no-webui",
    ]  # fmt: skip
    print("| server | at once | tokens/s | first token, median ms | p95 ms |\n|---|---|---|---|---|")
    servers = [("llamajax", ours), *([("llama.cpp", theirs)] if given.gguf else [])]
    for name, command in servers:
        with server(command, url, given.log_dir / f"{name}.log") as start_s:
            one = measure(name, url, bodies[: max(4, given.requests // 4)], 1)
            many = measure(name, url, bodies, given.at_once)
            print(f"{name}: ready after {start_s:.1f} s; {many / one:.1f} times as many tokens/s at once", file=sys.stderr)


if __name__ == "__main__":
    main()
