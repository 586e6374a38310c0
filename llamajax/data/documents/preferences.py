"""Converts records of preference data, in the common forms, to a chosen and a rejected conversation with one prompt."""

import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple, cast

from llamajax.config.conversations import ChatForm
from llamajax.data.documents import conversations
from llamajax.data.documents.columns import NoSuchKeyError, value_at
from llamajax.data.documents.conversations import MEDIA, Conversation, Turn, asked_at, check_unread, messages_at, said
from llamajax.data.documents.messages import (
    ANSWERING,
    Names,
    content_of,
    kind_of,
    names_of,
    optional,
    read_message,
    text_at,
    text_of,
)
from llamajax.data.documents.turn_marks import OF_PREFERENCES, check_record
from llamajax.errors import show

_MESSAGES = ("messages", "conversations")
_DIALOG = re.compile(r"\s*Human:.*\n\nAssistant:.*", re.DOTALL)
_OPEN_DIALOG = re.compile(r"\s*Human:.*\n\nAssistant:\s*", re.DOTALL)
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
"""Turns of a dialog in one text, as Anthropic's hh-rlhf writes it."""
_CORRECT = "correct the line, or set fields"


class Preference(NamedTuple):
    """A chosen and a rejected conversation that begin with one prompt, or one of them alone."""

    prompt: str
    """Text of the prompt."""
    chosen: Conversation | None
    """The prompt with the better answer, or with one that is desirable."""
    rejected: Conversation | None
    """The prompt with the worse answer, or with one that is not desirable."""

    @property
    def sides(self) -> list[Conversation]:
        """The conversations that are there, the chosen one first."""
        return [side for side in (self.chosen, self.rejected) if side is not None]

    @property
    def text(self) -> str:
        """The prompt and all answers, or an empty text if an answer is empty."""
        if not all(side.text for side in self.sides):
            return ""
        answers = [
            text_of(message)
            for side in self.sides
            for message, is_learnt in zip(side.messages, side.is_learnt, strict=True)
            if is_learnt
        ]
        return "\n".join([self.prompt, *answers])


def preference_of(record: Mapping[str, object], form: ChatForm, where: object = None) -> Preference:
    """Returns the preference in a record.

    A record with `chosen` and `rejected` is a pair. Each is an answer after the record's prompt, or a whole conversation.
    The prompt of whole conversations is what they have in common at the beginning. Any other record has one answer and a
    `label`: true if it is desirable. The prompt is a `prompt` (a text or messages), `messages` or `conversations`, or the
    question of an alpaca record. An answer is a text, a message or messages.

    All may have `system`, `tools` (or `functions`) and `chat_template_kwargs`. The names are those of `form`.

    Raises:
        ValueError: `field: rule; remedy`, if the record has no preference.
    """
    names = names_of(form)
    check_record(record, is_preference=True)
    has_history = optional(record, names.of("instruction")) is not None or "history" in names.record.values()
    check_unread(record, MEDIA if has_history else (*MEDIA, "history"))
    if any(optional(record, names.of(side)) is not None for side in ("chosen", "rejected")):
        prompt, chosen, rejected = _pair(record, names)
    else:
        prompt, answer, is_desirable = _labelled(record, names)
        chosen, rejected = (answer, None) if is_desirable else (None, answer)
    if not any(turn.message["role"] == "user" and text_of(turn.message).strip() for turn in prompt):
        raise ValueError(f"the prompt is empty: nothing is asked before the answer; {_CORRECT}")
    if any(turn.mark for turn in prompt):
        raise ValueError("a message of the prompt is marked for training, but only answers are learnt; remove the mark")

    def side(answer: list[Turn] | None) -> Conversation | None:
        if answer is None:
            return None
        turns = [*(turn._replace(is_prompt=True) for turn in prompt), *answer]
        return conversations.assembled(turns, record, names, "none-of-prompt", where)

    asked = [text_at(record, names.of("system"), ""), *(text_of(turn.message) for turn in prompt)]
    return Preference("\n".join(filter(None, asked)), side(chosen), side(rejected))


