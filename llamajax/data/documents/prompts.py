"""Converts records of prompts, in the common forms, to what the model completes; the rest of a record is for rewards."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from llamajax.config.conversations import ChatForm
from llamajax.data.documents.conversations import (
    BESIDE_MESSAGES,
    MEDIA,
    Conversation,
    Turn,
    asked_at,
    assembled,
    check_unread,
    messages_at,
)
from llamajax.data.documents.messages import NOTHING, Names, check_characters, kind_of, names_of, optional, text_of
from llamajax.errors import show

_MESSAGES = ("messages", "conversations")
_ASKING = ("user", "tool")
"""Roles that the assistant answers."""
_REMEDY = "correct the line, or set fields"


class PromptRecord(NamedTuple):
    """A prompt, and the record that it is from."""

    text: str
    """Text of the prompt; empty if nothing is asked."""
    conversation: Conversation | None
    """The messages to answer; None: the text is continued as it is."""
    record: bytes
    """The whole record, as compact JSON in UTF-8."""


def prompt_of(record: Mapping[str, object], form: ChatForm, where: object = None) -> PromptRecord:
    """Returns the prompt in a record.

    It is the first of these that the record has, or that `form` names: `prompt`, a text or messages; `messages` or
    `conversations`; the question of an alpaca record. Messages end before the assistant answers, and may have `system`,
    `tools` (or `functions`) and `chat_template_kwargs` beside them. Marks and labels of the whole record are no concern of
    the prompt: as all other fields, they are for reward functions.

    Raises:
        ValueError: `field: rule; remedy`, if the record has no prompt, or is no JSON.
    """
    names = names_of(form)
    field, key = _where(record, names)
    value = optional(record, key)
    if field == "prompt" and isinstance(value, str):
        beside = (*BESIDE_MESSAGES, names.of("system"), names.of("tools"))
        if said := next((name for name in beside if optional(record, name) not in NOTHING), None):
            remedy = f"write {key} as a list of messages, or remove {said}"
            raise ValueError(f"{said} is not read beside a text, which is continued as it is; {remedy}")
        check_characters(value, key)
        return PromptRecord(value if value.strip() else "", None, _as_json(record))
    check_unread(record, MEDIA if field == "instruction" else (*MEDIA, "history"))
    turns = list(asked_at(record, names)) if field == "instruction" else _messages(record, key, names)
    if (last := turns[-1].message["role"]) not in _ASKING:
        raise ValueError(
            f"{key} must end before the assistant answers, with a message of the user or of a tool, not of the {last};"
            " remove its last message"
        )
    if any(turn.mark for turn in turns):
        raise ValueError("a message of the prompt is marked for training, but only completions are; remove the mark")
    conversation = assembled(turns, record, names, "none-of-prompt", where)
    is_asked = any(message["role"] in _ASKING and text_of(message).strip() for message in conversation.messages)
    text = "\n".join(filter(None, map(text_of, conversation.messages))) if is_asked else ""
    return PromptRecord(text, conversation, _as_json(record))


def _where(record: Mapping[str, object], names: Names) -> tuple[str, str]:
    """Returns the field that holds the record's prompt, and its name there; fields that the source names come first."""
    fields = ("prompt", "messages", "instruction")
    keys = [
        (field, key)
        for field in [field for field in fields if field in names.record] or fields
        for key in (_MESSAGES if field == "messages" and field not in names.record else (names.of(field),))
    ]
    for field, key in keys:
        if optional(record, key) is not None:
            return field, key
    has = ", ".join(repr(name) for name, value in record.items() if value is not None)
    wanted = " or ".join(repr(key) for _, key in keys)
    raise ValueError(f"has no {wanted}, only {show(has) if has else 'nothing'}; {_REMEDY}")


def _messages(record: Mapping[str, object], key: str, names: Names) -> list[Turn]:
    value = optional(record, key)
    if not isinstance(value, str | list):
        raise ValueError(f"{key} must be a text or a list of messages, not {kind_of(value)}; {_REMEDY}")
    turns = list(messages_at(record, "messages", names._replace(record={"messages": key})))
    if not turns:
        raise ValueError(f"{key} has no messages; correct or remove the line")
    return turns


def _as_json(record: Mapping[str, object]) -> bytes:
    check_characters(record, "a field of the record")
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
