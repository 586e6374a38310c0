"""Reads prompts, converts them to tokens, and finds the tokens that end a continuation."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamajax.data.chat import chat_tokens
from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.documents.conversations import BESIDE_MESSAGES, question_of
from llamajax.data.documents.messages import Message, content_of
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.disk import cannot_read, read_again
from llamajax.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a conversation to answer."""

    text: str
    """The text; for a conversation, the text of its last message."""
    messages: tuple[Message, ...] | None = None
    """The conversation, or None."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Additional variables for the chat template, such as `tools`."""

    def in_chat(self, system: str | None) -> "Prompt":
        """Turns a text into a user message after a system message; returns a conversation unchanged."""
        if self.messages is not None:
            return self
        first = () if system is None else ({"role": "system", "content": system},)
        return Prompt(self.text, (*first, {"role": "user", "content": self.text}))

    def encode(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, parse_special: bool = False) -> Sequence[int]:
        """Returns token ids, at least one. A text starts as the tokenizer starts prompts, a conversation as its template
        does.

        With `parse_special`, a text may itself contain special tokens. If it starts with the token that prompts start with,
        that token is not added again.

        Raises:
            DataError: the template rejects the conversation.
        """
        if self.messages is not None:
            assert template is not None, "callers with conversations load a template first"
            return chat_tokens.encode_messages(template, tokenizer, self.messages, self.variables).tolist()
        if not parse_special:
            return tokenizer.encode_prompt(self.text)
        ids, begin = tokenizer.encode_template(self.text).tolist(), list(tokenizer.prefix)
        return ids if begin and ids[: len(begin)] == begin else [*begin, *ids] or [tokenizer.bos_id]

    def has_special(self, tokenizer: Tokenizer) -> bool:
        """Returns whether this is a text with the name of a special token, which `encode` reads as text by default."""
        if self.messages is not None:
            return False
        special = {token for token in tokenizer.encode_template(self.text).tolist() if not tokenizer.token_bytes[token]}
        return not special <= set(tokenizer.encode_batch([self.text])[0].tolist())


def read_prompts(path: Path) -> list[Prompt]:
    """Reads the prompts in a file: one per line, or JSON with `prompt` or `messages` in every line of a .jsonl. Empty lines
    are skipped.

    Raises:
        DataError: the file cannot be read, has no prompts, or has an invalid line.
    """
    try:
        lines = read_again(path.read_bytes).decode("utf-8-sig").split("\n")
    except OSError as error:
        raise cannot_read(error, f"{path}: prompts_file", "correct the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: prompts_file: is not UTF-8; convert the file, for example with iconv") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise DataError(f"{path}: prompts_file: has no prompt; write one per line")
    if path.suffix != ".jsonl":
        return [Prompt(line.removesuffix("\r")) for _, line in numbered]
    return [_read_line(line, f"{path}:{number}") for number, line in numbered]


def _read_line(line: str, where: str) -> Prompt:
    rule = 'must be {"prompt": TEXT} or {"messages": [{"role": TEXT, "content": TEXT}, ...]}'
    try:
        fields: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: prompts_file: is not JSON: {rule}") from error
    match fields:
        case {"prompt": str(text), **others} if "messages" not in others:
            if said := [key for key in BESIDE_MESSAGES if others.get(key)]:
                remedy = f"write the line with messages, or remove {said[0]}"
                raise DataError(f"{where}: prompts_file: {said[0]} is not read beside prompt; {remedy}")
            prompt = Prompt(text)
        case {"messages": [_, *_], **others} if "prompt" not in others:
            return _read_conversation(fields, where)
        case _:
            raise DataError(f"{where}: prompts_file: {rule}")
    try:
        prompt.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: prompts_file: holds half a surrogate pair, no character; correct it") from error
    return prompt


def _read_conversation(fields: dict[str, Any], where: str) -> Prompt:
    """Reads a conversation as training does: with `system` and `tools` of the line, calls, thoughts and text parts."""
    try:
        conversation = question_of(fields)
    except ValueError as error:
        raise DataError(f"{where}: prompts_file: {error}") from error
    messages = conversation.messages
    return Prompt(content_of(messages[-1]), tuple(messages), conversation.variables)


def find_ends(own: Sequence[int], tokenizer: Tokenizer, template: ChatTemplate | None) -> frozenset[int]:
    """Returns the tokens that end a continuation.

    Args:
        own: end tokens from the model's own configuration.
        tokenizer: the tokenizer; its end of text is one of them.
        template: the chat template, if used: a special token that it puts after an assistant's message is one of them, too.
    """
    of_template = None if template is None else chat_tokens.end_token(template, tokenizer)
    return frozenset({tokenizer.eos_id, *own, *(() if of_template is None else (of_template,))})
