"""A server over HTTP: texts equal `generate`'s whoever else asks, OpenAI's forms, limits, access, and clients that go."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from llamajax.data.chat import chat_template
from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.generation.completion import Completer, TextStream, _Row
from llamajax.generation.prompts import Prompt
from llamajax.generation.sampling import Sampling
from llamajax.serving import app
from llamajax.serving.answers import Limits
from tests.runs import WORDS
from tests.serving.served import MAX_SEQ_LEN, Running, make_served
from tests.tiny import single_device_mesh


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = make_served(tmp_path_factory.mktemp("served"))
    served.engine.compile()
    return served


@pytest.fixture(scope="module")
def running(served):
    with Running(served) as running:
        yield running


class Generate:
    """What `generate` writes: greedy texts, and samples with one seed, each by one compiled program for any prompts."""

    def __init__(self, served, temperature):
        self.served, self.mesh, self.temperature = served, single_device_mesh(), temperature
        with jax.set_mesh(self.mesh):
            settings = {"sampling": Sampling(temperature=temperature), "key": jax.random.key(3), "max_seq_len": MAX_SEQ_LEN}
            self.completer = Completer(served.engine._model, served.tokenizer, end_ids=(), **settings)
        self.known = {}

    def learn(self, prompts):
        """Writes 16 tokens after every prompt, two samples if they differ."""
        n = 2 if self.temperature else 1
        longest = [1] * 60  # then all calls have the sizes of the first
        rows = [*map(self.encode, prompts), longest, *[longest] * (-(len(prompts) + 1) * n % 8)]
        with jax.set_mesh(self.mesh):
            pieces = self.completer.complete(rows, max_tokens=16, num_samples=n, batch_size=8)
            done = {piece.row: piece.completion for piece in pieces if piece.completion}
        logprobs = [completion.logprob for _, completion in sorted(done.items())]
        for number, prompt in enumerate(prompts):
            self.known[str(prompt)] = [done[number * n + sample].tokens for sample in range(n)]
        return logprobs

    def encode(self, prompt):
        return self.served.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt

    def expect(self, prompt, max_tokens, stop=()):
        """Returns the completions of a prompt that was learned, as `generate` cuts them."""
        found = []
        for tokens in self.known[str(prompt)]:
            ids = self.encode(prompt)
            row = _Row(0, 0, ids, max_tokens, TextStream(self.served.tokenizer, ids, stop))
            pieces = (row.take(token, 0.0, self.served.end_ids) for token in tokens)
            found.append(next(piece.completion for piece in pieces if piece.completion))
        return found


@pytest.fixture(scope="module")
def greedy(served):
    return Generate(served, 0.0)


def mixed_requests(served, greedy, temperature):
    """64 requests of different lengths, with stop texts, common beginnings, several continuations, streams and tokens."""
    draw = random.Random(0)
    system = " ".join(draw.choices(WORDS, k=12))
    prompts = [" ".join(draw.choices(WORDS, k=draw.choice([0, 1, 3, 8, 14]))) for _ in range(64)]
    prompts = [f"{system} {prompt}" if number % 3 == 0 else prompt for number, prompt in enumerate(prompts)]
    prompts = [served.tokenizer.encode_prompt(p) if number % 7 == 3 else p for number, p in enumerate(prompts)]
    greedy.learn(prompts)
    for number, prompt in enumerate(prompts):
        body = {"prompt": prompt, "max_tokens": draw.choice([1, 2, 5, 9, 16]), "temperature": 0, "stream": number % 2 == 0}
        if number % 4 == 1:  # a text that is written, perhaps across tokens
            (found,) = greedy.expect(prompt, body["max_tokens"])
            middle = len(found.text) // 2
            body["stop"] = [found.text[middle : middle + 3] or "q", "never written"]
        if number % 5 == 2:
            body |= {"n": 2, "temperature": temperature, "seed": 3}
        yield body


def texts_of(running, body):
    """The texts and finish reasons of an answer, streamed or not."""
    if not body["stream"]:
        return [(c["text"], c["finish_reason"]) for c in running.post("/v1/completions", **body)["choices"]]
    texts, reasons = {}, {}
    for event in running.stream("/v1/completions", **body):
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in reasons
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    return [(texts[index], reasons[index]) for index in sorted(texts)]


@pytest.mark.parametrize(
    "temperature", [pytest.param(0.0, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.long)]
)
def test_64_mixed_requests_at_once_get_the_texts_of_generate(running, served, greedy, temperature):
    bodies = list(mixed_requests(served, greedy, temperature))
    drawn = Generate(served, temperature) if temperature else greedy
    if temperature:
        drawn.learn([body["prompt"] for body in bodies if body["temperature"]])
    before = served.engine.totals.shared_tokens
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda body: texts_of(running, body), bodies))
    assert served.engine.totals.shared_tokens > before + 200
    for body, answer in zip(bodies, answers, strict=True):
        source = drawn if body["temperature"] else greedy
        wanted = source.expect(body["prompt"], body["max_tokens"], tuple(body.get("stop", ())))
        assert answer == [(found.text, found.finish_reason) for found in wanted * (body.get("n", 1) // len(wanted))], body
    reasons = [reason for answer in answers for _, reason in answer]
    assert min(reasons.count("stop"), reasons.count("length")) > 10


def test_log_probabilities_are_those_of_generate(running, greedy):
    prompt = "the model reads"
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    found = running.post("/v1/completions", **body)
    (choice,), wanted = found["choices"], greedy.learn([prompt])[0]
    logprobs = choice["logprobs"]
    assert sum(logprobs["token_logprobs"]) == pytest.approx(wanted, abs=1e-4)
    names = logprobs["tokens"]
    whole = [n for n in range(1, 16) if not any(name.startswith("token_id:") for name in names[n - 1 : n + 1])]
    assert len(whole) > 3
    assert all(choice["text"][logprobs["text_offset"][n] :].startswith(names[n]) for n in whole)
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert len(top) == 3
        assert chosen == max(top.values())
    assert found["usage"] == {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20}
    streamed = [event["choices"][0]["logprobs"] for event in running.stream("/v1/completions", **body)]
    for key, values in logprobs.items():
        assert [value for each in streamed for value in each[key]] == values
    stopped = running.post("/v1/completions", **body, stop=choice["text"][2:5])["choices"][0]
    assert stopped["text"] == choice["text"][:2]
    assert all(at < 2 for at in stopped["logprobs"]["text_offset"])


def test_a_prompt_is_scored_as_its_continuation_was(running):
    """Echo: what lm-evaluation-harness asks for. The prompt takes several parts."""
    prompt = " ".join(WORDS * 3)[:150]
    first = running.post("/v1/completions", prompt=prompt, max_tokens=12, temperature=0, logprobs=1)["choices"][0][
        "logprobs"
    ]
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1, "echo": True}
    whole = running.post("/v1/completions", **body)["choices"][0]
    assert whole["text"].startswith(prompt)
    tokens = whole["logprobs"]["tokens"]
    assert len(tokens) > 32 + 12
    assert whole["logprobs"]["token_logprobs"][0] is None
    assert tokens[-12:] == first["tokens"]
    # The continuation, scored as a prompt
    ids = [1, *range(5, 60), 7]
    alone = running.post("/v1/completions", prompt=ids[:-1], max_tokens=1, temperature=0, logprobs=5)["choices"][0]
    scored = running.post("/v1/completions", prompt=ids, max_tokens=0, logprobs=5, echo=True)["choices"][0]
    assert scored["finish_reason"] == "length"
    assert len(scored["logprobs"]["tokens"]) == len(ids)
    best = max(scored["logprobs"]["top_logprobs"][-1].values())
    assert best == pytest.approx(alone["logprobs"]["token_logprobs"][0], abs=1e-5)
    assert scored["logprobs"]["token_logprobs"][-1] <= best
    events = running.stream("/v1/completions", **body)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    assert [token for event in events for token in event["choices"][0]["logprobs"]["tokens"]] == tokens


def test_prompts_in_a_list_samples_and_the_best_of_them(running):
    body = {"prompt": ["the model", "a row"], "max_tokens": 5, "temperature": 1.0, "seed": 1, "logprobs": 0}
    all_four = running.post("/v1/completions", **body, n=4)["choices"]
    assert [choice["index"] for choice in all_four] == list(range(8))
    assert len({choice["text"] for choice in all_four}) > 5
    best = running.post("/v1/completions", **body, n=1, best_of=4)["choices"]
    for prompt, choice in enumerate(best):
        several = all_four[4 * prompt : 4 * prompt + 4]
        means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]) for c in several]
        assert choice["text"] == several[means.index(max(means))]["text"]
    assert all_four[0]["logprobs"]["top_logprobs"][0] == {}


def test_a_conversation_is_answered_as_generate_answers_it(running, served, greedy):
    messages = [
        {"role": "system", "content": "the model"},
        {"role": "user", "content": [{"type": "text", "text": "which "}, {"type": "text", "text": "one"}]},
    ]
    talk = ({"role": "system", "content": "the model"}, {"role": "user", "content": "which \none"})
    ids = Prompt("", talk).encode(served.tokenizer, served.template)
    greedy.learn([ids])
    (wanted,) = greedy.expect(ids, 8)
    body = {"messages": messages, "max_completion_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    answer = running.post("/v1/chat/completions", **body)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.text}
    assert choice["finish_reason"] == wanted.finish_reason
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2] * len(wanted.tokens)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    events = running.stream("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["delta"].get("content", "") for event in events for c in event["choices"]) == wanted.text
    assert events[-1]["usage"] == answer["usage"]
    assert events[-1]["choices"] == []


def test_calls_of_tools_are_found_whole_and_in_streams(running, monkeypatch):
    """The tiny model calls nothing, so its text is put into its mouth."""
    said = 'Well <tool_call>\n{"name": "find", "arguments": {"x": 1}}\n</tool_call>'

    def push(self, token):
        self.place = getattr(self, "place", -1) + 1
        return said[self.place * 9 : self.place * 9 + 9]

    monkeypatch.setattr(TextStream, "push", push)
    monkeypatch.setattr(TextStream, "finish", lambda self: "")
    tools = [{"type": "function", "function": {"name": "find"}}]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    choice = running.post("/v1/chat/completions", **body, tools=tools)["choices"][0]
    assert choice["message"]["content"] == "Well"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "find", "arguments": '{"x": 1}'}
    assert choice["finish_reason"] == "length"
    deltas = [event["choices"][0]["delta"] for event in running.stream("/v1/chat/completions", **body, tools=tools)]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well"
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", [])] == ["find"]
    for changes in ({}, {"tools": tools, "tool_choice": "none"}):
        message = running.post("/v1/chat/completions", **body, **changes)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": said[:81]}


SAID = {"role": "user", "content": "a"}
REFUSED = [
    ("/v1/completions", b"{", 400, "is not JSON"),
    ("/v1/completions", b"[" * 5000, 400, "is not JSON"),
    ("/v1/completions", [], 400, "must be a JSON object"),
    ("/v1/completions", {"max_tokens": 1}, 400, "prompt: is required"),
    ("/v1/completions", {"prompt": "a", "temprature": 1}, 400, "did you mean temperature?"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens: -1 must be an integer"),
    ("/v1/completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens: true must be an integer"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 65}, 400, "exceeds the server's 64"),
    ("/v1/completions", {"prompt": "a " * 60, "max_tokens": 50}, 400, "exceed the 96"),
    ("/v1/completions", {"prompt": [1] * 96}, 400, "exceed the 96"),
    ("/v1/completions", {"prompt": [1, 325]}, 400, "prompt: 325 must be an id from 0 to 324"),
    ("/v1/completions", {"prompt": [[1], [-1]]}, 400, "prompt[1]: -1 must be an id"),
    ("/v1/completions", {"prompt": {"a": 1}}, 400, "prompt: "),
    ("/v1/completions", {"prompt": []}, 400, "prompt: "),
    ("/v1/completions", {"prompt": ["a"] * 200}, 400, "too many"),
    ("/v1/completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "is not supported, except as 0"),
    ("/v1/completions", {"prompt": "a", "best_of": 2, "stream": True}, 400, "best_of: "),
    ("/v1/completions", {"prompt": "a", "best_of": 1, "n": 2}, 400, "best_of: 1 must be at least n=2"),
    ("/v1/completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options: "),
    ("/v1/completions", {"prompt": "a", "stop": [""]}, 400, "stop: "),
    ("/v1/completions", {"prompt": "a", "model": "gpt-4"}, 404, "the model gpt-4 does not exist; /v1/models lists tiny"),
    ("/v1/completions", b" " * 20_001, 413, "more than 20,000 bytes"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages: "),
    ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "a"}]}, 400, "messages[0].role must be one of"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0]"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "top_logprobs: "),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"},
        400,
        "tool_choice",
    ),
    ("/v1/nothing", {}, 404, "Not Found"),
    ("/health", {}, 405, "Method Not Allowed"),
]


@pytest.mark.parametrize(("path", "body", "status", "complaint"), REFUSED, ids=lambda value: None)
def test_what_is_refused_says_why_in_the_form_of_openai(running, path, body, status, complaint):
    got, answer, _ = running.ask(path, body)
    assert (got, complaint in answer["error"]["message"]) == (status, True), answer
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert "\n" not in answer["error"]["message"]


def test_a_client_that_goes_frees_its_slot(running, served):
    body = json.dumps({"prompt": "the", "max_tokens": 64, "n": 30, "stream": True, "ignore_eos": True}).encode()
    with running.connect() as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    running.wait_until_idle()
    written = served.engine.totals.new_tokens
    with running.connect() as connection:  # not a stream: nothing is sent before the end
        body = body.replace(b'"stream": true', b'"stream": false')
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while served.engine.totals.new_tokens < written + 10:
            time.sleep(0.001)
    running.wait_until_idle()
    assert served.engine.totals.new_tokens < written + 30 * 64
    assert running.lines[-1].startswith("request    POST /v1/completions 499: ")
    assert running.post("/v1/completions", prompt="the", max_tokens=1)["choices"]


def test_models_health_and_metrics(running):
    (model,) = running.ask("/v1/models")[1]["data"]
    assert (model["id"], model["object"], model["max_model_len"], model["has_chat"]) == ("tiny", "model", 96, True)
    assert running.ask("/v1/models/tiny")[1] == model
    assert running.ask("/v1/models/other")[0] == 404
    assert running.ask("/health")[:2] == (200, {"status": "ok"})
    running.post("/v1/completions", prompt="the", max_tokens=2, ignore_eos=True)
    text = running.ask("/metrics")[1]
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['llamajax_new_tokens_total{model="tiny"}']) >= 2
    assert float(values['llamajax_requests_total{path="/v1/completions",status="200"}']) >= 1
    assert float(values["llamajax_request_seconds_count"]) >= 1
    assert float(values['llamajax_slots{model="tiny"}']) == 4
    line = running.lines[-1]
    assert line.startswith("request    POST /v1/completions 200: ")
    assert "+ 2 tokens in" in line


def test_pages_of_other_sites_and_other_names_are_refused(running):
    for headers, status in (
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Origin": running.url}, 200),
        ({"Host": "localhost:1"}, 200),
    ):
        assert running.ask("/v1/models", headers=headers)[0] == status
    status, page, headers = running.ask("/")
    assert status == 200
    assert "<script>" in page
    assert "default-src 'none'" in headers["content-security-policy"]
    assert not [link for link in ("http://", "https://", "//cdn") if link in page]


def test_a_token_is_needed_where_one_is_set(served):
    with Running(served, token="secret") as running:
        for value in (None, "Bearer wrong", "Basic secret", "secret", "Bearer ", "Bearer s\u00e9cret"):
            headers = {} if value is None else {"Authorization": value}
            for path in ("/v1/models", "/metrics", "/v1/completions"):
                status, answer, _ = running.ask(path, b"{}" if path == "/v1/completions" else None, headers)
                assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert running.ask("/v1/models", headers={"Authorization": "Bearer secret", "Host": "any.name"})[0] == 200
        assert running.ask("/")[0] == running.ask("/health")[0] == 200
        assert "secret" not in "".join(running.lines)


def test_a_full_queue_and_a_slow_answer_end_with_their_status(served):
    limits = Limits(max_body_bytes=1000, max_tokens=None, max_queue=2, max_time_s=0.3)
    with Running(served, limits=limits) as running:
        status, answer, _ = running.ask("/v1/completions", {"prompt": "a", "n": 7})
        assert (status, "at most 6 may wait" in answer["error"]["message"]) == (400, True)
        step = served.engine.step
        served.engine.step = lambda: time.sleep(0.02)
        try:
            slow = threading.Thread(target=lambda: found.append(running.ask("/v1/completions", {"prompt": "a", "n": 5})))
            found: list = []
            slow.start()
            while not served.num_open:
                time.sleep(0.001)
            status, answer, headers = running.ask("/v1/completions", {"prompt": "a", "n": 2})
            assert (status, answer["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "1")
            slow.join()
            assert (found[0][0], found[0][1]["error"]["code"]) == (504, "timeout")
            status, text, _ = running.ask("/v1/completions", {"prompt": "a", "stream": True})
            assert status == 200
            assert json.loads(text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        finally:
            del served.engine.step
            assert step
        running.wait_until_idle()
        assert running.post("/v1/completions", prompt="a", max_tokens=1)["choices"]


def test_an_engine_that_fails_says_so_to_all(served, monkeypatch):
    with Running(served) as running:
        monkeypatch.setattr(served.engine, "_admit", lambda: 1 / 0)
        status, answer, _ = running.ask("/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["code"]) == (503, "engine_failed")
        assert running.ask("/health")[0] == 503
        assert isinstance(running.server.worker.failure, ZeroDivisionError)
        assert running.ask("/v1/completions", {"prompt": "a"})[0] == 503
    served.engine.waiting.clear()
    served.num_open = 0


def test_a_server_that_drains_finishes_what_it_has(served):
    with Running(served) as running, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "the", "max_tokens": 60, "ignore_eos": True}
        answer = pool.submit(running.ask, "/v1/completions", body)
        while not served.num_open:
            time.sleep(0.001)
        running.server.is_draining = True
        assert running.ask("/health")[0] == 503
        status, refused, _ = running.ask("/v1/completions", body)
        assert (status, refused["error"]["code"]) == (503, "draining")
        running._http.should_exit = True
        status, found, _ = answer.result()
        assert (status, found["usage"]["completion_tokens"]) == (200, 60)


def test_a_body_that_does_not_come_is_not_waited_for(running, monkeypatch):
    monkeypatch.setattr(app, "BODY_S", 0.2)
    with running.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_a_conversation_that_exceeds_the_limits_of_the_template_hinders_no_other(tmp_path, monkeypatch):
    """Its process is killed, and another one started. And of two models each answers under its name."""
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 1)
    hostile = "{% for m in messages %}{{ 'a' * m.size if m.size }}{{ m.content }}{% endfor %}"
    models = [make_served(tmp_path / name, name) for name in ("one", "two")]
    models[0].template = ChatTemplate(hostile, models[0].tokenizer, "a test")
    with Running(*models) as running:
        body = {"messages": [SAID | {"size": 2**31}], "max_tokens": 1}
        status, answer, _ = running.ask("/v1/chat/completions", body)
        assert (status, "chat template" in answer["error"]["message"]) == (400, True)
        body = {"messages": [SAID], "max_tokens": 1}
        for name in ("one", "two"):
            assert running.post("/v1/chat/completions", **body, model=name)["model"] == name
        assert running.post("/v1/chat/completions", **body)["model"] == "one"
        assert [model["id"] for model in running.ask("/v1/models")[1]["data"]] == ["one", "two"]
