"""Records of tables are those of JSON: conversations and tokens, under the names that a source has for them."""

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from llamajax.config.conversations import FieldNames, RoleNames
from llamajax.config.data import SourceConfig
from llamajax.data.documents.lines import Span
from llamajax.data.documents.sources import Source
from llamajax.errors import ConfigError, DataError

TALKS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], "system": "S"},
    {
        "messages": [
            {"role": "user", "content": "Q"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "content": "4", "tool_call_id": "a"},
            {"role": "assistant", "content": "A", "train": False},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
]


def table_of(records) -> pyarrow.Table:
    return pyarrow.Table.from_pylist([{"id": 1, "messages": None, "system": None, "tools": None} | one for one in records])


def write(path: Path, records) -> Path:
    """Writes the records in the form that the name of the file says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(table_of(records), path, row_group_size=1)
    else:
        with pyarrow.ipc.new_stream(str(path), table_of(records).schema) as stream:
            stream.write_table(table_of(records))
    return path


def documents(path: Path, **settings):
    source = Source(SourceConfig(**({"kind": "chat", "paths": (str(path),)} | settings)), "data.sources[0]")
    return list(source.documents(source.files()))


def read(path: Path, **settings):
    """Returns messages, marks and variables of each conversation."""
    found = [document.conversation for document in documents(path, **settings)]
    return [(of.messages, of.is_learnt, of.variables) for of in found if of is not None]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_of_structs_holds_the_conversations_of_json(tmp_path, name):
    as_json = read(write(tmp_path / "a.jsonl", TALKS))
    assert read(write(tmp_path / name, TALKS)) == as_json
    assert [learnt for _, learnt, _ in as_json] == [[False, False, True], [False, True, False, False]]
    texts = [[json.dumps(record[key]) if key in record else None for record in TALKS] for key in ("messages", "tools")]
    as_text = [one | {"messages": text, "tools": tools} for one, text, tools in zip(TALKS, *texts, strict=True)]
    assert read(write(tmp_path / name, as_text)) == as_json


def test_spans_of_a_parquet_file_hold_each_row_once(tmp_path):
    path = write(tmp_path / "a.parquet", TALKS * 20)
    source = Source(SourceConfig(kind="chat", paths=(str(path),)), "data.sources[0]")
    assert source.format.has_spans(path)
    size = path.stat().st_size
    spans = [Span(at, min(at + 5000, size)) for at in range(0, size, 5000)]
    of_spans = [document for span in spans for document in source.documents([path], span)]
    assert [document.conversation for document in of_spans] == [document.conversation for document in documents(path)]
    assert len(of_spans) == 40


def test_a_saved_dataset_is_a_directory(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    write(folder / "data-00000-of-00001.arrow", TALKS)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    assert read(folder) == read(write(tmp_path / "a.jsonl", TALKS))


def test_values_that_json_lacks_become_text(tmp_path):
    turns = [{"role": "user", "content": b"Q", "at": datetime.datetime(2026, 1, 2)}, {"role": "assistant", "content": b"A"}]
    ((messages, _, _),) = read(write(tmp_path / "a.parquet", [{"messages": turns}]))
    assert messages[0] == {"role": "user", "content": "Q", "at": "2026-01-02 00:00:00"}
    with pytest.raises(DataError, match=r"a.parquet:1: data.sources\[0\].chat_format: has text that is not UTF-8; correct"):
        read(write(tmp_path / "a.parquet", [{"messages": [{"role": "user", "content": b"\xff"}]}]))


def test_a_table_without_the_column_is_named_with_those_it_has(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"talk": ["Q"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet:1: .*: has no 'messages', only 'talk', 'n'; correct the line, or set"):
        read(tmp_path / "a.parquet")


NAMED = {
    "data": {"dialog": [
        {"speaker": "customer", "text": "Q", "role": "x"},
        {"speaker": "agent", "text": "A", "why": "W", "mask": 1, "calls": '[{"name": "f"}]'},
        {"speaker": "agent", "text": "B", "mask": 0},
    ]},
    "instructions": "S",
}  # fmt: skip
FIELDS = FieldNames(
    messages="data.dialog", role="speaker", content="text", reasoning="why", train="mask", tool_calls="calls",
    system="instructions",
)  # fmt: skip
ROLES = RoleNames(user=("customer",), assistant=("agent",))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_names_of_fields_and_roles_are_settings(tmp_path, name):
    ((messages, learnt, _),) = read(write(tmp_path / name, [NAMED]), fields=FIELDS, roles=ROLES)
    assert learnt == [False, False, True, False]
    assert messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "tool_calls": [{"name": "f"}], "reasoning_content": "W", "thinking": "W"},
        {"role": "assistant", "content": "B"},
    ]
    named = FieldNames(instruction="ask", output="say", history="before")
    record = {"ask": "Q", "say": "A", "before": [["q", "a"]]}
    ((messages, _, _),) = read(write(tmp_path / "b.jsonl", [record]), chat_format="alpaca", fields=named)
    assert [message["content"] for message in messages] == ["q", "a", "Q", "A"]
    ((messages, _, _),) = read(
        write(tmp_path / "b.jsonl", [record]),
        chat_format="prompt_completion",
        fields=FieldNames(prompt="ask", completion="say"),
    )
    assert [message["content"] for message in messages] == ["Q", "A"]


@pytest.mark.parametrize(("train_on", "learnt"), [(None, [0, 1, 0, 1]), ("all", [0, 1, 0, 1]), ("last", [0, 0, 0, 1])])
def test_what_is_learnt_is_a_setting_and_marks_come_first(tmp_path, train_on, learnt):
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    ((_, found, _),) = read(write(tmp_path / "a.jsonl", [{"messages": turns}]), train_on=train_on)
    assert found == list(map(bool, learnt))
    turns[1]["train"] = True  # pyright: ignore[reportArgumentType]
    ((_, found, _),) = read(write(tmp_path / "a.jsonl", [{"messages": turns}]), train_on=train_on)
    assert found == [False, True, False, True]
    split = {"prompt": turns[:3], "completion": turns[3:]}
    del turns[1]["train"]
    ((_, found, _),) = read(write(tmp_path / "a.jsonl", [split]), chat_format="prompt_completion", train_on=train_on)
    assert found == [False, train_on == "all", False, True]


RULES = [
    (
        {"train_on": "none-of-prompt"},
        "train_on: none-of-prompt needs records of prompt and completion, not chat_format=mess",
    ),
    (
        {"kind": "jsonl", "train_on": "last"},
        "train_on: last has no effect with kind=jsonl; use kind=chat, or remove train_on",
    ),
    ({"kind": "text", "roles": ROLES}, "roles: has no effect with kind=text; use kind=chat, or remove roles"),
    (
        {"fields": FieldNames(prompt="p")},
        "fields.prompt: p has no effect with chat_format=messages; set another chat_format",
    ),
    (
        {"kind": "tokenized", "fields": FieldNames(role="r")},
        "fields.role: r has no effect with kind=tokenized; set kind: chat",
    ),
]


@pytest.mark.parametrize(("settings", "rule"), RULES, ids=range(len(RULES)))
def test_settings_without_effect_are_refused(settings, rule):
    with pytest.raises(ConfigError) as caught:
        SourceConfig(**({"kind": "chat", "paths": ("a",)} | settings))
    assert str(caught.value).startswith(rule)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: FieldNames(role="a", content="a"), "content: a is also the name of role; give each field its own"),
        (lambda: FieldNames(system=""), "system: must not be empty; remove it to use the format's own name"),
        (lambda: RoleNames(user=("a",), tool=("a",)), "tool: a is also a name of user; keep one of them"),
    ],
)
def test_names_belong_to_one_field_or_role(make, rule):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == rule


IDS = {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_tokens_are_read_with_what_is_learnt(tmp_path, name):
    path = tmp_path / name
    if path.suffix == ".jsonl":
        path.write_text(json.dumps(IDS) + "\n")
    else:
        table = pyarrow.table({key: [value] for key, value in IDS.items()})
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_file(str(path), table.schema) as file:
                file.write_table(table)
    (document,) = documents(path, kind="tokenized")
    assert document.encoded is not None
    assert document.encoded.ids.tolist() == [5, 6, 7]
    assert document.encoded.learnt.tolist() == [False, True, True]


def test_tokens_under_other_names_and_without_labels(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"tokens": [5, 6]}\n{"tokens": [5, 6], "target": [5, -100]}\n')
    first, second = documents(path, kind="tokenized", fields=FieldNames(input_ids="tokens", labels="target"))
    assert first.encoded is not None
    assert first.encoded.learnt.tolist() == [True, True]
    assert second.text == "", "nothing that follows a token is learnt"


REFUSED = [
    ({}, "has no 'input_ids', only nothing; correct the line"),
    ({"input_ids": "5 6"}, "input_ids must be a list of whole numbers, not str; correct the line"),
    ({"input_ids": [[5], [6, 7]]}, "input_ids must be one list of whole numbers; correct the line"),
    ({"input_ids": [5, 0.5]}, "input_ids must be one list of whole numbers; correct the line"),
    ({"input_ids": [5, -1]}, "input_ids has -1, which is no id; correct the line"),
    ({"input_ids": [5, 6], "labels": [6]}, "labels has 1 numbers for the 2 of input_ids; correct the line"),
    ({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, "labels[0] is 6, but input_ids[0] is 5: labels are aligned with"),
    ({"input_ids": [5, 6], "position_ids": [0, 0]}, None),
    ({"input_ids": [5, 6, 7], "position_ids": [0, 1, 0]}, "position_ids starts again at 2, so the record holds several"),
]


@pytest.mark.parametrize(("record", "message"), REFUSED, ids=range(len(REFUSED)))
def test_tokens_that_cannot_be_learnt_are_refused(tmp_path, record, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    if message is None:
        assert documents(tmp_path / "a.jsonl", kind="tokenized")
        return
    with pytest.raises(DataError) as caught:
        documents(tmp_path / "a.jsonl", kind="tokenized")
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl:1: data.sources[0].fields: {message}")
