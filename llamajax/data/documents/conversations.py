"""Converts records of chat data, in the common formats, to conversations."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from llamajax.config.data import ChatFormat
from llamajax.data.documents.turn_marks import check_record, learnt_mark, says_about_learning

Message = dict[str, Any]
"""A message with `role` (system, user, assistant, tool or function_call) and `content`: text, or a list of text parts.

A message with tool calls may lack `content`. Other fields that a chat template may read, such as `tool_calls` and
`reasoning_content`, are kept.
"""

_ROLES = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "tool": "tool", "ipython": "tool", "observation": "tool",
    "function": "tool", "tool_response": "tool", "function_call": "function_call", "tool_call": "function_call",
}  # fmt: skip
ANSWERING = ("assistant", "function_call")
"""Roles of the assistant's messages."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields for the assistant's thoughts before an answer; templates in transformers find them under the first two names."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
BESIDE_MESSAGES = ("system", "tools", "functions", "chat_template_kwargs", "history", *_MEDIA)
"""Fields of a record that belong to the content of its messages; some of them are refused there."""
_NOTHING = (None, "", [], {})


class Conversation(NamedTuple):
    """Messages of a conversation, which of them are trained on, and where it is written."""

    messages: list[Message]
    is_learnt: list[bool]
    """Whether each message is trained on."""
    variables: dict[str, Any]
    """Other variables of the chat template: `tools`, and the record's `chat_template_kwargs`."""
    where: object = None
    """`file:line`."""

    @property
    def text(self) -> str:
        """All that is said, or an empty text if none of it is trained on."""
        answers = (message for message, is_learnt in zip(self.messages, self.is_learnt, strict=True) if is_learnt)
        return "\n".join(map(text_of, self.messages)) if any(text_of(answer).strip() for answer in answers) else ""


