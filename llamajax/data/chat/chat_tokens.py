"""Encodes conversations to token ids and marks the ones that are trained on."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from llamajax.data.chat.answers import cannot_tell, find_answers, spans_before_prompt
from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.chat.message_forms import as_taken, message_as_taken
from llamajax.data.documents.conversations import Conversation
from llamajax.data.documents.messages import Message
from llamajax.data.documents.token_records import Encoded
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import DataError

_SAID = "Certainly."
_TALK: list[Message] = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": _SAID}]
_THOUGHTS: list[Message] = [
    {},
    {"reasoning_content": "I think.", "thinking": "I think."},
    {"content": f"<think>\nI think.\n</think>\n\n{_SAID}"},
]
"""Thoughts that may precede the answer; templates that open every answer with a thought require one."""


def encode_conversation(template: ChatTemplate, tokenizer: Tokenizer, conversation: Conversation) -> list[Encoded]:
    """Encodes the text that the template writes for a conversation, and marks the tokens that are trained on.

    The text begins with a bos token only if the template writes one, as in transformers' `apply_chat_template`.

    The assistant's text is in the template's `{% generation %}` blocks. Without such blocks it is the difference between
    the template's text up to a turn, with a generation prompt, and its text with the turn. Either way an answer must begin
    like that prompt. Each stretch is encoded separately, so that the assistant's tokens follow the prompt's as in use.

    Templates of reasoning models write an answer differently once the conversation continues: they drop its thoughts. Such a
    conversation becomes several samples, and each answer is trained on once, after the text that precedes it in use.

    Raises:
        DataError: the template refuses the messages or does not write all of them, or the answers cannot be located.
    """
    messages, thoughts = as_taken(template, conversation.messages, conversation.variables)
    turns = [index for index, is_learnt in enumerate(conversation.is_learnt) if is_learnt]
    rendered, answers = find_answers(template, messages, turns, conversation.variables, thoughts)
    samples: list[Encoded] = []
    while answers:
        here = [answer for answer in answers if rendered.text.startswith(answer.after.text)]
        if spans := [span for answer in here for span in answer.spans_in(rendered)]:
            samples.append(_encode(tokenizer, rendered.text, spans))
        answers = [answer for answer in answers if not rendered.text.startswith(answer.after.text)]
        rendered = answers[-1].after if answers else rendered
    if turns and not samples:
        what = "has no {% generation %} block around an answer to train on"
        raise cannot_tell(template, what, "put one around each, or remove the marks of messages")
    return samples[::-1]


def encode_messages(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], variables: dict[str, Any] | None = None
) -> Int32[np.ndarray, "T"]:
    """Returns the tokens up to where the assistant's next turn begins, equal to those of `encode_conversation` before it.

    Raises:
        DataError: the template refuses the messages or does not write all of them.
    """
    variables = variables or {}
    messages, _ = as_taken(template, messages, variables)
    text, spans = spans_before_prompt(template, messages, variables)
    return _encode(tokenizer, text, spans).ids


def end_token(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Returns the special token that the template writes right after an answer, where generation stops, or None."""
    for token in tokenizer.encode_template(_behind_answer(template)).tolist():
        if tokenizer.token_bytes[token] == 0:
            return token
        if tokenizer.decode([token]).strip():
            return None
    return None


def _behind_answer(template: ChatTemplate) -> str:
    """Returns what the template writes after an answer."""
    talk = [message_as_taken(template, message) for message in _TALK]
    _, said, after = template.render(talk, add_generation_prompt=False).rpartition(_SAID)
    return after if said else ""


def end_problem(template: ChatTemplate, tokenizer: Tokenizer) -> str | None:
    """Returns an error if no answer teaches where to stop: none has a trained token that generation stops at."""
    try:
        end = end_token(template, tokenizer)
        samples = _encoded_talk(template, tokenizer)
    except DataError:  # it needs other conversations; their errors are reported when they are read
        return None
    learnt = {token for sample in samples for token in sample.ids[sample.learnt].tolist()}
    if learnt & {end, tokenizer.eos_id}:
        return None
    place = f"{template.where}: chat template:"
    if end is None:
        name = tokenizer.eos_token or f"token {tokenizer.eos_id}"
        return (
            f"{place} writes no token after an answer that generation stops at, so the model never learns to stop;"
            f" write {name} there"
        )
    name = _behind_answer(template).split()[0]
    return (
        f"{place} has {name}, where generation stops, outside of {{% generation %}}, so the model never learns to stop;"
        " put it inside"
    )


def _encoded_talk(template: ChatTemplate, tokenizer: Tokenizer) -> list[Encoded]:
    """Encodes a short conversation, with a thought if the template opens every answer with one."""
    for thought in _THOUGHTS:
        with contextlib.suppress(DataError):
            talk = [_TALK[0], _TALK[1] | thought]
            return encode_conversation(template, tokenizer, Conversation(talk, [False, True], {}))
    return encode_conversation(template, tokenizer, Conversation(_TALK, [False, True], {}))


def _encode(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
    """Encodes each stretch of a text separately; the given spans are the ones that are trained on."""
    cuts = [0, *itertools.chain.from_iterable(spans), len(text)]
    parts = tokenizer.encode_template_parts([text[a:b] for a, b in itertools.pairwise(cuts)])
    learnt = [np.full(len(part), index % 2 == 1) for index, part in enumerate(parts)]
    return Encoded(np.concatenate(parts), np.concatenate(learnt))
