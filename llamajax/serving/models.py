"""The models that a server offers, by name: each with its engine, its tokenizer and its chat template."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llamajax.data.chat import chat_tokens
from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.documents.conversations import question_of
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import DataError
from llamajax.generation.prompts import Prompt
from llamajax.serving.engine import Engine
from llamajax.serving.fields import RequestError


@dataclass(kw_only=True)
class Served:
    """A model under its name."""

    name: str
    parent: str | None = None
    """Name of the model that it adds to with adapters; None: it is a whole model."""
    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    end_ids: Collection[int]
    """Tokens that end a text; in a chat, the end of a turn is one of them."""
    num_rows: int
    """Exclusive upper limit of ids in prompts."""
    parse_special: bool = False
    """Whether special tokens that are written in prompts of /v1/completions are read as tokens."""
    created: int = field(default_factory=lambda: int(time.time()))
    num_open: int = 0
    """Number of continuations that are written or waiting; of the event loop alone."""
    _template_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def encode_prompt(self, prompt: str | Sequence[int], where: str) -> list[int]:
        """Returns the tokens of a prompt of /v1/completions.

        Raises:
            RequestError: the model lacks one of its tokens.
        """
        if isinstance(prompt, str):
            _check_text(prompt, where)
            encode = partial(Prompt(prompt).encode, self.tokenizer, None, parse_special=self.parse_special)
            ids = list(await asyncio.to_thread(encode))
        else:
            ids = list(prompt)
        if bad := [token for token in ids if not 0 <= token < self.num_rows]:
            rule = f"must be an id from 0 to {self.num_rows - 1}"
            raise RequestError(f"{where}: {bad[0]} {rule}", param="prompt")
        return ids

    async def encode_messages(self, fields: Mapping[str, Any]) -> list[int]:
        """Returns the tokens of a conversation, up to where the answer begins; `fields` are as in a line of training data.

        Raises:
            RequestError: the model has no chat template, or it refuses the conversation.
        """
        if self.template is None:
            raise RequestError(
                f"the model {self.name} has no chat template; name one with --chat_template, or use /v1/completions"
            )
        try:
            conversation = question_of(fields)
            async with self._template_lock:
                ids = await asyncio.to_thread(
                    chat_tokens.encode_messages, self.template, self.tokenizer, conversation.messages, conversation.variables
                )
        except ValueError as error:  # DataError is one
            self._restart_template()
            raise RequestError(_reason(error), param="messages") from error
        if not len(ids):
            raise RequestError("messages: the chat template writes nothing for them; add a message", param="messages")
        return ids.tolist()

    def _restart_template(self) -> None:
        """Starts the template's process again, if a conversation exceeded its limits."""
        if self.template is not None and self.template.has_ended:
            self.template = ChatTemplate(self.template.text, self.tokenizer, self.template.where)


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where}: has half a surrogate pair, which is no character", param=where) from error


def _reason(error: ValueError) -> str:
    """Returns the message of an error about a conversation, without the remedy for a file."""
    text = " ".join(str(error).split())
    rule = text.rpartition("; ")[0] if isinstance(error, DataError) or text.endswith(" the line") else text
    return (rule or text)[:500]


def find_model(models: Mapping[str, Served], name: str | None) -> Served:
    """Returns the model of this name, or the first one if a request names none.

    Raises:
        RequestError: there is no such model.
    """
    if name is None:
        return next(iter(models.values()))
    if name not in models:
        shown = name if name.isprintable() and len(name) <= 60 else repr(name[:60])
        raise RequestError(
            f"the model {shown} does not exist; /v1/models lists {', '.join(models)}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return models[name]