def content_of(message: Message) -> str:
    """Returns the text of a message's content; several parts become a line each, as servers join them."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def text_of(message: Message) -> str:
    """Returns all text of a message: its reasoning, its content, and its tool calls as JSON."""
    calls = message.get("tool_calls")
    said = (message.get("reasoning_content"), content_of(message), json.dumps(calls) if calls else "")
    return "\n".join(text for text in said if text)


def conversation_of(record: Mapping[str, object], chat_format: ChatFormat, where: object = None) -> Conversation:
    """Returns the conversation in a record of chat data.

    - `messages` (OpenAI): `{"messages": [{"role": "user", "content": "..."}, ...]}`.
    - `sharegpt`: `{"conversations": [{"from": "human", "value": "..."}, ...]}`.
    - `alpaca` (Stanford): `{"instruction": "...", "output": "..."}`, optionally with `input`, which goes a blank line
      below the instruction, and `history`, a list of [question, answer].
    - `prompt_completion`: `{"prompt": "...", "completion": "..."}`, a question and its answer, or two lists of messages;
      only those of the second list are trained on.

    All may have `system`, `tools` (or `functions`) and `chat_template_kwargs`.

    Raises:
        ValueError: `field: rule; remedy`, if the record is not a conversation or has no message of the assistant.
    """
    conversation = _conversation(record, chat_format, where)
    if not any(message["role"] in ANSWERING for message in conversation.messages):
        raise ValueError("the assistant says nothing in this conversation, so there is nothing to train on; remove the line")
    return conversation


def question_of(record: Mapping[str, object]) -> Conversation:
    """Returns the conversation to be answered in a record of format `messages`; raises the errors of `conversation_of`."""
    return _conversation(record, "messages", None)


def _conversation(record: Mapping[str, object], chat_format: ChatFormat, where: object) -> Conversation:
    check_record(record)
    for key in _MEDIA if chat_format == "alpaca" else (*_MEDIA, "history"):
        if record.get(key) not in _NOTHING:
            raise ValueError(f"{key} cannot be trained on; write it into the messages' text, or remove it")
    turns = list(_TURNS[chat_format](record))
    if system := _text(record, "system", ""):
        turns = _with_system(turns, system)
    return Conversation([message for message, _ in turns], [mark for _, mark in turns], _variables(record), where)


_Turn = tuple[Message, bool]
"""A message, and whether it is trained on."""


def _messages(record: Mapping[str, object]) -> Iterator[_Turn]:
    return _list(record, "messages", ("role", "content"), ("from", "value"))


def _sharegpt(record: Mapping[str, object]) -> Iterator[_Turn]:
    return _list(record, "conversations", ("from", "value"), ("role", "content"))


def _alpaca(record: Mapping[str, object]) -> Iterator[_Turn]:
    history = record.get("history") or []
    if not isinstance(history, list):
        raise ValueError(f"history must be a list of [question, answer], not {_kind(history)}; correct the line")
    for index, pair in enumerate(history):
        match pair:
            case [str(question), str(answer)]:
                yield _said("user", question, f"history[{index}]")
                yield _said("assistant", answer, f"history[{index}]")
            case _:
                raise ValueError(f"history[{index}] must be [question, answer]; correct the line")
    question = "\n\n".join(part for part in (_text(record, "instruction"), _text(record, "input", "")) if part)
    yield _said("user", question, "instruction")
    yield _said("assistant", _text(record, "output"), "output")


def _prompt_completion(record: Mapping[str, object]) -> Iterator[_Turn]:
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        if isinstance(_value(record, key), list):
            yield from _list(record, key, ("role", "content"), ("from", "value"), by_default=key == "completion")
        else:
            yield _said(role, _text(record, key), key)


_TURNS = {"messages": _messages, "sharegpt": _sharegpt, "alpaca": _alpaca, "prompt_completion": _prompt_completion}


def _said(role: str, content: str, where: str) -> _Turn:
    _check_characters(content, where)
    return {"role": role, "content": content}, role == "assistant"


def _list(
    record: Mapping[str, object], key: str, keys: tuple[str, str], other_keys: tuple[str, str], *, by_default: bool = True
) -> Iterator[_Turn]:
    """Yields the turns in a list of messages with role and content under `keys`, or else under `other_keys`.

    `by_default` says whether the assistant's messages without a mark are trained on.
    """
    turns = _value(record, key)
    if not isinstance(turns, list):
        raise ValueError(f"{key!r} must be a list, not {_kind(turns)}; correct the line")
    for index, turn in enumerate(turns):
        place = f"{key}[{index}]"
        if not isinstance(turn, dict):
            raise ValueError(f"{place} must be an object, not {_kind(turn)}; correct the line")
        turn = cast(dict[str, object], turn)
        role_key, content_key = (
            other if turn.get(name) is None and turn.get(other) is not None else name
            for name, other in zip(keys, other_keys, strict=True)
        )
        for name, other in zip(keys, other_keys, strict=True):
            if turn.get(name) is not None and turn.get(other) not in (None, turn[name]):
                raise ValueError(f"{place} has both {name!r} and {other!r}; keep one of them")
        role = _text(turn, role_key, where=f"{place}.")
        if role not in _ROLES:
            raise ValueError(f"{place}.{role_key} must be one of {', '.join(_ROLES)}, not {role[:40]!r}; correct the line")
        mark = learnt_mark(turn, f"{place}.")
        is_answer = _ROLES[role] in ANSWERING
        if mark and not is_answer:
            raise ValueError(f"{place} is marked for training, but only the assistant's messages can be; remove the mark")
        is_learnt = is_answer and (by_default if mark is None else mark)
        yield _message(turn, _ROLES[role], content_key, f"{place}."), is_learnt


def _message(turn: Mapping[str, object], role: str, content_key: str, where: str) -> Message:
    """Returns a turn as templates expect it: without fields that have no value, as in transformers, and without marks."""
    fields = {
        key: value
        for key, value in turn.items()
        if value is not None
        and key not in ("role", "content", "from", "value", "tool_calls", "function_call", *REASONING)
        and not says_about_learning(key)
    }
    calls = _calls(turn, where)
    thoughts = {name: _text(turn, name, where=where) for name in REASONING if turn.get(name) is not None}
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
    for thought in thoughts.values():
        message |= {"reasoning_content": thought, "thinking": thought, **thoughts}
    _check_characters([fields, calls], where[:-1])
    return message


def _content(turn: Mapping[str, object], key: str, where: str) -> str | list[dict[str, str]]:
    content = turn.get(key)
    if not isinstance(content, list):
        return _text(turn, key, where=where)
    for index, part in enumerate(content):
        place = f"{where}{key}[{index}]"
        match part:
            case {"type": "text", "text": str(text)}:
                learnt_or_not = learnt_mark(part, f"{place}.")
                if learnt_or_not is not None:
                    raise ValueError(f"{place} is marked, but only whole messages can be; mark the message instead")
                _check_characters(text, place)
            case _:
                kind = part.get("type") if isinstance(part, dict) else _kind(part)
                raise ValueError(f'{place} must be {{"type": "text", "text": "..."}}, not {kind!r:.40}; remove it')
    return [{"type": "text", "text": part["text"]} for part in content]


def _calls(turn: Mapping[str, object], where: str) -> list[dict[str, Any]]:
    """Returns the tool calls of a turn, from `tool_calls` or from OpenAI's older `function_call`."""
    calls, call = turn.get("tool_calls") or [], turn.get("function_call")
    if call not in _NOTHING:
        if calls:
            raise ValueError(f"{where}function_call and tool_calls are both set; keep one of them")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError(f"{where}function_call must be an object with a name; correct the line")
        calls = [{"type": "function", "function": call}]
    if not isinstance(calls, list):
        raise ValueError(f"{where}tool_calls must be a list, not {_kind(calls)}; correct the line")
    for index, one in enumerate(calls):
        match one:
            case {"function": {"name": str()}} | {"name": str()}:
                pass
            case _:
                raise ValueError(f"{where}tool_calls[{index}] must have a function with a name; correct the line")
    return calls


