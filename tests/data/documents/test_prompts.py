"""Prompts are read from the forms of public data sets with their whole records, and refused in one line otherwise."""

import datetime
import decimal
import json
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from llamajax.config.conversations import ChatForm, FieldNames, RoleNames
from llamajax.config.data import SourceConfig
from llamajax.data.documents.prompts import PromptRecord, prompt_of
from llamajax.data.documents.sources import Source
from llamajax.data.documents.split import split_hash
from llamajax.errors import DataError
from tests.data.documents.preference_records import answer, user

ASKED, ANSWER = "Natalia sold 48 clips in April, and half as many in May. How many?", "48 / 2 = 24\n#### 72"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
MESSAGES: dict[str, dict[str, Any]] = {
    "trl, messages": {"prompt": [user(ASKED)], "answer": ANSWER},
    "openai": {"messages": [user(ASKED)], "solution": ANSWER},
    "sharegpt": {"conversations": [{"from": "human", "value": ASKED}], "reward_model": {"ground_truth": "72"}},
    "alpaca": {"instruction": ASKED, "input": "", "output": ANSWER},
    "a JSON text, as in tables": {"messages": json.dumps([user(ASKED)]), "answer": 72},
    "verl": {"data_source": "gsm8k", "prompt": [user(ASKED)], "extra_info": {"index": 0}, "reward_model": {"style": "rule"}},
}


def read(record: dict[str, Any], **form) -> PromptRecord:
    return prompt_of(record, ChatForm(**form), "a.jsonl:1")


@pytest.mark.parametrize("record", MESSAGES.values(), ids=MESSAGES)
def test_every_form_is_one_question_and_its_whole_record(record):
    found = read(record)
    assert found.conversation is not None
    assert found.conversation.messages == [user(ASKED)]
    assert found.text == ASKED
    assert json.loads(found.record) == record


def test_a_text_is_continued_as_it_is():
    record = {"prompt": " Human: Hi\n\nAssistant:", "messages": [user("q"), answer("a")], "é": "ü"}
    found = read(record)
    assert found == (record["prompt"], None, json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode())


