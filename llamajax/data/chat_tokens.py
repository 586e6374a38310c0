"""Conversations to token ids, and which of them are learnt."""

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from llamajax.data.chat import ChatTemplate, Rendered
from llamajax.data.conversations import Conversation, Message, content_of
from llamajax.data.left_out import left_out
from llamajax.data.tokenizer_base import Tokenizer
from llamajax.errors import DataError, show

TRAINING_DATE = "2024-07-26"
"""Today, for a template that writes the date into conversations that are learnt: always the same, so that the data are."""

_MARK_IT = (
    "put {% generation %} and {% endgeneration %} around it, or name a file of configs/chat_templates as data.chat_template"
)
_SAID = "Certainly."
_TALK: list[Message] = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": _SAID}]


class Encoded(NamedTuple):
    """A conversation as tokens."""

    ids: Int32[np.ndarray, "T"]
    learnt: Bool[np.ndarray, "T"]
    """What the assistant says, the token that ends its turn included."""


class _Answer(NamedTuple):
    """A turn of the assistant's that is learnt."""

    after: str
    """The text up to its end."""
    spans: list[tuple[int, int]]
    """Where in that text it lies, (start, end) of each stretch."""


def encode_conversation(template: ChatTemplate, tokenizer: Tokenizer, conversation: Conversation) -> list[Encoded]:
    """The tokens of a conversation, and which of them are learnt: those of the text that the template writes, which
    begins it with the bos token or does not, as for transformers' `apply_chat_template`.

    What the assistant says lies in the template's `{% generation %}` blocks, or, if there are none, between what the
    template writes up to a turn, with a generation prompt, and what it writes when the turn is there. Each stretch is
    encoded by itself, so that the assistant's tokens follow the prompt's as they do when it is used.

    A template that writes an answer otherwise once the conversation goes on, as those of reasoning models do, which then
    leave out what was thought, gives several: each answer is learnt once, behind what is served before it.

    Raises:
        DataError: the template refuses the messages, does not write all of them, or it cannot be told what the assistant
            says.
    """
    messages = _as_taken(template, conversation)
    turns = [index for index, is_learnt in enumerate(conversation.is_learnt) if is_learnt]
    found = _marked_answers(template, messages, turns, conversation.variables) if template.has_generation_blocks else None
    text, answers = found or _answers(template, messages, turns, conversation.variables)
    samples: list[Encoded] = []
    while answers:
        if spans := [span for answer in answers if text.startswith(answer.after) for span in answer.spans]:
            samples.append(_encode(tokenizer, text, spans))
        answers = [answer for answer in answers if not text.startswith(answer.after)]
        text = answers[-1].after if answers else ""
    return samples[::-1]


def encode_messages(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], variables: dict[str, Any] | None = None
) -> Int32[np.ndarray, "T"]:
    """The tokens of a conversation up to where the assistant's next turn begins: those that `encode_conversation` has
    before that turn.

    Raises:
        DataError: the template refuses the messages, or does not write all of them.
    """
    variables = variables or {}
    messages = _as_taken(template, Conversation([*messages], [False] * len(messages), variables))
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    whole, *others = _render(template, messages, [(len(messages), True), *_prefixes(turns)], variables, date=None)
    spans: list[tuple[int, int] | None] = [*whole.marks]
    if not whole.marks:
        for turn, (before, prompt, after) in zip(turns, _in_threes(others), strict=True):
            spans.append(_span(before, prompt, after, messages[turn]) if whole.text.startswith(after) else None)
    return _encode(tokenizer, whole.text, [] if None in spans else [span for span in spans if span]).ids