def _with_system(turns: list[_Turn], system: str) -> list[_Turn]:
    """Returns the turns with the record's system message in front of them."""
    first = turns[0][0] if turns else {}
    if first.get("role") != "system":
        return [_said("system", system, "system"), *turns]
    if content_of(first) != system:
        raise ValueError("system and the first message, a system message too, differ; remove one of them")
    return turns


def _variables(record: Mapping[str, object]) -> dict[str, Any]:
    given = record.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise ValueError(f"chat_template_kwargs must be an object, not {_kind(given)}; correct the line")
    if taken := {"messages", "tools", "documents", "add_generation_prompt"} & given.keys():
        raise ValueError(f"chat_template_kwargs must not have {', '.join(sorted(taken))}; remove it")
    tools, functions = _tools(record, "tools"), _tools(record, "functions")
    if tools and functions:
        raise ValueError("functions and tools are both set; keep one of them")
    tools = tools or [{"type": "function", "function": function} for function in functions]
    _check_characters([given, tools], "tools or chat_template_kwargs")
    return {**given, **({"tools": tools} if tools else {})}


def _tools(record: Mapping[str, object], key: str) -> list[dict[str, Any]]:
    """Returns the tools under a key, given as a list or, as in LLaMA-Factory's data, as a JSON text of one."""
    tools = record.get(key) or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{key} is not JSON; correct the line") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{key} must be a list of objects; correct the line")
    return tools


def _text(record: Mapping[str, object], key: str, default: str | None = None, where: str = "") -> str:
    value = record.get(key, default) if default is not None else _value(record, key, where)
    if default is not None and value is None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{where}{key} must be a string, not {_kind(value)}; correct or remove the line")
    _check_characters(value, f"{where}{key}")
    return value


def _check_characters(value: object, where: str) -> None:
    """Refuses half a surrogate pair in a text, or anywhere in a JSON value."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half a surrogate pair, which is not a character; correct the line") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply; remove the line") from error


def _value(record: Mapping[str, object], key: str, where: str = "") -> object:
    if key not in record:
        known = ", ".join(repr(name)[:40] for name in list(record)[:8]) or "nothing"
        place, remedy = (f"{where[:-1]} ", "") if where else ("", ", or set another chat_format")
        raise ValueError(f"{place}has no {key!r}, only {known}; correct the line{remedy}")
    return record[key]


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
