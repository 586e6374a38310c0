"""Chat data in three forms: the same conversations, however they are written; and every mistake one line with its place."""

import gzip
import json

import pytest
import zstandard

from llamajax.config.data import ChatFormat, DataConfig, SourceConfig
from llamajax.data import sources
from llamajax.data.conversations import Conversation
from llamajax.data.sources import Source
from llamajax.errors import ConfigError, DataError
from tests.data.chat_from_docs import write_chat_jsonl

ASKED = {"role": "user", "content": "Q"}
ANSWERED = {"role": "assistant", "content": "A"}


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


def messages(*turns, **others):
    return {"messages": list(turns)} | others


def sharegpt(*turns, **others):
    return {"conversations": [{"from": role, "value": value} for role, value in turns]} | others


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
    ("messages", messages(), "the assistant says nothing in this conversation, so there is nothing to learn; remove"),
    ("messages", messages(ASKED), "the assistant says nothing in this conversation"),
    ("messages", messages(ASKED, "A"), r"messages\[1\] must be an object, not str"),
    ("messages", messages(ASKED, None), r"messages\[1\] must be an object, not null"),
    ("messages", messages(ASKED, {"role": "assistant"}), r"messages\[1\] has no 'content', only 'role'"),
    ("messages", messages({"content": "Q"}, ANSWERED), r"messages\[0\] has no 'role', only 'content'"),
    ("messages", messages(ASKED, ANSWERED | {"content": None}), r"messages\[1\].content must be a string, not null"),
    ("messages", messages(ASKED, ANSWERED | {"content": 3}), r"messages\[1\].content must be a string, not int"),
    ("messages", messages(ASKED, ANSWERED | {"content": [{"type": "text"}]}), r"messages\[1\].content .*, not list"),
    ("messages", messages(ASKED, ANSWERED | {"role": 1}), r"messages\[1\].role must be a string, not int"),
    ("messages", messages(ASKED, ANSWERED | {"role": "gpt"}), r"role must be one of system, .*, tool, not 'gpt'"),
    ("messages", messages(ASKED, ANSWERED | {"role": "x\n" * 999}), r"role must be one of .*, not 'x\\nx"),
    ("messages", messages(ASKED | {"content": "\ud800"}, ANSWERED), r"messages\[0\].content has half a surrogate pair"),
    ("messages", messages(ASKED, ANSWERED | {"tool_calls": [{}]}), r"messages\[1\].tool_calls cannot be learnt; write it"),
    ("messages", messages(ASKED, ANSWERED | {"function_call": {"a": 1}}), r"messages\[1\].function_call cannot be learnt"),
    ("messages", messages(ASKED, ANSWERED | {"weight": 0.5}), r"messages\[1\].weight cannot be learnt"),
    ("messages", messages(ASKED, ANSWERED, tools=[{"name": "f"}]), "tools cannot be learnt; write it into the messages'"),
    ("sharegpt", messages(ASKED, ANSWERED), "has no 'conversations', only 'messages'"),
    ("sharegpt", {"conversations": [ASKED, ANSWERED]}, r"conversations\[0\] has no 'from', only 'role', 'content'"),
    ("sharegpt", sharegpt(("human", "Q")), "the assistant says nothing in this conversation"),
    ("sharegpt", sharegpt(("human", "Q"), ("bot", "A")), r"conversations\[1\].from must be one of system, human, .*'bot'"),
    ("sharegpt", sharegpt(("human", "Q"), ("gpt", None)), r"conversations\[1\].value must be a string, not null"),
    ("sharegpt", sharegpt(("human", "Q"), ("gpt", "A"), system=3), "system must be a string, not int"),
    ("sharegpt", sharegpt(("human", "Q"), ("gpt", "A"), tools="[{}]"), "tools cannot be learnt"),
    ("alpaca", {"instruction": "Q"}, "has no 'output', only 'instruction'"),
    ("alpaca", {"output": "A"}, "has no 'instruction', only 'output'"),
    ("alpaca", {"instruction": "Q", "output": None}, "output must be a string, not null"),
    ("alpaca", {"instruction": ["Q"], "output": "A"}, "instruction must be a string, not list"),
    ("alpaca", {"instruction": "Q", "input": 1, "output": "A"}, "input must be a string, not int"),
    ("alpaca", {"instruction": "Q", "output": "A", "history": [["q", "a"]]}, "history cannot be learnt"),
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
    monkeypatch.setattr(sources, "MAX_CONVERSATION_BYTES", 300)
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
            "text_key: body has no effect with kind=chat; set chat_format",
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
        ConfigError, match=r"^chat_template: has no effect without a source of kind=chat; add one, or remove"
    ):
        DataConfig(sources=(text,), seq_len=8, chat_template="t.jinja")
