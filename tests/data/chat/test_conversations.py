"""Conversations of all kinds in published templates: ids are transformers', learnt is what is marked by hand."""

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers.utils import chat_template_utils

from llamajax.config.data import SourceConfig
from llamajax.config.file import settings_of
from llamajax.data.chat.chat_tokens import encode_conversation
from llamajax.data.documents.conversations import conversation_of
from llamajax.data.documents.messages import REASONING
from llamajax.data.documents.turn_marks import MARKS
from llamajax.errors import DataError
from tests.data.chat.published import PUBLISHED, SPECIAL, said, template
from tests.data.chat.talks import spelling

SLOW = ("qwen2_5", "zephyr", "llama3_1")  # alike to others
CASES = yaml.safe_load((Path(__file__).parent / "conversations.yaml").read_text())


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return spelling(tmp_path_factory.mktemp("published"), SPECIAL)


@pytest.fixture(autouse=True)
def training_date(monkeypatch):
    """Templates that write today's date write the same one in training."""

    class Date(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 26)

    monkeypatch.setattr(chat_template_utils, "datetime", Date)


def conversation(case):
    form = settings_of(SourceConfig, {"kind": "chat", "paths": ["x"]} | case.get("form", {})).form
    return conversation_of(case["record"], form)


def as_transformers_takes(case, *, folds: bool) -> list[dict[str, Any]]:
    """The messages, without marks, and with thoughts where the template knows them."""
    taken = []
    for message in case.get("means") or case["record"]["messages"]:
        message = {key: value for key, value in message.items() if key not in MARKS}
        if (thought := message.get("reasoning_content")) and folds:
            message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
            message = {key: value for key, value in message.items() if key not in REASONING}
        elif thought:
            message["thinking"] = thought
        taken.append(message)
    return taken


def spans(encoded):
    """The stretches of a sample that are learnt, as lists of ids."""
    found, before = [], False
    for token, learnt in zip(*(part.tolist() for part in encoded), strict=True):
        if learnt and before:
            found[-1].append(token)
        elif learnt:
            found.append([token])
        before = learnt
    return found


def is_served(ids, prompt, whole) -> bool:
    """Whether the ids are a conversation as transformers writes it, or a prompt as it does and the answer to it."""
    return ids == whole or (ids[: len(prompt)] == prompt and whole[len(prompt) - len(ids) :] == ids[len(prompt) :])


def problem(both, name: str, text: str, case) -> object:
    """What is wrong with a conversation in a template; None: nothing."""
    ours, theirs, compiled = both
    of = PUBLISHED[name]
    refusals = [of.refuses[need] for need in case.get("needs", ()) if need in of.refuses]
    try:
        samples = encode_conversation(compiled(text), ours, conversation(case))
    except DataError as error:
        is_one_line = len(str(error).splitlines()) == 1
        return None if is_one_line and any(re.search(one, str(error)) for one in refusals) else str(error)
    if refusals:
        return "is not refused"
    learnt = [theirs.decode(span) for sample in samples for span in spans(sample)]
    expected = case.get("learnt_by", {}).get(name) or [of.answer(said(mark)) for mark in case["learnt"]]
    if learnt != expected:
        return learnt, expected
    messages, tools = as_transformers_takes(case, folds=of.folds), case.get("tools") or case["record"].get("tools")
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    given = {"tools": tools, "chat_template": text, "return_dict": False}
    written = [
        (
            theirs.apply_chat_template(messages[:answer], add_generation_prompt=True, **given) if answer else [],
            theirs.apply_chat_template(messages[: answer + 1], **given),
        )
        for answer in answers
    ]
    strange = [ids for ids, _ in samples if not any(is_served(ids.tolist(), *one) for one in written)]
    return [theirs.decode(ids) for ids in strange] or None


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PUBLISHED])
def test_ids_are_transformers_and_learnt_is_what_is_marked(both, name):
    if (text := template(name)) is None:
        pytest.skip("trl, which has this template, needs torch, which the lock has for Python 3.11 alone")
    assert len(CASES) >= 40
    found = [(case["name"], problem(both, name, text, case)) for case in CASES]
    assert not (wrong := [one for one in found if one[1] is not None]), "\n".join(map(str, wrong))


def test_a_prompt_that_opens_a_thought_is_followed_by_it(both):
    """As DeepSeek-R1 serves it, whose template drops all thoughts; and without one there is nothing to learn from."""
    ours, theirs, compiled = both
    text = template("deepseek_r1_distill")
    assert text is not None

    def samples(*messages):
        found = encode_conversation(compiled(text), ours, conversation({"record": {"messages": list(messages)}}))
        return [(theirs.decode(ids), [theirs.decode(span) for span in spans((ids, learnt))]) for ids, learnt in found]

    def wide(text):
        return text.replace("|", "\N{FULLWIDTH VERTICAL LINE}")

    q, r = ({"role": "user", "content": content} for content in "qr")
    why = {"role": "assistant", "content": "one", "reasoning_content": "why"}
    how = {"role": "assistant", "content": "<think>\nhow\n</think>\n\ntwo"}
    end = wide("<|end\u2581of\u2581sentence|>")
    first = wide("<s><|User|>q<|Assistant|><think>\n")
    second = wide(f"<s><|User|>q<|Assistant|>one{end}<|User|>r<|Assistant|><think>\n")
    assert samples(q, why, r, how) == [
        (f"{first}why\n</think>\n\none{end}", [f"why\n</think>\n\none{end}"]),
        (f"{second}how\n</think>\n\ntwo{end}", [f"how\n</think>\n\ntwo{end}"]),
    ]
    plain = [q, {"role": "assistant", "content": "one"}, r]
    assert theirs.apply_chat_template(plain, chat_template=text, add_generation_prompt=True, tokenize=False) == second
    with pytest.raises(DataError, match=r"begins an answer with .* in its generation prompt, but not before"):
        samples(*plain[:2])