def fields_read(form: ChatForm) -> frozenset[str]:
    """Returns the names of all fields of a record that `preference_of` looks at."""
    names = names_of(form)
    own = [*_MESSAGES, *OF_PREFERENCES, *(names.of(field) for field in ("chosen", "rejected", "label"))]
    return conversations.fields_read(form) | {*own, *(name.partition(".")[0] for name in own)}


def _pair(record: Mapping[str, object], names: Names) -> tuple[list[Turn], list[Turn], list[Turn]]:
    """Returns the turns of the prompt, of the chosen answer and of the rejected one."""
    chosen, rejected = (_said_at(record, field, names) for field in ("chosen", "rejected"))
    keys = names.of("chosen"), names.of("rejected")
    are_whole = [_is_whole(record, turns, names) for turns in (chosen, rejected)]
    if are_whole[0] != are_whole[1]:
        whole, other = keys if are_whole[0] else keys[::-1]
        raise ValueError(f"{whole} is a whole conversation, but {other} is an answer alone; write both alike")
    if all(are_whole):
        pairs = zip(_what(chosen[:-1]), _what(rejected[:-1]), strict=False)  # at least the last turn is an answer
        num_common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        prompt, chosen, rejected = chosen[:num_common], chosen[num_common:], rejected[num_common:]
        key = names.of("prompt")
        if optional(record, key) is not None and not _begin_with_prompt(record, prompt, names):
            remedy = f"correct the line, or remove {key}"
            raise ValueError(f"{key} is not what {' and '.join(keys)}, whole conversations, begin with; {remedy}")
    else:
        prompt = _prompt(record, names)
    for key, answer in zip(keys, (chosen, rejected), strict=True):
        _check_answer(answer, key)
    if _what(chosen) == _what(rejected):
        raise ValueError(f"{keys[0]} and {keys[1]} are equal, so neither is better; remove the line")
    return prompt, chosen, rejected


def _labelled(record: Mapping[str, object], names: Names) -> tuple[list[Turn], list[Turn], bool]:
    """Returns the turns of the prompt and of the answer, and whether this is desirable."""
    own = names.record.get("label")
    key = own or next((name for name in OF_PREFERENCES if record.get(name) is not None), OF_PREFERENCES[0])
    if (label := optional(record, key)) is None:
        has = ", ".join(repr(name) for name, value in record.items() if value is not None)
        raise ValueError(
            f"has neither {names.of('chosen')!r} and {names.of('rejected')!r} nor {key!r}, only {show(has)}; {_CORRECT}"
        )
    if not isinstance(label, bool):
        raise ValueError(f"{key} must be true or false, not {show(repr(label))}; correct the line")
    is_alpaca = optional(record, names.of("instruction")) is not None
    field = "output" if is_alpaca else "completion"
    messages = _messages_key(record, names)
    if messages is not None and optional(record, names.of(field)) is None:
        turns = _messages(record, messages, names)
        asked = max((index for index, turn in enumerate(turns) if turn.message["role"] == "user"), default=-1)
        prompt, answer, key = turns[: asked + 1], turns[asked + 1 :], messages
    else:
        prompt, answer, key = _prompt(record, names), _said_at(record, field, names), names.of(field)
    _check_answer(answer, key)
    return prompt, answer, label


def _check_answer(answer: list[Turn], key: str) -> None:
    """Refuses an answer that the assistant does not end, or of which nothing is learnt."""
    if not answer or answer[-1].message["role"] not in ANSWERING:
        role = answer[-1].message["role"] if answer else "user"
        raise ValueError(
            f"{key} must end with an answer of the assistant, not with a message of the {role}; correct the line"
        )
    if not any(turn.mark is not False for turn in answer if turn.message["role"] in ANSWERING):
        raise ValueError(f"{key} is marked not to be trained on, so nothing of it is learnt; remove the mark or the line")


def _is_whole(record: Mapping[str, object], turns: list[Turn], names: Names) -> bool:
    """Returns whether turns have the prompt in them, rather than follow it."""
    if turns[0].message["role"] not in (*ANSWERING, "tool"):
        return True
    has_question = any(turn.message["role"] == "user" for turn in turns)
    return has_question and (not _has_prompt(record, names) or _begin_with_prompt(record, turns, names))


