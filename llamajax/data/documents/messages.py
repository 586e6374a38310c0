"""Reads one message of a conversation: role, content, thoughts and tool calls, under the names that its source has."""

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from llamajax.config.conversations import ChatForm
from llamajax.data.documents.columns import NoSuchKeyError, value_at
from llamajax.data.documents.turn_marks import learnt_mark, says_about_learning

Message = dict[str, Any]
"""A message with `role` (system, user, assistant, tool or function_call) and `content`: text, or a list of text parts.

A message with tool calls may lack `content`. Other fields that a chat template may read, such as `tool_calls` and
`reasoning_content`, are kept.
"""

ANSWERING = ("assistant", "function_call")
"""Roles of the assistant's messages."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields for the assistant's thoughts before an answer; templates in transformers find them under the first two names."""
NOTHING = (None, "", [], {})
"""Values of fields that are there but say nothing."""


class Names(NamedTuple):
    """Names of fields and roles in a source."""

    record: dict[str, str]
    """Name of each field of a record that is not called by its own name."""
    roles: Mapping[str, str]
    """Role by each of its names."""
    role: tuple[str, ...]
    """Names of a message's role; the first one with a value counts."""
    content: tuple[str, ...]
    """Names of its content."""
    reasoning: tuple[str, ...]
    """Names of its thoughts."""
    tool_calls: str
    train: str | None
    """Name of its mark, beside those with one meaning."""
    read: frozenset[str | None]
    """Names of all fields of a message that are not handed on as they are."""

    def of(self, field: str) -> str:
        """Returns the name of a field of a record."""
        return self.record.get(field, field)


@functools.lru_cache
def names_of(form: ChatForm) -> Names:
    """Returns the names in a source of this form."""
    given, is_sharegpt = form.fields.given, form.chat_format == "sharegpt"
    role, content = ("from", "role") if is_sharegpt else ("role", "from"), ("value", "content")
    role = (given["role"],) if "role" in given else role
    content = (given["content"],) if "content" in given else content if is_sharegpt else content[::-1]
    reasoning = (given["reasoning"],) if "reasoning" in given else REASONING
    tool_calls, train = given.get("tool_calls", "tool_calls"), given.get("train")
    usual = ("role", "content", "from", "value", "tool_calls", "function_call", *REASONING)
    return Names(
        record=({"messages": "conversations"} if is_sharegpt else {}) | given,
        roles=form.roles.roles,
        role=role,
        content=content,
        reasoning=reasoning,
        tool_calls=tool_calls,
        train=train,
        read=frozenset({*usual, *role, *content, *reasoning, tool_calls, train}),
    )


def read_message(turn: Mapping[str, object], names: Names, place: str) -> tuple[Message, bool | None]:
    """Returns a message as templates expect it, and its mark: whether it is trained on, or None without a mark.

    Fields without a value are left out, as in transformers, and so are marks.

    Raises:
        ValueError: `field: rule; remedy`.
    """
    for first, *others in (names.role, names.content):
        for other in others:
            if turn.get(first) is not None and turn.get(other) not in (None, turn[first]):
                raise ValueError(f"{place} has both {first!r} and {other!r}; keep one of them")
    role_key, content_key = (_with_value(turn, several) for several in (names.role, names.content))
    role = text_at(turn, role_key, where=f"{place}.")
    if role not in names.roles:
        known = ", ".join(names.roles)
        raise ValueError(
            f"{place}.{role_key} must be one of {known}, not {role[:40]!r}; correct the line, or name the role in roles"
        )
    mark = learnt_mark(turn, f"{place}.", names.train)
    if mark and names.roles[role] not in ANSWERING:
        raise ValueError(f"{place} is marked for training, but only the assistant's messages can be; remove the mark")
    return _message(turn, names.roles[role], content_key, names, f"{place}."), mark


def _with_value(turn: Mapping[str, object], names: tuple[str, ...]) -> str:
    """Returns the first of the names with a value, or the first one."""
    return next((name for name in names if turn.get(name) is not None), names[0])


