"""The server as its users start and ask it: a process, OpenAI's library, lm-evaluation-harness, signals."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from converters import convert
from converters.arguments import hf_arguments
from llamajax.config.file import load_config
from llamajax.config.generate import GenerateConfig
from llamajax.generation import run as generate
from llamajax.training import run as train
from tests import runs
from tests.serving.served import TEMPLATE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model for Hugging Face with a chat template, after two steps."""
    directory = tmp_path_factory.mktemp("clients")
    path = runs.write_config(directory, num_steps=2, eval_every=None, eval_batches=0, grad_accum_steps=1)
    train.run(load_config(path))
    assert convert.main(hf_arguments(["export", str(directory / "run"), str(directory / "tiny"), "--no-verify"])) == 0
    (directory / "tiny" / "chat_template.jinja").write_text(TEMPLATE.replace("<|end|>", "{{ eos_token }}"))
    return directory / "tiny"


class Process:
    """A server in a process of its own."""

    def __init__(self, model, *options: str, **variables: str) -> None:
        command = [sys.executable, "-m", "llamajax.serve", "--model", str(model), "--port", "0", "--slots", "4"]
        env = os.environ | {"PYTHONPATH": str(runs.ROOT)} | variables
        self.process = subprocess.Popen(
            [*command, "--mesh.num_cpu_devices", "1", "--tokens_per_step", "64", *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if found := re.match(r"ready +(http://\S+)/v1 for tiny", line):
                self.url = found[1]
                break
        assert self.lines[-1].startswith("ready"), self.lines
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += [line.rstrip("\n") for line in self.process.stderr]

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self._reader.join()
        self.process.communicate()

    def end(self, code: int = 0) -> None:
        assert self.process.wait(timeout=60) == code, self.lines
        self._reader.join()

    def post(self, path: str, **body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())


@pytest.fixture(scope="module")
def server(model):
    with Process(model) as server:
        yield server
        server.process.send_signal(signal.SIGTERM)
        server.end()
        assert server.lines[-1] == "ended      at a signal"
        assert not [line for line in server.lines if "Traceback" in line]


def test_it_says_what_it_does_while_it_starts(server, model):
    said = "\n".join(server.lines)
    for line in (
        r"devices +1 x cpu",
        rf"model +tiny: {model}",
        r"loaded +tiny in \d",
        r"slots +tiny: 4 of 4,096 tokens, [\d.]+ MiB",
    ):
        assert re.search(rf"^{line}", said, re.MULTILINE), said
    assert "without a token" in said


def test_openai_s_library(server, model, tmp_path):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [found.id for found in client.models.list()] == ["tiny"]
    out = tmp_path / "out.jsonl"
    settings = {"prompt": ("the model reads",), "max_tokens": 12, "temperature": 0.0, "output": str(out)}
    generate.run(GenerateConfig(model=str(model), **settings))
    wanted = json.loads(out.read_text())
    body = {"model": "tiny", "prompt": "the model reads", "max_tokens": 12, "temperature": 0}
    found = client.completions.create(**body, logprobs=2)
    assert found.choices[0].text == wanted["text"]
    assert found.choices[0].finish_reason == wanted["finish_reason"]
    assert found.usage.completion_tokens == len(wanted["tokens"])
    assert sum(found.choices[0].logprobs.token_logprobs) == pytest.approx(wanted["logprob"], abs=1e-3)
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**body, stream=True)) == wanted["text"]
    assert client.completions.create(**body, echo=True).choices[0].text == "the model reads" + wanted["text"]

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the model"}]
    talk = {"model": "tiny", "messages": messages, "max_completion_tokens": 8, "temperature": 0.7, "seed": 4}
    answer = client.chat.completions.create(**talk, logprobs=True, top_logprobs=2, n=2)
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    stream = client.chat.completions.create(**talk, stream=True, stream_options={"include_usage": True})
    pieces = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in pieces if c.choices) == answer.choices[0].message.content
    assert pieces[-1].usage.prompt_tokens == answer.usage.prompt_tokens
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    assert client.chat.completions.create(**talk, tools=tools).usage.prompt_tokens > answer.usage.prompt_tokens
    for wrong, kind in (({"model": "x"}, openai.NotFoundError), ({"max_tokens": -1}, openai.BadRequestError)):
        with pytest.raises(kind):
            client.completions.create(**(body | wrong))


