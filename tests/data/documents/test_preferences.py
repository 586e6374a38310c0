"""Preferences are read from the forms of public data sets, and refused in one line where they say nothing."""

import json
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from llamajax.config.conversations import ChatForm, FieldNames, RoleNames
from llamajax.config.data import SourceConfig
from llamajax.data import cache
from llamajax.data.documents.preferences import Preference, preference_of
from llamajax.data.documents.sources import Source
from llamajax.data.documents.split import split_hash
from llamajax.errors import DataError
from tests.data.documents.preference_records import ASKED, BAD, GOOD, LABELLED, PAIRS, answer, user


def read(record: dict[str, Any], **form) -> Preference:
    return preference_of(record, ChatForm(**form), "a.jsonl:1")


def said(side) -> list[tuple[str, str, bool]]:
    return [
        (message["role"], message["content"], is_learnt)
        for message, is_learnt in zip(side.messages, side.is_learnt, strict=True)
    ]


@pytest.mark.parametrize("record", PAIRS.values(), ids=PAIRS)
def test_every_form_of_a_pair_is_one_prompt_and_two_answers(record):
    found = read(record)
    assert found.prompt == ASKED
    assert said(found.chosen) == [("user", ASKED, False), ("assistant", GOOD, True)]
    assert said(found.rejected) == [("user", ASKED, False), ("assistant", BAD, True)]
    assert found.text == f"{ASKED}\n{GOOD}\n{BAD}"


@pytest.mark.parametrize("record", LABELLED.values(), ids=LABELLED)
def test_every_form_of_an_answer_with_a_label_is_on_its_side(record):
    found = read(record)
    assert found.chosen is None
    assert said(found.rejected) == [("user", ASKED, False), ("assistant", BAD, True)]
    assert (found.prompt, found.text) == (ASKED, f"{ASKED}\n{BAD}")
    found = read({key: True if value is False else value for key, value in record.items()})
    assert found.rejected is None
    assert said(found.chosen)[-1] == ("assistant", BAD, True)