def _message(turn: Mapping[str, object], role: str, content_key: str, names: Names, where: str) -> Message:
    fields = {
        key: value
        for key, value in turn.items()
        if value is not None and key not in names.read and not says_about_learning(key)
    }
    calls = _calls(turn, names.tool_calls, where)
    thoughts = {name: text_at(turn, name, where=where) for name in names.reasoning if turn.get(name) is not None}
    if any(thoughts.values()):  # ignore empty fields
        thoughts = {name: thought for name, thought in thoughts.items() if thought}
    if len(set(thoughts.values())) > 1:
        raise ValueError(f"{where}{' and '.join(thoughts)} differ; keep one of them")
    message: Message = {"role": role}
    if turn.get(content_key) is not None or not calls:
        message["content"] = _content(turn, content_key, where)
    message |= fields
    if calls:
        message["tool_calls"] = calls
    for name, thought in thoughts.items():
        message |= {"reasoning_content": thought, "thinking": thought} | ({name: thought} if name in REASONING else {})
    if fields or calls:
        check_characters([fields, calls], where[:-1])
    return message


def _content(turn: Mapping[str, object], key: str, where: str) -> str | list[dict[str, str]]:
    content = turn.get(key)
    if not isinstance(content, list):
        return text_at(turn, key, where=where)
    for index, part in enumerate(content):
        place = f"{where}{key}[{index}]"
        match part:
            case {"type": "text", "text": str(text)}:
                learnt_or_not = learnt_mark(part, f"{place}.")
                if learnt_or_not is not None:
                    raise ValueError(f"{place} is marked, but only whole messages can be; mark the message instead")
                check_characters(text, place)
            case _:
                kind = part.get("type") if isinstance(part, dict) else kind_of(part)
                raise ValueError(f'{place} must be {{"type": "text", "text": "..."}}, not {kind!r:.40}; remove it')
    return [{"type": "text", "text": part["text"]} for part in content]


def _calls(turn: Mapping[str, object], key: str, where: str) -> list[dict[str, Any]]:
    """Returns the tool calls of a turn: a list, a JSON text of one, or OpenAI's older `function_call`."""
    calls, call = parsed(turn.get(key) or [], f"{where}{key}"), turn.get("function_call")
    if call not in NOTHING:
        if calls:
            raise ValueError(f"{where}function_call and {key} are both set; keep one of them")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError(f"{where}function_call must be an object with a name; correct the line")
        calls = [{"type": "function", "function": call}]
    if not isinstance(calls, list):
        raise ValueError(f"{where}{key} must be a list, not {kind_of(calls)}; correct the line")
    for index, one in enumerate(calls):
        match one:
            case {"function": {"name": str()}} | {"name": str()}:
                pass
            case _:
                raise ValueError(f"{where}{key}[{index}] must have a function with a name; correct the line")
    return calls


def content_of(message: Message) -> str:
    """Returns the text of a message's content; several parts become a line each, as servers join them."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def text_of(message: Message) -> str:
    """Returns all text of a message: its reasoning, its content, and its tool calls as JSON."""
    calls = message.get("tool_calls")
    said = (message.get("reasoning_content"), content_of(message), json.dumps(calls) if calls else "")
    return "\n".join(text for text in said if text)


def parsed(value: Any, where: str) -> Any:
    """Returns the value, or what it holds as JSON text; tables and LLaMA-Factory's data keep lists as text."""
    if not isinstance(value, str) or value.strip()[:1] not in ("", "[", "{"):
        return value
    try:
        return json.loads(value) if value.strip() else []
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON; correct the line") from error


def text_at(record: Mapping[str, object], key: str, default: str | None = None, where: str = "") -> str:
    """Returns the text under a key; `default` where there is none; raises `ValueError` if it is no text."""
    value = value_of(record, key, where) if default is None else optional(record, key)
    if default is not None and value is None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{where}{key} must be a string, not {kind_of(value)}; correct or remove the line")
    check_characters(value, f"{where}{key}")
    return value


def check_characters(value: object, where: str) -> None:
    """Refuses half a surrogate pair in a text, or anywhere in a JSON value."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half a surrogate pair, which is not a character; correct the line") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply; remove the line") from error


def value_of(record: Mapping[str, object], key: str, where: str = "") -> object:
    """Returns the value under a key; raises `ValueError` if there is none."""
    if key in record:
        return record[key]
    remedy = "correct the line" if where else "correct the line, or set another chat_format or fields"
    try:
        return value_at(record, key)
    except NoSuchKeyError as error:
        raise ValueError(f"{where[:-1]}{' ' if where else ''}{error}; {remedy}") from error


def optional(record: Mapping[str, object], key: str) -> Any:
    """Returns the value under a key, or None if there is none."""
    try:
        return record.get(key) if "." not in key else value_at(record, key)
    except NoSuchKeyError:
        return None


def kind_of(value: object) -> str:
    """Returns the name of a value's type, as messages show it."""
    return "null" if value is None else type(value).__name__
