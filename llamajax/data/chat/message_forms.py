"""Brings messages into the form that a chat template takes: thoughts, tool calls and their IDs, texts or parts."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.chat.left_out import left_out
from llamajax.data.documents.messages import REASONING, Message, content_of
from llamajax.errors import DataError, show

_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*(.*)", re.DOTALL)
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def as_taken(
    template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]
) -> tuple[list[Message], dict[int, str]]:
    """Returns the messages in the form that the template takes.

    Returns:
        The messages, and by index the thoughts that belong behind the generation prompt, which opens them.

    Raises:
        DataError: the template would leave something out.
    """
    for index, message in enumerate(messages):
        if message.get("tool_calls") and not template.takes_calls:
            raise _left_out(template, f"messages[{index}].tool_calls")
    taken = [message_as_taken(template, message) for message in messages]
    if any(message.get("tool_calls") for message in taken) and not template.takes_any_id:
        taken = _with_short_ids(taken)
    thoughts = {}
    if template.thoughts_in == "prompt":
        apart = [_without_thought(message) for message in taken]
        taken = [message for message, _ in apart]
        thoughts = {index: thought for index, (_, thought) in enumerate(apart) if thought}
    if what := left_out(template, taken, variables):
        raise _left_out(template, what)
    return taken, thoughts


def _left_out(template: ChatTemplate, what: str) -> DataError:
    return DataError(f"{template.where}: chat template: does not write {what}; name a template that does, or remove it")


def message_as_taken(template: ChatTemplate, message: Message) -> Message:
    """Returns a message in the form that the template takes, except for what `as_taken` sees to."""
    if message["role"] == "function_call":
        message = {**message, "role": "assistant"}
        if template.takes_calls:
            calls = _named_calls(content_of(message))
            message = {**message, "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}
    if message.get("reasoning_content") and template.thoughts_in == "text":
        message = _with_thought_in_text(message)
    content = message.get("content")
    if isinstance(content, list) and not template.takes_parts:
        message = {**message, "content": content_of(message)}
    elif content and isinstance(content, str) and not template.takes_text and template.takes_parts:
        message = {**message, "content": [{"type": "text", "text": content}]}
    calls = message.get("tool_calls") or []
    if calls and content is None:
        message = {**message, **template.without_content}
    if any(isinstance(_function(call).get("arguments"), str) for call in calls) and not template.takes_json_arguments:
        message = {**message, "tool_calls": list(map(_with_object, calls))}
    return message


def _with_thought_in_text(message: Message) -> Message:
    """Returns the message with its thought in the content, in the tags that models without a field for it write."""
    content, thought = content_of(message), message["reasoning_content"]
    if "</think>" in content:
        return message
    others = {key: value for key, value in message.items() if key not in REASONING}
    return {**others, "content": f"<think>\n{thought.strip()}\n</think>\n\n{content}"}


def _without_thought(message: Message) -> tuple[Message, str]:
    """Returns the message without its thought, and the thought, from its own field or from tags in the content."""
    if message["role"] != "assistant":
        return message, ""
    others = {key: value for key, value in message.items() if key not in REASONING}
    thought, content = message.get("reasoning_content") or "", content_of(message)
    if not thought and (found := _THOUGHT.fullmatch(content)):
        thought, others["content"] = found.groups()
    return others, thought.strip()


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with IDs of nine letters and digits, equal for a call and its result; missing ones are made."""
    changed, waiting = [], list[str]()
    for index, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            ids = [_short(call.get("id"), f"{index} {number}") for number, call in enumerate(calls)]
            waiting = list(ids)
            message = {**message, "tool_calls": [{**call, "id": own} for call, own in zip(calls, ids, strict=True)]}
        elif message["role"] == "tool":
            following = waiting.pop(0) if waiting else None
            message = {**message, "tool_call_id": _short(message.get("tool_call_id") or following, f"{index}")}
        changed.append(message)
    return changed


def _short(given: object, otherwise: str) -> str:
    """Returns an ID if it has nine letters and digits, else nine of its hash, or of the hash of `otherwise` if there is
    none."""
    name = str(given) if given else otherwise
    return name if _SHORT_ID.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:9]


def _named_calls(text: str) -> list[dict[str, Any]]:
    """Returns the calls in a `function_call` message of ShareGPT data: one, or a list."""
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    calls = given if isinstance(given, list) else [given]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        rule = 'must be {"name": ..., "arguments": ...}, or a list of these'
        raise DataError(f"a turn of function_call {rule}, not {show(text)}; correct or remove it")
    return calls


def _function(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Returns the call with JSON arguments parsed to an object, as transformers' documentation asks for."""
    function = _function(call)
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if _function(call) is not call else function
