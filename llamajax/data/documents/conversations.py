"""Converts records of chat data, in the common formats, to conversations."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from llamajax.config.conversations import ChatForm, TrainOn
from llamajax.data.documents.messages import (
    ANSWERING,
    NOTHING,
    Message,
    Names,
    check_characters,
    content_of,
    kind_of,
    names_of,
    optional,
    parsed,
    read_message,
    text_at,
    text_of,
    value_of,
)
from llamajax.data.documents.turn_marks import MARKS_OF_RECORD, OF_PREFERENCES, check_record

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
BESIDE_MESSAGES = ("system", "tools", "functions", "chat_template_kwargs", "history", *MEDIA)
"""Fields of a record that belong to the content of its messages; some of them are refused there."""


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


class Turn(NamedTuple):
    """A message of a record."""

    message: Message
    mark: bool | None = None
    """Whether it is marked to be trained on; None without a mark."""
    is_prompt: bool = False
    """Whether it belongs to the prompt of a record of prompt and completion."""


def conversation_of(record: Mapping[str, object], form: ChatForm, where: object = None) -> Conversation:
    """Returns the conversation in a record of chat data.

    - `messages` (OpenAI): `{"messages": [{"role": "user", "content": "..."}, ...]}`.
    - `sharegpt`: `{"conversations": [{"from": "human", "value": "..."}, ...]}`.
    - `alpaca` (Stanford): `{"instruction": "...", "output": "..."}`, optionally with `input`, which goes a blank line
      below the instruction, and `history`, a list of [question, answer].
    - `prompt_completion`: `{"prompt": "...", "completion": "..."}`, a question and its answer, or two lists of messages.

    All may have `system`, `tools` (or `functions`) and `chat_template_kwargs`. The names are those of `form`.

    Raises:
        ValueError: `field: rule; remedy`, if the record is not a conversation or has no message of the assistant.
    """
    conversation = _read(record, form, where)
    if not any(message["role"] in ANSWERING for message in conversation.messages):
        raise ValueError("the assistant says nothing in this conversation, so there is nothing to train on; remove the line")
    return conversation


def fields_read(form: ChatForm) -> frozenset[str]:
    """Returns the names of all fields of a record that `conversation_of` looks at."""
    names = names_of(form)
    own = [
        names.of(field) for field in ("messages", "instruction", "input", "output", "prompt", "completion", *BESIDE_MESSAGES)
    ]
    return frozenset([*own, *(name.partition(".")[0] for name in own), *MARKS_OF_RECORD, *OF_PREFERENCES])


def question_of(record: Mapping[str, object]) -> Conversation:
    """Returns the conversation to be answered in a record of format `messages`; raises the errors of `conversation_of`."""
    return _read(record, ChatForm(), None)


def _read(record: Mapping[str, object], form: ChatForm, where: object) -> Conversation:
    names = names_of(form)
    check_record(record)
    check_unread(record, MEDIA if form.chat_format == "alpaca" else (*MEDIA, "history"))
    return assembled(_TURNS[form.chat_format](record, names), record, names, form.learned, where)


def check_unread(record: Mapping[str, object], unread: Iterable[str]) -> None:
    """Refuses a record with a value in a field that cannot be trained on.

    Raises:
        ValueError: `field: rule; remedy`.
    """
    for key in unread:
        if record.get(key) not in NOTHING:
            raise ValueError(f"{key} cannot be trained on; write it into the messages' text, or remove it")


def _messages(record: Mapping[str, object], names: Names) -> Iterator[Turn]:
    return messages_at(record, "messages", names)


def _alpaca(record: Mapping[str, object], names: Names) -> Iterator[Turn]:
    yield from asked_at(record, names)
    yield said("assistant", text_at(record, names.of("output")), names.of("output"))


def asked_at(record: Mapping[str, object], names: Names) -> Iterator[Turn]:
    """Yields the turns of an alpaca record up to its question.

    Raises:
        ValueError: `field: rule; remedy`.
    """
    key = names.of("history")
    history = parsed(optional(record, key) or [], key)
    if not isinstance(history, list):
        raise ValueError(f"{key} must be a list of [question, answer], not {kind_of(history)}; correct the line")
    for index, pair in enumerate(history):
        match pair:
            case [str(question), str(answer)]:
                yield said("user", question, f"{key}[{index}]")
                yield said("assistant", answer, f"{key}[{index}]")
            case _:
                raise ValueError(f"{key}[{index}] must be [question, answer]; correct the line")
    instruction, below = names.of("instruction"), text_at(record, names.of("input"), "")
    question = "\n\n".join(part for part in (text_at(record, instruction), below) if part)
    yield said("user", question, instruction)


def _prompt_completion(record: Mapping[str, object], names: Names) -> Iterator[Turn]:
    yield from turns_at(record, "prompt", names, "user", is_prompt=True)
    yield from turns_at(record, "completion", names, "assistant")


_TURNS = {"messages": _messages, "sharegpt": _messages, "alpaca": _alpaca, "prompt_completion": _prompt_completion}


def turns_at(
    record: Mapping[str, object], field: str, names: Names, role: str, *, is_prompt: bool = False
) -> Iterator[Turn]:
    """Yields the turns in a field that holds a list of messages, or else one text of the given role.

    Raises:
        ValueError: `field: rule; remedy`.
    """
    key = names.of(field)
    if isinstance(value_of(record, key), list):
        yield from messages_at(record, field, names, is_prompt=is_prompt)
    else:
        yield said(role, text_at(record, key), key)._replace(is_prompt=is_prompt)


def messages_at(record: Mapping[str, object], field: str, names: Names, *, is_prompt: bool = False) -> Iterator[Turn]:
    """Yields the turns in a field that holds a list of messages, or a JSON text of one.

    Raises:
        ValueError: `field: rule; remedy`.
    """
    key = names.of(field)
    turns = parsed(value_of(record, key), key)
    if not isinstance(turns, list):
        raise ValueError(f"{key!r} must be a list, not {kind_of(turns)}; correct the line")
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise ValueError(f"{key}[{index}] must be an object, not {kind_of(turn)}; correct the line")
        yield Turn(*read_message(cast(dict[str, object], turn), names, f"{key}[{index}]"), is_prompt)


def assembled(
    turns: Iterable[Turn], record: Mapping[str, object], names: Names, train_on: TrainOn, where: object = None
) -> Conversation:
    """Returns the conversation of these turns, with the system message and the variables of their record.

    Args:
        turns: the turns, in order.
        record: the record that they are from.
        names: names of fields in it.
        train_on: the assistant's messages without a mark that are trained on.
        where: `file:line` of the record.

    Raises:
        ValueError: `field: rule; remedy`.
    """
    system = text_at(record, names.of("system"), "")
    turns = _with_system(list(turns), system, names.of("system")) if system else list(turns)
    answers = [index for index, turn in enumerate(turns) if turn.message["role"] in ANSWERING]
    if train_on == "last":
        answers = answers[-1:]
    elif train_on == "none-of-prompt":
        answers = [index for index in answers if not turns[index].is_prompt]
    is_learnt = [index in answers if turn.mark is None else turn.mark for index, turn in enumerate(turns)]
    return Conversation([turn.message for turn in turns], is_learnt, _variables(record, names), where)


def said(role: str, content: str, where: str) -> Turn:
    """Returns a turn of one text; raises `ValueError` for half a surrogate pair in it."""
    check_characters(content, where)
    return Turn({"role": role, "content": content})


def _with_system(turns: list[Turn], system: str, key: str) -> list[Turn]:
    """Returns the turns with the record's system message in front of them."""
    first = turns[0].message if turns else {}
    if first.get("role") != "system":
        return [said("system", system, key), *turns]
    if content_of(first) != system:
        raise ValueError(f"{key} and the first message, a system message too, differ; remove one of them")
    return turns


def _variables(record: Mapping[str, object], names: Names) -> dict[str, Any]:
    given = parsed(record.get("chat_template_kwargs") or {}, "chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise ValueError(f"chat_template_kwargs must be an object, not {kind_of(given)}; correct the line")
    if taken := {"messages", "tools", "documents", "add_generation_prompt"} & given.keys():
        raise ValueError(f"chat_template_kwargs must not have {', '.join(sorted(taken))}; remove it")
    key = names.of("tools")
    tools, functions = _tools(record, key), _tools(record, "functions")
    if tools and functions:
        raise ValueError(f"functions and {key} are both set; keep one of them")
    tools = tools or [{"type": "function", "function": function} for function in functions]
    check_characters([given, tools], f"{key} or chat_template_kwargs")
    return {**given, **({"tools": tools} if tools else {})}


def _tools(record: Mapping[str, object], key: str) -> list[dict[str, Any]]:
    """Returns the tools under a key, given as a list or, as in LLaMA-Factory's data, as a JSON text of one."""
    tools = parsed(optional(record, key) or [], key)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{key} must be a list of objects; correct the line")
    return tools