def end_token(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The special token that the template writes behind what the assistant says, if it does: generation stops at it."""
    for token in tokenizer.encode_template(_behind_answer(template)).tolist():
        if tokenizer.token_bytes[token] == 0:
            return token
        if tokenizer.decode([token]).strip():
            return None
    return None


def _behind_answer(template: ChatTemplate) -> str:
    """What the template writes behind an answer."""
    talk = [_message_as_taken(template, message) for message in _TALK]
    _, said, after = template.render(talk, add_generation_prompt=False).rpartition(_SAID)
    return after if said else ""


def end_problem(template: ChatTemplate, tokenizer: Tokenizer) -> str | None:
    """What is wrong if no answer teaches where to stop: none has a token that is learnt and that generation stops at."""
    try:
        samples = encode_conversation(template, tokenizer, Conversation(_TALK, [False, True], {}))
        end = end_token(template, tokenizer)
    except DataError:  # it wants other talks; what is wrong with those is told where they are read
        return None
    learnt = {token for sample in samples for token in sample.ids[sample.learnt].tolist()}
    if learnt & {end, tokenizer.eos_id}:
        return None
    place = f"{template.where}: chat template:"
    if end is None:
        name = tokenizer.eos_token or f"token {tokenizer.eos_id}"
        return f"{place} writes no token behind an answer that generation stops at, so no end is learnt; write {name} there"
    name = _behind_answer(template).split()[0]
    return f"{place} has {name}, where generation stops, outside of {{% generation %}}, so no end is learnt; put it inside"


def _as_taken(template: ChatTemplate, conversation: Conversation) -> list[Message]:
    """The messages in the form that the template takes.

    Raises:
        DataError: it would leave something out that is in them.
    """
    for index, message in enumerate(conversation.messages):
        if message.get("tool_calls") and not template.takes_calls:
            raise _left_out(template, f"messages[{index}].tool_calls")
    messages = [_message_as_taken(template, message) for message in conversation.messages]
    if what := left_out(template, messages, conversation.variables):
        raise _left_out(template, what)
    return messages


def _left_out(template: ChatTemplate, what: str) -> DataError:
    return DataError(f"{template.where}: chat template: does not write {what}; name a template that does, or remove it")


def _message_as_taken(template: ChatTemplate, message: Message) -> Message:
    if message["role"] == "function_call":
        message = {**message, "role": "assistant"}
        if template.takes_calls:
            calls = _named_calls(content_of(message))
            message = {**message, "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}
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


def _named_calls(text: str) -> list[dict[str, Any]]:
    """The calls in a `function_call` message of ShareGPT data: one, or a list."""
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    calls = given if isinstance(given, list) else [given]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        rule = 'must be {"name": ..., "arguments": ...}, or a list of such'
        raise DataError(f"a turn of function_call {rule}, not {show(text)}; correct or remove it")
    return calls


def _function(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """The call with arguments as an object, as transformers' documentation asks for, where they are JSON of one."""
    function = _function(call)
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if _function(call) is not call else function


def _render(
    template: ChatTemplate,
    messages: Sequence[Message],
    renders: Sequence[tuple[int, bool]],
    variables: dict[str, Any],
    date: str | None = TRAINING_DATE,
) -> list[Rendered]:
    try:
        return list(template.render_prefixes(messages, renders, date, variables))
    except DataError as error:
        if len(messages) > 1 and messages[0]["role"] == "system" and _is_taken(template, messages[1:], variables):
            remedy = "it takes no system message: put that into the first question, or name a template that takes one"
            raise DataError(f"{str(error).rpartition(';')[0]}; {remedy}") from error
        raise


def _is_taken(template: ChatTemplate, messages: Sequence[Message], variables: dict[str, Any]) -> bool:
    try:
        next(template.render_prefixes(messages, [(len(messages), False)], TRAINING_DATE, variables))
    except DataError:
        return False
    return True


def _marked_answers(
    template: ChatTemplate, messages: Sequence[Message], turns: Sequence[int], variables: dict[str, Any]
) -> tuple[str, list[_Answer]] | None:
    """As `_answers`, told by generation blocks; None if the template writes none in this conversation."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    renders = [(len(messages), False), *((answer + 1, False) for answer in answers)]
    whole, *until = _render(template, messages, renders, variables)
    if not whole.marks:
        return None
    numbers = [0, *(len(marks) for _, marks in until)]  # of blocks before each answer
    found = {answer: _Answer(text, marks[n:]) for answer, (text, marks), n in zip(answers, until, numbers, strict=False)}
    if all(found[turn].spans for turn in turns):
        return whole.text, [found[turn] for turn in turns]
    if len(turns) < len(answers):
        what = "which message a {% generation %} block is of cannot be told, since not every answer has one"
        raise _cannot_tell(template, what, "put one around each, or remove the marks of messages")
    return whole.text, [_Answer(whole.text, whole.marks)]


def _answers(
    template: ChatTemplate, messages: Sequence[Message], turns: Sequence[int], variables: dict[str, Any]
) -> tuple[str, list[_Answer]]:
    """The conversation as text, and the turns that are learnt, told by what the template writes before and with them."""
    whole, *others = _render(template, messages, [(len(messages), False), *_prefixes(turns)], variables)
    found = []
    for turn, texts in zip(turns, _in_threes(others), strict=True):
        before, prompt, after = texts
        span = _span(before, prompt, after, messages[turn])
        if span is None:
            what = "what the assistant says cannot be found in what it writes"
            if prompt != before and prompt.startswith(before):
                began = prompt[len(before) :][-40:]
                what = f"begins an answer with {began!r} when it is used, but not where the answer is there"
            raise _cannot_tell(template, what, _MARK_IT)
        found.append(_Answer(after, [span]))
    return whole.text, found


def _cannot_tell(template: ChatTemplate, what: str, remedy: str) -> DataError:
    return DataError(f"{template.where}: chat template: {what}; {remedy}")


def _prefixes(turns: Sequence[int]) -> list[tuple[int, bool]]:
    """What is rendered to find each of these turns: the messages before it, without and with a prompt, and those with it."""
    return [render for turn in turns for render in ((turn, False), (turn, True), (turn + 1, False))]


def _in_threes(rendered: Sequence[Rendered]) -> list[tuple[str, str, str]]:
    texts = [one.text for one in rendered]
    return list(zip(texts[::3], texts[1::3], texts[2::3], strict=True))


def _span(before: str, prompt: str, after: str, message: Message) -> tuple[int, int] | None:
    """Where an assistant's turn lies in a text, (start, end), or None if that cannot be told.

    Args:
        before: the text without the turn.
        prompt: as `before`, with a generation prompt.
        after: the text with the turn.
        message: the turn.
    """
    content = content_of(message).strip()
    said = after[len(prompt) :]
    is_prompted = prompt != before or said.lstrip().startswith(content)  # Llama 2 has no generation prompt and needs none
    if not (after.startswith(prompt) and is_prompted):
        return None
    # Space after the mark that ends a turn is not learnt: when the model is used, it has stopped there.
    stripped = said.rstrip()
    has_end_mark = not (content and stripped.endswith(content))
    return len(prompt), len(prompt) + len(stripped if has_end_mark else said)


def _encode(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
    """The tokens of a text of which these stretches are learnt; each stretch is encoded by itself."""
    cuts = [0, *itertools.chain.from_iterable(spans), len(text)]
    parts = tokenizer.encode_template_parts([text[a:b] for a, b in itertools.pairwise(cuts)])
    learnt = [np.full(len(part), index % 2 == 1) for index, part in enumerate(parts)]
    return Encoded(np.concatenate(parts), np.concatenate(learnt))
