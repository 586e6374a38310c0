"""Chat data in three forms: the same conversations, however they are written; and every mistake one line with its place."""

import gzip
import json
from typing import Any

import pytest
import zstandard

from llamajax.config.conversations import ChatForm, ChatFormat
from llamajax.config.data import DataConfig, SourceConfig
from llamajax.data.documents.conversations import Conversation
from llamajax.data.documents.conversations import conversation_of as conversation_in
from llamajax.data.documents.record_formats import Chat
from llamajax.data.documents.sources import Source
from llamajax.errors import ConfigError, DataError
from tests.data.chat.chat_from_docs import write_chat_jsonl

ASKED = {"role": "user", "content": "Q"}
ANSWERED = {"role": "assistant", "content": "A"}
TEXT = {"type": "text", "text": "A"}
CALLING = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}


def conversation_of(record, chat_format: ChatFormat = "messages", **names) -> Conversation:
    return conversation_in(record, ChatForm(chat_format=chat_format, **names))


def messages(*turns, **others):
    return {"messages": list(turns)} | others


def sharegpt(*turns, **others):
    return {"conversations": [{"from": role, "value": value} for role, value in turns]} | others


def documents(path, chat_format: ChatFormat = "messages"):
    source = Source(SourceConfig(kind="chat", paths=(str(path),), chat_format=chat_format), "data.sources[0]")
    return list(source.documents(source.files()))


def conversations(path, chat_format: ChatFormat = "messages") -> list[Conversation]:
    return [document.conversation for document in documents(path, chat_format) if document.conversation]


def read(path, chat_format: ChatFormat = "messages"):
    return [conversation.messages for conversation in conversations(path, chat_format)]


