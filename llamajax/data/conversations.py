"""Lines of chat data to conversations, in the three forms that they are commonly written in."""

from typing import NamedTuple, cast

from llamajax.config.data import ChatFormat

Message = dict[str, str]
"""`role` (system, user, assistant or tool) and `content`."""

_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_CHANGE_THE_MEANING = ("tool_calls", "function_call", "tools", "functions", "history", "weight")
"""Fields that some data have and that are not learnt rightly when they are left out."""


class Conversation(NamedTuple):
    """What was said, and where it is written."""

    messages: list[Message]
    where: object
    """`file:line`."""


def messages_of(record: dict[str, object], chat_format: ChatFormat) -> list[Message]:
    """The conversation in a line of chat data.

    - `messages` (OpenAI): `{"messages": [{"role": "user", "content": "..."}, ...]}`.
    - `sharegpt`: `{"conversations": [{"from": "human", "value": "..."}, ...]}`, and perhaps `system`.
    - `alpaca` (Stanford): `{"instruction": "...", "output": "..."}`, and perhaps `input`, which goes a blank line below the
      instruction, and `system`.

    Raises:
        ValueError: `field: rule; remedy`, if it is none, or the assistant takes no part in it.
    """
    _refuse_other_fields(record)
    if chat_format == "alpaca":
        question = "\n\n".join(part for part in (_text(record, "instruction"), _text(record, "input", "")) if part)
        answer = _text(record, "output")
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    elif chat_format == "sharegpt":
        messages = _list(record, "conversations", "from", "value", _SHAREGPT_ROLES)
    else:
        messages = _list(record, "messages", "role", "content", _ROLES)
    if chat_format != "messages" and (system := _text(record, "system", "")):
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("the assistant says nothing in this conversation, so there is nothing to learn; remove the line")
    return messages


def _list(record: dict[str, object], key: str, role_key: str, content_key: str, roles: dict[str, str]) -> list[Message]:
    turns = _value(record, key)
    if not isinstance(turns, list):
        raise ValueError(f"{key!r} must be a list, not {_kind(turns)}; correct the line")
    messages = []
    for index, turn in enumerate(turns):
        place = f"{key}[{index}]"
        if not isinstance(turn, dict):
            raise ValueError(f"{place} must be an object, not {_kind(turn)}; correct the line")
        turn = cast(dict[str, object], turn)
        _refuse_other_fields(turn, f"{place}.")
        role = _text(turn, role_key, where=f"{place}.")
        if role not in roles:
            raise ValueError(f"{place}.{role_key} must be one of {', '.join(roles)}, not {role[:40]!r}; correct the line")
        messages.append({"role": roles[role], "content": _text(turn, content_key, where=f"{place}.")})
    return messages


def _text(record: dict[str, object], key: str, default: str | None = None, where: str = "") -> str:
    value = record.get(key, default) if default is not None else _value(record, key, where)
    if default is not None and value is None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{where}{key} must be a string, not {_kind(value)}; correct or remove the line")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}{key} has half a surrogate pair, which is no character; correct the line") from error
    return value


def _value(record: dict[str, object], key: str, where: str = "") -> object:
    if key not in record:
        known = ", ".join(repr(name)[:40] for name in list(record)[:8]) or "nothing"
        place = f"{where[:-1]} " if where else ""
        raise ValueError(f"{place}has no {key!r}, only {known}; correct the line, or set another chat_format")
    return record[key]


def _refuse_other_fields(record: dict[str, object], where: str = "") -> None:
    for key in _CHANGE_THE_MEANING:
        if record.get(key) not in (None, [], {}, ""):
            raise ValueError(f"{where}{key} cannot be learnt; write it into the messages' text, or remove it")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
