"""Marks about learning in data: honoured with one meaning, refused with several, never ignored."""

import re

import pytest

from llamajax.config.conversations import ChatForm
from llamajax.data.documents.conversations import conversation_of
from llamajax.data.documents.turn_marks import learnt_mark, says_about_learning

Q, R = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}
BAD, GOOD = {"role": "assistant", "content": "bad"}, {"role": "assistant", "content": "good"}


def is_learnt(*messages, **others):
    return conversation_of({"messages": list(messages)} | others, ChatForm()).is_learnt


@pytest.mark.parametrize("zero", [0, 0.0, False])
@pytest.mark.parametrize(
    "mark", ["weight", "train", "training", "trainable", "train_on_turn", "loss", "loss_scale", "loss_weight", "loss_mask"]
)
def test_what_is_marked_is_not_learnt(mark, zero):
    one = type(zero)(1)
    assert is_learnt(Q, BAD | {mark: zero}, R, GOOD) == [False, False, False, True]
    assert is_learnt(Q, BAD | {mark: zero}, R, GOOD | {mark: one}) == [False, False, False, True]
    assert is_learnt(Q | {mark: zero}, BAD | {mark: one}, R | {mark: None}, GOOD | {mark: None}) == [
        False,
        True,
        False,
        True,
    ]


def test_masked_means_hidden():
    assert is_learnt(Q | {"masked": True}, BAD | {"masked": True}, R, GOOD | {"masked": False}) == [
        False,
        False,
        False,
        True,
    ]


def test_several_marks_may_agree():
    assert is_learnt(Q, BAD | {"train": False, "weight": 0, "masked": True}, R, GOOD) == [False, False, False, True]


def test_a_mark_is_not_told_to_the_template():
    messages = conversation_of({"messages": [Q, GOOD | {"weight": 1, "name": "n"}]}, ChatForm()).messages
    assert messages == [Q, GOOD | {"name": "n"}]


def test_sharegpt_turns_are_marked_too():
    turns = [("system", "s", None), ("human", "q", 0), ("gpt", "a", 1), ("human", "r", 0), ("gpt", "b", 0)]
    record = {"conversations": [{"from": role, "value": value, "weight": weight} for role, value, weight in turns]}
    assert conversation_of(record, ChatForm(chat_format="sharegpt")).is_learnt == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        (
            {"weight": 0.5},
            'messages[1].weight must be 0 or 1, or false or true, not 0.5: a message is trained on or not; write "t',
        ),
        ({"weight": 2}, "must be 0 or 1"),
        ({"weight": -1}, "must be 0 or 1"),
        ({"train": "false"}, "must be 0 or 1, or false or true, not 'false'"),
        ({"train": []}, "must be 0 or 1, or false or true, not []"),
        ({"loss_mask": [0, 1]}, "must be 0 or 1"),
        ({"train": True, "weight": 0}, "messages[1].train and weight contradict each other; keep one of them"),
        ({"loss": True, "masked": True}, "contradict each other"),
        (
            {"mask": 0},
            'messages[1].mask: this field about learning has no meaning here; write "train": true or "train": false',
        ),
        ({"mask": True}, "has no meaning here"),
        ({"label": "good"}, "has no meaning here"),
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]},
            "train_detail: this field about learning",
        ),
        ({"lossWeight": 1}, "lossWeight: this field about learning"),
        ({"do_not_train": True}, "do_not_train: this field about learning"),
        ({"is-masked": 1}, "is-masked: this field about learning"),
    ],
)
def test_what_has_no_one_meaning_is_refused(marks, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        is_learnt(Q, GOOD | marks)


def test_only_the_assistant_is_learnt():
    with pytest.raises(ValueError, match=r"^messages\[0\] is marked for training, but only the assistant's messages can be"):
        is_learnt(Q | {"train": True}, GOOD)


def test_fields_that_do_not_speak_of_learning_stay():
    assert not any(map(says_about_learning, ("name", "id", "model", "constraint", "restrained", "closs", "timestamp")))
    assert learnt_mark({"name": "n", "train_detail": [], "label": None, "mask": ""}, "") is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": 0}, "weight: excludes the whole line from training; remove the line"),
        ({"weight": 0.5}, "weight must be 0 or 1"),
        ({"train": False}, "train: excludes the whole line"),
        ({"masked": True}, "masked: excludes the whole line"),
        ({"mask": "User"}, "mask: means different things to different programs; remove it"),
        ({"label": False}, "label: false marks a rejected answer; remove the line, or set kind: preference"),
        ({"kto_tag": False}, "kto_tag: false marks"),
    ],
)
def test_records_that_are_marked_as_a_whole(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        is_learnt(Q, GOOD, **fields)


def test_records_that_are_marked_as_usual():
    assert is_learnt(Q, GOOD, weight=1.0, train=None, label=True, loss=2.31, training_source="x") == [False, True]