def _begin_with_prompt(record: Mapping[str, object], turns: list[Turn], names: Names) -> bool:
    """Returns whether turns begin with the record's `prompt`; a text may be any of their questions."""
    key = names.of("prompt")
    if not isinstance(own := optional(record, key), str):
        return own is not None and _are_beginning(_messages(record, key, names), turns)
    if _OPEN_DIALOG.fullmatch(own) and _are_beginning(_dialog(own, key)[:-1], turns):
        return True
    return own.strip() in [content_of(turn.message).strip() for turn in turns if turn.message["role"] == "user"]


def _are_beginning(some: list[Turn], turns: list[Turn]) -> bool:
    return _what(some) == _what(turns[: len(some)])


def _what(turns: list[Turn]) -> list[tuple[str, str]]:
    """Returns who says what; messages may have further fields, such as scores, in which those of both sides differ."""
    return [(turn.message["role"], text_of(turn.message)) for turn in turns]


def _prompt(record: Mapping[str, object], names: Names) -> list[Turn]:
    """Returns the turns of a record's prompt."""
    key = names.of("prompt")
    if optional(record, key) is not None or "prompt" in names.record:
        value = _value(record, key)
        if not isinstance(value, str):
            return _messages(record, key, names)
        return _dialog(value, key)[:-1] if _OPEN_DIALOG.fullmatch(value) else [said("user", value, key)]
    if (messages := _messages_key(record, names)) is not None:
        return _messages(record, messages, names)
    if optional(record, names.of("instruction")) is not None:
        return list(asked_at(record, names))
    raise ValueError(f"has no {key!r}, {_MESSAGES[0]!r} or 'instruction' before the answer; {_CORRECT}")


def _has_prompt(record: Mapping[str, object], names: Names) -> bool:
    fields = (names.of("prompt"), names.of("instruction"))
    return any(optional(record, key) is not None for key in fields) or _messages_key(record, names) is not None


def _messages_key(record: Mapping[str, object], names: Names) -> str | None:
    """Returns the name of the record's list of messages; None if it has none."""
    own = names.record.get("messages")
    return next((key for key in ((own,) if own else _MESSAGES) if optional(record, key) is not None), None)


def _said_at(record: Mapping[str, object], field: str, names: Names) -> list[Turn]:
    """Returns the turns in a field: messages, one message, a dialog in one text, or an answer."""
    key = names.of(field)
    value = _value(record, key)
    if isinstance(value, dict):
        return [Turn(*read_message(cast(dict[str, object], value), names, key))]
    if not isinstance(value, str):
        return _messages(record, key, names)
    if _is_dialog(record, value, names):
        return _dialog(value, key)
    return [said("assistant", value, key)]


def _is_dialog(record: Mapping[str, object], text: str, names: Names) -> bool:
    """Returns whether a text is a whole dialog, rather than an answer in which somebody is quoted."""
    if _DIALOG.fullmatch(text) is None:
        return False
    prompt = optional(record, names.of("prompt"))
    return text.startswith(prompt) if isinstance(prompt, str) else not _has_prompt(record, names)


def _dialog(text: str, key: str) -> list[Turn]:
    """Returns the turns of a text such as `\\n\\nHuman: 2 + 2?\\n\\nAssistant: 4`."""
    _, *parts = _SPEAKER.split(f"\n\n{text.lstrip()}")
    speakers = {"Human": "user", "Assistant": "assistant"}
    return [said(speakers[who], what.strip(), key) for who, what in zip(parts[::2], parts[1::2], strict=True)]


def _messages(record: Mapping[str, object], key: str, names: Names) -> list[Turn]:
    turns = list(messages_at(record, "messages", names._replace(record={"messages": key})))
    if not turns:
        raise ValueError(f"{key} has no messages; correct or remove the line")
    return turns


def _value(record: Mapping[str, object], key: str) -> object:
    try:
        value = value_at(record, key)
    except NoSuchKeyError as error:
        raise ValueError(f"{error}; {_CORRECT}") from error
    if value is None or (not isinstance(value, str | list | dict)):
        raise ValueError(f"{key} must be a text, a message or messages, not {kind_of(value)}; correct or remove the line")
    return value