def test_what_is_beside_messages_is_read():
    turns = [user("Hi"), answer("Hello."), user("2 + 2?"), answer("I add."), {"role": "tool", "content": "4"}]
    record = {"prompt": turns, "system": "Be brief.", "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    conversation = read(record).conversation
    assert conversation is not None
    assert [message["role"] for message in conversation.messages] == ["system", *(turn["role"] for turn in turns)]
    assert conversation.variables == {"tools": TOOLS, "enable_thinking": False}
    assert read(record).text == "Be brief.\nHi\nHello.\n2 + 2?\nI add.\n4"
    conversation = read({"instruction": "Add.", "input": "2 + 2", "history": [["q", "a"]]}).conversation
    assert conversation is not None
    assert conversation.messages == [user("q"), answer("a"), user("Add.\n\n2 + 2")]


def test_fields_of_rewards_are_no_marks():
    """A label may be the correct answer, and a weight that of the reward."""
    record = {"prompt": "q", "label": False, "weight": 0.5, "mask": 7, "train": 0, "completion": "a", "chosen": None}
    assert json.loads(read(record).record) == record


def test_names_of_fields_and_roles():
    record = {"prompt": "another", "ask": {"turns": [{"who": "customer", "what": "q"}]}, "system": "no", "tools": "none"}
    fields = FieldNames(messages="ask.turns", role="who", content="what", system="first", tools="can")
    found = read(record, fields=fields, roles=RoleNames(user=("customer",)))
    assert found.text == "q"
    assert json.loads(found.record) == record
    assert read({"question": "q", "prompt": "p"}, fields=FieldNames(prompt="question")).text == "q"


@pytest.mark.parametrize(
    "record",
    [{"prompt": " \n"}, {"prompt": ""}, {"prompt": [user(" ")], "system": "s"}, {"instruction": ""}],
    ids=str,
)
def test_an_empty_prompt_is_an_empty_text(record):
    assert read(record).text == ""


Q, A = user("q"), answer("a")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": (
        {"question": "q", "answer": "a", "prompt": None},
        "has no 'prompt' or 'messages' or 'conversations' or 'instruction', only 'question', 'answer'; correct the line, or",
    ),
    "nothing": ({}, "has no 'prompt' or 'messages' or 'conversations' or 'instruction', only nothing; correct the line"),
    "an answer": (
        {"messages": [Q, A]},
        "messages must end before the assistant answers, with a message of the user or of a tool, not of the assistant;",
    ),
    "a system message": ({"prompt": [{"role": "system", "content": "s"}]}, "prompt must end before the assistant answers"),
    "no messages": ({"prompt": []}, "prompt has no messages; correct or remove the line"),
    "a number": ({"prompt": 3}, "prompt must be a text or a list of messages, not int; correct the line, or set fields"),
    "no list": ({"messages": "Hi"}, "'messages' must be a list, not str; correct the line"),
    "a role": ({"prompt": [{"role": "bot", "content": "x"}]}, "prompt[0].role must be one of "),
    "system beside a text": ({"prompt": "q", "system": "s"}, "system is not read beside a text, which is continued as it"),
    "tools beside a text": ({"prompt": "q", "tools": TOOLS}, "tools is not read beside a text, which is continued as it is"),
    "images": ({"prompt": [Q], "images": ["a.png"]}, "images cannot be trained on; write it into the messages' text, or"),
    "a learned message": ({"prompt": [Q, A | {"train": True}, Q]}, "a message of the prompt is marked for training, but"),
    "half a character": ({"prompt": "\ud83d"}, "prompt has half a surrogate pair, which is not a character; correct"),
    "half a character beside it": ({"prompt": "q", "answer": "\ud83d"}, "a field of the record has half a surrogate pair"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_prompt_is_refused_in_one_line(record, message):
    with pytest.raises(ValueError, match=r"; ") as caught:
        read(record)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


def documents(path, **settings):
    source = Source(SourceConfig(kind="prompt", paths=(str(path),), **settings), "data.sources[0]")
    return list(source.documents(source.files()))


def test_lines_and_tables_hold_whole_records(tmp_path):
    """Values that JSON lacks are texts."""
    rows = [
        {"prompt": ASKED, "answer": ANSWER, "level": 3, "share": 0.5, "tests": [{"in": "1", "out": None}], "none": None,
         "day": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50"), "raw": b"abc"},
        {"prompt": "q", "answer": None, "level": 4, "share": None, "tests": [], "none": None,
         "day": None, "price": decimal.Decimal("2.25"), "raw": None},
    ]  # fmt: skip
    expected = [
        rows[0] | {"tests": [{"in": "1"}], "day": "2026-01-02", "price": "1.50", "raw": "abc"},
        rows[1] | {"price": "2.25"},
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in expected))
    for name in ("a.jsonl", "a.parquet", "a.arrow"):
        found = documents(tmp_path / name)
        assert [json.loads(one.prompt.record) for one in found if one.prompt] == expected
        assert [one.text for one in found] == [ASKED, "q"]
        assert [one.split_hash for one in found] == [split_hash(ASKED), split_hash("q")]


def test_a_bad_record_is_named_with_its_place_and_may_be_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [{"prompt": "q"}, {"prompt": [Q, A]}, {"prompt": "r"}]))
    with pytest.raises(DataError, match=rf"^{path}:2: data.sources\[0\].fields: prompt must end before the assistant"):
        documents(path)
    assert [document.text for document in documents(path, max_bad_records=1)] == ["q", "", "r"]
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["q"], "image": [b"\xff"]}), table)
    with pytest.raises(DataError, match=rf"^{table}:1: data.sources\[0\].fields: has text that is not UTF-8; correct or"):
        documents(table)