def test_the_prompt_is_all_that_whole_conversations_have_in_common():
    """Also answers, and calls of tools; nothing of it is learnt."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    common = [user("Hi"), answer("Hello."), user("Look."), call, {"role": "tool", "content": "4"}]
    found = read({"chosen": [*common, answer("Four.")], "rejected": [*common, answer("Five.")], "system": "Be brief."})
    assert found.chosen is not None
    assert [message["role"] for message in found.chosen.messages][:2] == ["system", "user"]
    assert found.chosen.is_learnt == [*[False] * 6, True]
    assert found.prompt.startswith("Be brief.\nHi\nHello.\nLook.\n")
    scored = [[user("Hi") | {"score": score}, answer(said) | {"score": score}] for score, said in enumerate("ab")]
    assert read({"chosen": scored[0], "rejected": scored[1]}).prompt == "Hi"
    turns = [user("Hi"), answer("a"), user("So?")]
    found = read({"chosen": [*turns, answer("b")], "rejected": [user("Hi"), answer("A"), user("So?"), answer("B")]})
    assert found.chosen is not None
    assert found.chosen.is_learnt == [False, True, False, True]
    assert found.prompt == "Hi"


@pytest.mark.parametrize("prompt", [{}, {"prompt": "q"}, {"prompt": [answer("Hi!"), user("q")]}])
def test_a_whole_conversation_may_begin_with_the_assistant(prompt):
    begin = [answer("Hi!"), user("q")]
    found = read({**prompt, "chosen": [*begin, answer("a")], "rejected": [*begin, answer("b")]})
    assert found.chosen is not None
    assert found.chosen.is_learnt == [False, False, True]
    assert found.prompt == "Hi!\nq"


def test_turns_of_a_dialog_in_one_text():
    begin = "\n\nHuman: Hi\n\nAssistant: Hello.\nYes?\n\nHuman: 2 + 2?\n\nAssistant:"
    expected = [("user", "Hi", False), ("assistant", "Hello.\nYes?", False), ("user", "2 + 2?", False)]
    found = read({"chosen": f"{begin} 4", "rejected": f"{begin} 5"})
    assert said(found.chosen) == [*expected, ("assistant", "4", True)]
    apart = read({"prompt": begin, "chosen": " 4", "rejected": " 5"})
    assert said(apart.rejected) == [*expected, ("assistant", " 5", True)]
    quoting = read({"prompt": "Write a dialog.", "chosen": "Human: Hi\n\nAssistant: Ho", "rejected": "No."})
    assert said(quoting.chosen)[-1] == ("assistant", "Human: Hi\n\nAssistant: Ho", True)


def test_a_labelled_conversation_is_learnt_behind_its_last_question():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    turns = [user("Hi"), answer("Hello."), user("Look."), call, {"role": "tool", "content": "4"}, answer("Four.")]
    found = read({"messages": turns, "label": True})
    assert found.chosen is not None
    assert found.chosen.is_learnt == [False, False, False, True, False, True]


def test_names_of_fields_and_roles():
    record = {
        "ask": [{"who": "customer", "what": "q"}],
        "good": {"who": "agent", "what": "a"},
        "bad": {"who": "agent", "what": "b"},
    }
    fields = FieldNames(prompt="ask", chosen="good", rejected="bad", role="who", content="what")
    roles = RoleNames(user=("customer",), assistant=("agent",))
    assert read(record, fields=fields, roles=roles).text == "q\na\nb"
    fields = FieldNames(prompt="history", completion="human.ref", label="meta.is_good")
    record = {"history": "q", "human": {"ref": "a"}, "meta": {"is_good": True}, "label": 7}
    assert read(record, fields=fields).text == "q\na"


def test_an_empty_answer_is_an_empty_text():
    assert read(PAIRS["trl, texts"] | {"rejected": " "}).text == ""
    assert read(LABELLED["trl, texts"] | {"completion": ""}).text == ""


Q, A, B = user("q"), answer("a"), answer("b")
PAIR, ONE = {"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "completion": "a", "label": True}
REFUSED = {
    "equal": (PAIR | {"rejected": "a"}, "chosen and rejected are equal, so neither is better; remove the line"),
    "equal conversations": ({"chosen": [Q, A], "rejected": [Q, A]}, "chosen and rejected are equal, so neither"),
    "empty prompt": (PAIR | {"prompt": " "}, "the prompt is empty: nothing is asked before the answer; correct the line"),
    "no messages": (PAIR | {"prompt": []}, "prompt has no messages; correct or remove the line"),
    "nothing in common": ({"chosen": [Q, A], "rejected": [user("r"), B]}, "the prompt is empty: nothing is asked"),
    "one side": ({"prompt": "q", "chosen": "a"}, "has no 'rejected', only 'prompt', 'chosen'; correct the line, or"),
    "one side is null": (PAIR | {"rejected": None}, "rejected must be a text, a message or messages, not null; correct"),
    "no side": (
        {"prompt": "q", "answer": "a", "label": None},
        "has neither 'chosen' and 'rejected' nor 'label', only 'prompt', 'answer'; correct the line, or set fields",
    ),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "has no 'prompt', 'messages' or 'instruction' before the answer"),
    "a last question": (
        {"chosen": [Q, A], "rejected": [Q, B, Q]},
        "rejected must end with an answer of the assistant, not with a message of the user; correct the line",
    ),
    "a labelled question": ({"messages": [Q, A, Q], "label": True}, "messages must end with an answer of the assistant"),
    "no bool": (ONE | {"label": 1}, "label must be true or false, not 1; correct the line"),
    "a text for a bool": (ONE | {"label": "true"}, "label must be true or false, not 'true'; correct the line"),
    "no completion": ({"prompt": "q", "label": True}, "has no 'completion', only 'prompt', 'label'; correct the"),
    "unlike sides": (PAIR | {"chosen": [Q, A]}, "chosen is a whole conversation, but rejected is an answer alone; write"),
    "another prompt": (
        {"prompt": "p", "chosen": [Q, A], "rejected": [Q, B]},
        "prompt is not what chosen and rejected, whole conversations, begin with; correct the line, or remove prompt",
    ),
    "other messages": ({"prompt": [A], "chosen": [Q, A], "rejected": [Q, B]}, "prompt is not what chosen and rejected"),
    "a number": (PAIR | {"chosen": 3}, "chosen must be a text, a message or messages, not int; correct or remove the line"),
    "no role": (PAIR | {"chosen": {"content": "a"}}, "chosen has no 'role'"),
    "a learnt prompt": (
        PAIR | {"prompt": [Q, A | {"train": True}, Q]},
        "a message of the prompt is marked for training, but only answers are learnt; remove the mark",
    ),
    "an answer that is not learnt": (PAIR | {"chosen": [A | {"train": False}]}, "chosen is marked not to be trained on, so"),
    "images": (PAIR | {"images": ["a.png"]}, "images cannot be trained on; write it into the messages' text, or remove it"),
    "history": (PAIR | {"history": [["a", "b"]]}, "history cannot be trained on; write it into the messages' text, or"),
    "left out": (PAIR | {"train": False}, "train: excludes the whole line from training; remove the line"),
    "half a character": (PAIR | {"chosen": "\ud83d"}, "chosen has half a surrogate pair, which is not a character"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "message"), REFUSED.values(), ids=REFUSED)
def test_what_says_nothing_is_refused_in_one_line(record, message):
    with pytest.raises(ValueError, match=r";") as caught:
        read(record)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1
    assert "; " in str(caught.value)


def documents(path, **settings):
    source = Source(SourceConfig(kind="preference", paths=(str(path),), **settings), "data.sources[0]")
    return list(source.documents(source.files()))


def test_lines_arrays_and_tables_hold_the_same(tmp_path):
    records = [*PAIRS.values(), *LABELLED.values()]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "a.json").write_text(json.dumps(records))
    expected = [document.preference for document in documents(tmp_path / "a.jsonl")]
    assert len(expected) == len(records)

    def without_places(preference):
        sides = (side and side._replace(where=None) for side in (preference.chosen, preference.rejected))
        return preference.prompt, *sides

    for number, record in enumerate(records):  # a table has one type for all rows
        table = pyarrow.Table.from_pylist([{"score": 1, "images": None} | record])
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
            stream.write_table(table)
        for name in ("a.parquet", "a.arrow"):
            ((found),) = documents(tmp_path / name)
            assert without_places(found.preference) == without_places(expected[number])
            assert found.split_hash == split_hash(ASKED)
    of_array = documents(tmp_path / "a.json")
    assert [without_places(one.preference) for one in of_array] == list(map(without_places, expected))
    assert {document.split_hash for document in of_array} == {split_hash(ASKED)}


def test_a_bad_record_is_named_with_its_place_and_may_be_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [PAIR, PAIR | {"rejected": "a"}, ONE]))
    with pytest.raises(DataError, match=rf"^{path}:2: data.sources\[0\].fields: chosen and rejected are equal, so"):
        documents(path)
    assert [document.text for document in documents(path, max_bad_records=1)] == ["q\na\nb", "", "q\na"]


def test_keys_of_other_kinds_are_those_of_earlier_versions():
    """Golden: else every cache would be made again."""
    form = ChatForm(chat_format="sharegpt", fields=FieldNames(messages="dialog"), train_on="last")
    assert cache.key_of(form.key) == "bd6c719d10c418afc1af750fff215c3fcc173a949d6c7fae2389e2b2b8ef0abb"
    assert (
        form.key != ChatForm(chat_format="sharegpt", fields=FieldNames(messages="dialog", chosen="a"), train_on="last").key
    )