@pytest.mark.parametrize("chat_format", ["messages", "sharegpt", "alpaca"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_conversations_come_back(tmp_path, chat_format, suffix):
    path = tmp_path / f"chat.jsonl{suffix}"
    written = write_chat_jsonl(path, 30, chat_format)
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path.write_bytes(compress(path.read_bytes()))
    assert read(path, chat_format) == written
    places = [conversation.where for conversation in conversations(path, chat_format)]
    assert list(map(str, places)) == [f"{path}:{line}" for line in range(1, 31)]


def test_fields_as_the_formats_have_them(tmp_path):
    path = tmp_path / "chat.jsonl"

    def one(record, chat_format):
        path.write_text(json.dumps(record) + "\n\n")
        (messages,) = read(path, chat_format)
        return [(message["role"], message["content"]) for message in messages]

    talk = [("user", "Q"), ("assistant", "A")]
    sharegpt = {"id": "x", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A", "weight": None}]}
    assert one(sharegpt, "sharegpt") == talk
    assert one(sharegpt | {"system": "S"}, "sharegpt") == [("system", "S"), *talk]
    assert one(sharegpt | {"system": "", "tools": []}, "sharegpt") == talk
    roles = ["system", "user", "chatgpt", "tool", "observation", "assistant"]
    mapped = ["system", "user", "assistant", "tool", "tool", "assistant"]
    record = {"conversations": [{"from": role, "value": role} for role in roles]}
    assert one(record, "sharegpt") == list(zip(mapped, roles, strict=True))
    alpaca = {"instruction": "Q", "output": "A"}
    assert one(alpaca, "alpaca") == talk
    assert one(alpaca | {"input": "", "text": "ignored"}, "alpaca") == talk
    assert one(alpaca | {"input": "I", "system": "S"}, "alpaca") == [("system", "S"), ("user", "Q\n\nI"), ("assistant", "A")]
    roles = [("developer", "S"), ("user", "Q"), ("tool", "T"), ("assistant", "A")]
    record = {"messages": [{"role": role, "content": content, "name": "n"} for role, content in roles]}
    assert one(record, "messages") == [("system", "S"), *roles[1:]]


def test_what_is_not_answered_is_empty(tmp_path):
    path = tmp_path / "chat.jsonl"
    records = [{"instruction": "Q", "output": output} for output in ("A", "", " \n")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [document.text for document in documents(path, "alpaca")] == ["Q\nA", "", ""]
    records = [messages(ASKED, ANSWERED | marks) for marks in ({}, {"train": False}, {"content": None} | CALLING)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [document.text for document in documents(path)] == ["Q\nA", "", f"Q\n{json.dumps(CALLING['tool_calls'])}"]


def said(record, chat_format: ChatFormat = "messages"):
    found = conversation_of(record, chat_format)
    return [(message["role"], message.get("content")) for message in found.messages]


def test_turns_may_have_the_keys_of_the_other_format():
    talk = [("user", "Q"), ("assistant", "A")]
    assert said({"conversations": [ASKED, ANSWERED]}, "sharegpt") == talk
    assert said({"messages": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}) == talk
    nothing = {"from": None, "value": None, "weight": None}
    assert said({"conversations": [ASKED | nothing, ANSWERED | nothing]}, "sharegpt") == talk
    assert said({"conversations": [{"role": "human", "value": "Q"}, {"role": "gpt", "value": "A"}]}, "sharegpt") == talk


@pytest.mark.parametrize(
    ("record", "chat_format"),
    [
        (messages(ASKED, ANSWERED), "messages"),
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, "sharegpt"),
        ({"instruction": "Q", "output": "A"}, "alpaca"),
        ({"prompt": "Q", "completion": "A"}, "prompt_completion"),
    ],
)
def test_the_system_of_the_record_comes_first(record, chat_format):
    assert said(record | {"system": "S"}, chat_format) == [("system", "S"), ("user", "Q"), ("assistant", "A")]


def test_a_system_that_is_said_twice_is_one():
    assert said(messages({"role": "system", "content": "S"}, ANSWERED, system="S")) == [("system", "S"), ("assistant", "A")]


def test_history_of_alpaca_is_learnt():
    record = {"instruction": "Q", "input": "I", "output": "A", "history": [["q", "a"], ["r", "b"]]}
    asked = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b"), ("user", "Q\n\nI"), ("assistant", "A")]
    assert said(record, "alpaca") == asked
    assert conversation_of(record, "alpaca").is_learnt == [False, True] * 3


def test_of_prompt_and_completion_the_completion_is_learnt():
    record = {"prompt": "Q", "completion": "A"}
    assert said(record, "prompt_completion") == [("user", "Q"), ("assistant", "A")]
    assert conversation_of(record, "prompt_completion").is_learnt == [False, True]
    talks: dict[str, list[Any]] = {"prompt": [ASKED, ANSWERED, ASKED], "completion": [ANSWERED]}
    assert said(talks, "prompt_completion") == [("user", "Q"), ("assistant", "A")] * 2
    assert conversation_of(talks, "prompt_completion").is_learnt == [False, False, False, True]
    talks["prompt"][1] = ANSWERED | {"train": True}
    assert conversation_of(talks, "prompt_completion").is_learnt == [False, True, False, True]


def test_parts_calls_and_thoughts_stay():
    result = {"role": "tool", "tool_call_id": "a", "content": "4"}
    parts = {"role": "user", "content": [TEXT, TEXT | {"text": "B"}]}
    thinking = {"reasoning_content": "R", "thinking": "R"}
    calling: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None} | CALLING
    record = messages(parts, calling, result, ANSWERED | {"reasoning": "R"}, tools=[{"name": "f"}])
    read = conversation_of(record, "messages")
    assert read.messages == [parts, {"role": "assistant"} | CALLING, result, ANSWERED | thinking | {"reasoning": "R"}]
    assert read.is_learnt == [False, True, False, True]
    assert read.variables == {"tools": [{"name": "f"}]}
    assert read.text == f"A\nB\n{json.dumps(CALLING['tool_calls'])}\n4\nR\nA"


def test_an_empty_thought_beside_another_name_for_it_says_nothing():
    for thought, expected in (({"reasoning": "", "reasoning_content": "R"}, "R"), ({"reasoning": ""}, "")):
        (_, answer) = conversation_of(messages(ASKED, ANSWERED | thought), "messages").messages
        assert (answer["reasoning_content"], answer["thinking"]) == (expected, expected)


def test_calls_as_they_were_written_before():
    function = {"name": "f", "arguments": "{}"}
    result = {"role": "function", "name": "f", "content": "4"}
    record = messages(ASKED, {"role": "assistant", "content": None, "function_call": function}, result, ANSWERED)
    read = conversation_of(record | {"functions": [{"name": "f"}]}, "messages")
    assert read.messages[1:3] == [{"role": "assistant"} | CALLING, result | {"role": "tool"}]
    assert read.variables == {"tools": [{"type": "function", "function": {"name": "f"}}]}


def test_tools_may_be_json():
    talk = sharegpt(("human", "Q"), ("function_call", "{}"), ("observation", "4"), ("gpt", "A"))
    read = conversation_of(talk | {"tools": '[{"name": "f"}]', "chat_template_kwargs": {"a": 1}}, "sharegpt")
    assert [message["role"] for message in read.messages] == ["user", "function_call", "tool", "assistant"]
    assert read.is_learnt == [False, True, False, True]
    assert read.variables == {"tools": [{"name": "f"}], "a": 1}
    for none in ("[]", "", [], None):
        assert conversation_of(talk | {"tools": none}, "sharegpt").variables == {}


BAD = [
    ("messages", b"{", "is not JSON: .* at column 2; correct or remove the line"),
    ("messages", b"[]", "must be a JSON object, not list"),
    ("messages", b"null", "must be a JSON object, not NoneType"),
    ("messages", b"\xff", "is not UTF-8"),
    ("messages", b'{"messages": ' + b"[" * 10**5, "is nested too deeply"),
    ("messages", b'{"messages": [NaN]}', r"messages\[0\] must be an object, not float"),
    ("messages", {}, "has no 'messages', only nothing; correct the line, or set another chat_format"),
    ("messages", sharegpt(("human", "Q"), ("gpt", "A")), "has no 'messages', only 'conversations'; .* another chat_format"),
    ("messages", {"messages": None}, "'messages' must be a list, not null"),
    ("messages", {"messages": "Q"}, "'messages' must be a list, not str"),
    ("messages", {"messages": {"role": "user"}}, "'messages' must be a list, not dict"),
    ("messages", messages(), "the assistant says nothing in this conversation, so there is nothing to train on; remove"),
    ("messages", messages(ASKED), "the assistant says nothing in this conversation"),
    ("messages", messages(ASKED, "A"), r"messages\[1\] must be an object, not str"),
    ("messages", messages(ASKED, None), r"messages\[1\] must be an object, not null"),
    ("messages", messages(ASKED, {"role": "assistant"}), r"messages\[1\] has no 'content', only 'role'"),
    ("messages", messages({"content": "Q"}, ANSWERED), r"messages\[0\] has no 'role', only 'content'"),
    ("messages", messages(ASKED, ANSWERED | {"content": None}), r"messages\[1\].content must be a string, not null"),
    ("messages", messages(ASKED, ANSWERED | {"content": 3}), r"messages\[1\].content must be a string, not int"),
    ("messages", messages(ASKED, ANSWERED | {"content": [{"type": "text"}]}), r"content\[0\] must be {\"type\": .*\"}, not"),
    ("messages", messages(ASKED, ANSWERED | {"content": ["A"]}), r"content\[0\] must be {.*, not 'str'"),
    (
        "messages",
        messages(ASKED, ANSWERED | {"content": [{"type": "image_url"}]}),
        r"content\[0\] .*, not 'image_url'; remove",
    ),
    ("messages", messages(ASKED, ANSWERED | {"content": [TEXT | {"text": "\ud800"}]}), r"content\[0\] has half a surrogate"),
    (
        "messages",
        messages(ASKED, ANSWERED | {"content": [TEXT | {"train": False}]}),
        r"content\[0\] is marked, .* the message",
    ),
    ("messages", messages(ASKED, ANSWERED | {"role": 1}), r"messages\[1\].role must be a string, not int"),
    ("messages", messages(ASKED, ANSWERED | {"role": "bot"}), r"role must be one of system, .*, tool, .*, not 'bot'"),
    ("messages", messages(ASKED, ANSWERED | {"role": "x\n" * 999}), r"role must be one of .*, not 'x\\nx"),
    ("messages", messages(ASKED | {"content": "\ud800"}, ANSWERED), r"messages\[0\].content has half a surrogate pair"),
    ("messages", messages(ASKED, ANSWERED | {"tool_calls": [{}]}), r"tool_calls\[0\] must have a function with a name"),
    ("messages", messages(ASKED, ANSWERED | {"tool_calls": {"a": 1}}), r"messages\[1\].tool_calls must be a list, not dict"),
    (
        "messages",
        messages(ASKED, ANSWERED | {"function_call": {"a": 1}}),
        r"\]\.function_call must be an object with a name",
    ),
    ("messages", messages(ASKED, ANSWERED | CALLING | {"function_call": {"name": "f"}}), "function_call and tool_calls"),
    (
        "messages",
        messages(ASKED, ANSWERED | {"tool_calls": [{"name": "\ud800"}]}),
        r"messages\[1\] has half a surrogate pair",
    ),
    ("messages", messages(ASKED, ANSWERED | {"reasoning_content": 3}), "reasoning_content must be a string, not int"),
    ("messages", messages(ASKED, ANSWERED | {"reasoning": "a", "thinking": "b"}), "thinking and reasoning differ; keep one"),
    ("messages", messages(ASKED, ANSWERED, tools="[{]"), "tools is not JSON; correct the line"),
    ("messages", messages(ASKED, ANSWERED, tools={"name": "f"}), "tools must be a list of objects"),
    ("messages", messages(ASKED, ANSWERED, tools=["f"]), "tools must be a list of objects"),
    ("messages", messages(ASKED, ANSWERED, tools=[{"name": "f"}], functions=[{"name": "f"}]), "functions and tools are"),
    ("messages", messages(ASKED, ANSWERED, chat_template_kwargs=3), "chat_template_kwargs must be an object, not int"),
    ("messages", messages(ASKED, ANSWERED, chat_template_kwargs={"tools": []}), "chat_template_kwargs must not have tools"),
    ("messages", messages(ASKED, ANSWERED, images=["a.png"]), "images cannot be trained on; write it into the messages'"),
    ("messages", messages(ASKED, ANSWERED, history=[["q", "a"]]), "history cannot be trained on"),
    (
        "messages",
        messages({"role": "system", "content": "S"}, ANSWERED, system="T"),
        "system and the first message, a system message too, differ",
    ),
    ("sharegpt", messages(ASKED, ANSWERED), "has no 'conversations', only 'messages'"),
    (
        "sharegpt",
        {"conversations": [ASKED | {"value": "R"}]},
        r"conversations\[0\] has both 'value' and 'content'; keep one",
    ),
    ("sharegpt", {"conversations": [{"value": "Q"}]}, r"conversations\[0\] has no 'from', only 'value'"),
    ("sharegpt", sharegpt(("human", "Q")), "the assistant says nothing in this conversation"),
    (
        "sharegpt",
        sharegpt(("human", "Q"), ("bot", "A")),
        r"conversations\[1\].from must be one of system, .*'bot'",
    ),
    ("sharegpt", sharegpt(("human", "Q"), ("gpt", None)), r"conversations\[1\].value must be a string, not null"),
    ("sharegpt", sharegpt(("human", "Q"), ("gpt", "A"), system=3), "system must be a string, not int"),
    ("prompt_completion", {"prompt": "Q"}, "has no 'completion', only 'prompt'"),
    ("prompt_completion", {"prompt": "Q", "completion": 3}, "completion must be a string, not int"),
    ("alpaca", {"instruction": "Q"}, "has no 'output', only 'instruction'"),
    ("alpaca", {"output": "A"}, "has no 'instruction', only 'output'"),
    ("alpaca", {"instruction": "Q", "output": None}, "output must be a string, not null"),
    ("alpaca", {"instruction": ["Q"], "output": "A"}, "instruction must be a string, not list"),
    ("alpaca", {"instruction": "Q", "input": 1, "output": "A"}, "input must be a string, not int"),
    ("alpaca", {"instruction": "Q", "output": "A", "history": [["q"]]}, r"history\[0\] must be \[question, answer\]"),
    ("alpaca", {"instruction": "Q", "output": "A", "history": "q"}, "history must be a list of .*, not str"),
    ("alpaca", messages(ASKED, ANSWERED), "has no 'instruction', only 'messages'"),
]


@pytest.mark.parametrize(("chat_format", "line", "message"), BAD, ids=range(len(BAD)))
def test_bad_lines_are_named(tmp_path, chat_format, line, message):
    path = tmp_path / "chat.jsonl"
    write_chat_jsonl(path, 2, chat_format)
    with path.open("ab") as file:
        file.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        documents(path, chat_format)
    text = str(caught.value)
    assert text.startswith(f"{path}:3: data.sources[0].")
    assert "; " in text
    assert len(text.splitlines()) == 1
    assert len(text) < 500


def test_a_conversation_has_a_longest_length(tmp_path, monkeypatch):
    monkeypatch.setattr(Chat, "max_line_bytes", 300)
    path = tmp_path / "chat.jsonl"
    path.write_text(
        json.dumps(messages(ASKED, ANSWERED)) + "\n" + json.dumps(messages(ASKED, ANSWERED | {"content": "x" * 300}))
    )
    with pytest.raises(DataError, match=r"chat.jsonl:2: .*a line may have at most 300 bytes; split the document"):
        documents(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "chat"}, "paths: kind=chat needs them"),
        (
            {"kind": "chat", "paths": ("a",), "text_key": "body"},
            "text_key: body has no effect with kind=chat; set fields, or",
        ),
        ({"kind": "jsonl", "paths": ("a",), "chat_format": "alpaca"}, "chat_format: alpaca has no effect with kind=jsonl"),
    ],
)
def test_rules_of_a_source(fields, message):
    with pytest.raises(ConfigError, match=message):
        SourceConfig(**fields)


def test_a_template_needs_conversations():
    chat, text = SourceConfig(kind="chat", paths=("a",)), SourceConfig(kind="text", paths=("a",))
    assert DataConfig(sources=(text, chat), seq_len=8, chat_template="t.jinja").chat_template == "t.jinja"
    with pytest.raises(
        ConfigError,
        match=r"^chat_template: has no effect without a source of kind=chat, preference or prompt; add one, or remove",
    ):
        DataConfig(sources=(text,), seq_len=8, chat_template="t.jinja")