def test_lm_evaluation_harness_gets_our_own_scores(server, model, tmp_path, monkeypatch):
    """The same task by our own adapter of the harness, and over HTTP."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from llamajax.config.evaluate import EvaluateConfig
    from llamajax.config.parallel import MeshConfig
    from llamajax.evaluation import run as evaluation

    rows = [{"q": " ".join(runs.WORDS[n : n + 4]), "a": [" tokens", " a row of", " the"], "right": n % 3} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.yaml").write_text(f"""
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{a}}}}"
doc_to_target: right
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    figures = tmp_path / "figures.json"
    one = MeshConfig(num_cpu_devices=8)
    common = {"tasks": "words", "include_path": str(tmp_path), "log_samples": True, "json": str(figures), "mesh": one}
    evaluation.run(EvaluateConfig(model=str(model), **common))
    ours = json.loads(figures.read_text())
    arguments = {
        "model": "tiny", "base_url": f"{server.url}/v1/completions", "tokenizer": str(model), "tokenized_requests": True,
        "add_bos_token": True,
        "num_concurrent": 4, "max_length": 128,
    }  # fmt: skip
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    theirs = simple_evaluate("local-completions", model_args=arguments, tasks=["words"], task_manager=manager)
    assert theirs is not None
    theirs = dict[str, Any](theirs)
    by_us, by_http = (
        [[float(pair[0]) for pair in sample["filtered_resps"]] for sample in sorted(found, key=lambda s: s["doc_id"])]
        for found in (ours["samples"]["words"], theirs["samples"]["words"])
    )
    assert len(by_http) == 8
    for a, b in zip(by_us, by_http, strict=True):
        assert a == pytest.approx(b, abs=2e-3)
    assert theirs["results"]["words"]["acc,none"] == ours["results"]["words"]["acc,none"]


def stream(server, **body):
    """Starts a stream and returns its answer, of which the first event is there."""
    body = {"prompt": "the", "max_tokens": 2000, "stream": True, "ignore_eos": True} | body
    answer = urllib.request.urlopen(
        urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode()), timeout=60
    )
    assert answer.readline().startswith(b"data: ")
    return answer


def test_signals(model):
    """The first one lets an answer end and takes no new one, for as long as it may take; the second one ends at once."""
    with Process(model, "--drain_s", "30") as server, stream(server, max_tokens=400) as answer:
        server.process.send_signal(signal.SIGTERM)
        text = answer.read()
        assert text.endswith(b"data: [DONE]\n\n")
        assert text.count(b'"finish_reason":"length"') == 1
        server.end()
        assert any(line.startswith("draining   1 continuations") for line in server.lines)
        with pytest.raises(urllib.error.URLError):
            server.post("/v1/completions", prompt="a")
    with Process(model, "--drain_s", "1") as server, stream(server, max_tokens=4000) as answer:
        server.process.send_signal(signal.SIGTERM)
        server.end()
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    with Process(model) as server, stream(server, max_tokens=4000):
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        server.end(130)


def test_a_port_in_use_and_a_mesh_that_does_not_fit_are_one_line(server, model):
    port = server.url.rpartition(":")[2]
    for options, line, code in (
        (["--port", port], f"port: 127.0.0.1:{port}: Address already in use; choose another port or host", 2),
        (
            ["--port", "0", "--max_seq_len", "5000"],
            "max_seq_len: 5000 is more than the 4096 tokens",
            2,
        ),
    ):
        command = [sys.executable, "-m", "llamajax.serve", "--model", str(model), "--mesh.num_cpu_devices", "1", *options]
        env = os.environ | {"PYTHONPATH": str(runs.ROOT)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert line in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
