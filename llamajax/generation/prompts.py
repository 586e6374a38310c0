"""What texts go on from: prompts as they are given, as tokens, and the tokens that end a continuation."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamajax.data.chat import chat_tokens
from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.documents.conversations import BESIDE_MESSAGES, Message, content_of, question_of
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.disk import cannot_read, read_again
from llamajax.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """A text to go on from, or a conversation to answer."""

    text: str
    """The text; of a conversation, its last message's."""
    messages: tuple[Message, ...] | None = None
    """The conversation."""
    variables: dict[str, Any] = field(default_factory=dict)
    """What the chat template is told besides, such as `tools`."""

    def in_chat(self, system: str | None) -> "Prompt":
        """A text as a user's message after the system's; a conversation as it is."""
        if self.messages is not None:
            return self
        first = () if system is None else ({"role": "system", "content": system},)
        return Prompt(self.text, (*first, {"role": "user", "content": self.text}))

    def encode(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, parse_special: bool = False) -> Sequence[int]:
        """Token ids, at least one; a text begins as the tokenizer begins prompts, a conversation as its template does.

        With `parse_special`, a text may itself write special tokens; also the one that prompts begin with, which is then not
        put before it.

        Raises:
            DataError: the template refuses the conversation.
        """
        if self.messages is not None:
            assert template is not None, "whoever has conversations finds a template first"
            return chat_tokens.encode_messages(template, tokenizer, self.messages, self.variables).tolist()
        if not parse_special:
            return tokenizer.encode_prompt(self.text)
        ids, begin = tokenizer.encode_template(self.text).tolist(), list(tokenizer.prefix)
        return ids if begin and ids[: len(begin)] == begin else [*begin, *ids] or [tokenizer.bos_id]

    def has_special(self, tokenizer: Tokenizer) -> bool:
        """Whether it is a text that holds the name of a special token, which is read as text unless `encode` is told."""
        if self.messages is not None:
            return False
        special = {token for token in tokenizer.encode_template(self.text).tolist() if not tokenizer.token_bytes[token]}
        return not special <= set(tokenizer.encode_batch([self.text])[0].tolist())


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts in a file: one per line, or JSON with `prompt` or `messages` in every line of a .jsonl; empty lines
    are left out.

    Raises:
        DataError: it cannot be read, or has none, or a line that is none.
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
    """As training reads it: with the `system` and `tools` of the line, calls, thoughts and text parts."""
    try:
        conversation = question_of(fields)
    except ValueError as error:
        raise DataError(f"{where}: prompts_file: {error}") from error
    messages = conversation.messages
    return Prompt(content_of(messages[-1]), tuple(messages), conversation.variables)


def find_ends(own: Sequence[int], tokenizer: Tokenizer, template: ChatTemplate | None) -> frozenset[int]:
    """The tokens that end a continuation.

    Args:
        own: what the model's own configurations say.
        tokenizer: whose end of a text is one of them.
        template: the chat template, if it is used: a special token that it writes behind what the assistant says is
            one, too.
    """
    of_template = None if template is None else chat_tokens.end_token(template, tokenizer)
    return frozenset({tokenizer.eos_id, *own, *(() if of_template is None else (of_template,))})
