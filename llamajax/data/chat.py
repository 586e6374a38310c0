"""Conversations to text and token ids, by the chat template that comes with a tokenizer."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from llamajax.data.conversations import Message
from llamajax.data.tokenizer_base import Tokenizer
from llamajax.disk import cannot_read
from llamajax.errors import DataError

TEMPLATE_FILE = "chat_template.jinja"
"""Name of a template beside its tokenizer."""
MAX_FILE_BYTES = 2**24
"""Of a file with a template; a tokenizer's configuration may list thousands of tokens, too."""
MAX_CPU_S = 10
"""Processor time that a template may take for one conversation."""
MAX_MEMORY_BYTES = 2**30
"""Memory that a template may take."""
MAX_CHARS = 2**24
"""Longest text that a template may write."""
TRAINING_DATE = "2024-07-26"
"""Today, for a template that writes the date into conversations that are learnt: always the same, so that the data are."""

_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "HOME", "TZ")
"""What a template's process needs to find its libraries and the time; the user's keys are not for it."""
_PROCESS = Path(__file__).with_name("template_process.py")


class Rendered(NamedTuple):
    """A text that a template wrote, and what lies in its `{% generation %}` blocks."""

    text: str
    marks: list[tuple[int, int]]
    """(start, end) of each block, in characters."""


class ChatTemplate:
    """A Jinja chat template as Hugging Face's tokenizers have them, rendered in a sandboxed process with limits.

    Raises:
        DataError: the template is malformed.
    """

    text: str
    """The template."""
    sha256: str
    """Hash of the text."""
    where: str
    """The file that it came from, for messages."""

    def __init__(self, text: str, tokenizer: Tokenizer, where: str) -> None:
        """Compiles `text`."""
        self.text = text
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.where = where
        named = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        special_tokens = {name: token for name, token in named.items() if token is not None}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,  # Ctrl-C is ours alone; without us its stdin ends, and so does it
            text=True,
            encoding="ascii",
        )
        weakref.finalize(self, _end, self._process)
        limits = {"max_cpu_s": MAX_CPU_S, "max_memory_bytes": MAX_MEMORY_BYTES, "max_chars": MAX_CHARS}
        self._ask({"template": text, "special_tokens": special_tokens} | limits, "is malformed")

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as text; with `add_generation_prompt` it ends where the assistant's next turn begins.

        Raises:
            DataError: the template refuses the messages, or takes too much time or memory.
        """
        return next(self.render_prefixes(messages, [(len(messages), add_generation_prompt)], None)).text

    def render_prefixes(
        self, messages: Sequence[Message], renders: Sequence[tuple[int, bool]], date: str | None
    ) -> Iterator[Rendered]:
        """The first n messages as text, without or with a generation prompt, for each (n, prompt).

        Args:
            messages: the whole conversation.
            renders: what to write.
            date: what a template is told that asks for it, ISO; None: today.

        Raises:
            DataError: as `render`.
        """
        request = {"messages": list(messages), "renders": list(renders), "date": date}
        answer = self._ask(request, "refuses the conversation")
        first = answer["texts"][0]
        for text_or_length, marks in zip(answer["texts"], answer["marks"], strict=True):
            text = first[:text_or_length] if isinstance(text_or_length, int) else text_or_length
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{self.where}: chat template: writes half a surrogate pair; correct it") from error
            yield Rendered(text, marks)

    def _ask(self, request: dict[str, Any], complaint: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:  # it was ended by its limits
            limits = f"{MAX_CPU_S} s or {MAX_MEMORY_BYTES:,} bytes of memory"
            raise DataError(f"{self.where}: chat template: takes more than {limits}; use another template")
        answer = json.loads(line)
        if "error" in answer:
            reason = " ".join(answer["error"].split())[:300]
            raise DataError(f"{self.where}: chat template: {complaint}: {reason}; correct the one or the other")
        return answer


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def load_chat_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template in a file, or of a tokenizer's directory: `chat_template.jinja`, else in `tokenizer_config.json`.

    Args:
        path: the file or directory.
        tokenizer: whose `bos_token` and `eos_token` the template writes.

    Returns:
        None if the directory has none.

    Raises:
        DataError: the template is malformed, or cannot be read.
    """
    try:
        file = path / TEMPLATE_FILE if path.is_dir() else path
        config = path / "tokenizer_config.json"
        if not path.is_dir() or file.exists():
            return ChatTemplate(_read(file).decode(), tokenizer, str(file))
        if not config.exists():
            return None
        text = _default_template(json.loads(_read(config)), config)
        return None if text is None else ChatTemplate(text, tokenizer, str(config))
    except OSError as error:
        raise cannot_read(error, f"{error.filename or path}: chat template", "correct the path") from error
    except UnicodeError as error:
        raise DataError(f"{path}: chat template: is not UTF-8; convert the file, for example with iconv") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path / 'tokenizer_config.json'}: chat template: is not JSON; replace the file") from error


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise DataError(f"{path}: chat template: the file is larger than {MAX_FILE_BYTES:,} bytes; name another")
    return content


def _default_template(config: object, where: Path) -> str | None:
    """The template of a `tokenizer_config.json`, which holds one, or several with names, or none."""
    templates = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(templates, list):
        named = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        if not isinstance(named.get("default"), str):
            raise DataError(f"{where}: chat template: none of those in the list is named default; put one into a file")
        return named["default"]
    if templates is not None and not isinstance(templates, str):
        raise DataError(f"{where}: chat template: must be text or a list of named ones, not {type(templates).__name__}")
    return templates


class Encoded(NamedTuple):
    """A conversation as tokens."""

    ids: Int32[np.ndarray, "T"]
    learnt: Bool[np.ndarray, "T"]
    """What the assistant says, the token that ends its turn included."""


def encode_conversation(template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message]) -> Encoded:
    """The tokens of a conversation, and which of them the assistant says: those of the text that the template writes, which
    begins it with the bos token or does not, as for transformers' `apply_chat_template`.

    What it says lies in the template's `{% generation %}` blocks, or, if there are none, between what the template writes
    up to a turn, with a generation prompt, and what it writes when the turn is there. Each stretch is encoded by itself,
    so that the assistant's tokens follow the prompt's as they do when it is used.

    Raises:
        DataError: the template refuses the messages, or it cannot be told what the assistant says.
    """
    text, cuts = _stretches(template, messages, add_generation_prompt=False, date=TRAINING_DATE)
    if cuts is None:
        raise DataError(
            f"{template.where}: chat template: what the assistant says cannot be found in what it writes; put"
            " {% generation %} and {% endgeneration %} around it, or name a file of configs/chat_templates as"
            " data.chat_template"
        )
    parts = tokenizer.encode_template_parts([text[a:b] for a, b in itertools.pairwise(cuts)])
    learnt = [np.full(len(part), index % 2 == 1) for index, part in enumerate(parts)]
    return Encoded(np.concatenate(parts), np.concatenate(learnt))


def encode_messages(template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message]) -> Int32[np.ndarray, "T"]:
    """The tokens of a conversation up to where the assistant's next turn begins: those that `encode_conversation` has
    before that turn.

    Raises:
        DataError: the template refuses the messages.
    """
    text, cuts = _stretches(template, messages, add_generation_prompt=True, date=None)
    parts = tokenizer.encode_template_parts([text[a:b] for a, b in itertools.pairwise(cuts or [0, len(text)])])
    return np.concatenate(parts)


def _stretches(
    template: ChatTemplate, messages: Sequence[Message], *, add_generation_prompt: bool, date: str | None
) -> tuple[str, list[int] | None]:
    """The conversation as text, and where to cut it so that every second stretch is what the assistant says, if known."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    renders = [render for turn in turns for render in ((turn, False), (turn, True), (turn + 1, False))]
    rendered = template.render_prefixes(messages, [(len(messages), add_generation_prompt), *renders], date)
    text, marks = next(rendered)
    spans: list[tuple[int, int] | None] = [*marks]
    if not marks:
        for turn in turns:
            before, prompt, after = (next(rendered).text for _ in range(3))
            span = _span_between(before, prompt, after, messages[turn]["content"].strip())
            spans.append(span if text.startswith(after) else None)
    if None in spans:
        return text, None
    return text, [0, *(place for span in spans if span for place in span), len(text)]


def _span_between(before: str, prompt: str, after: str, content: str) -> tuple[int, int] | None:
    """Where an assistant's turn lies in a text, (start, end), or None if that cannot be told.

    Args:
        before: the text without the turn.
        prompt: as `before`, with a generation prompt.
        after: the text with the turn.
        content: what the assistant says, stripped.
    """
    said = after[len(prompt) :]
    is_prompted = prompt != before or said.lstrip().startswith(content)  # Llama 2 has no generation prompt and needs none
    if not (after.startswith(prompt) and is_prompted):
        return None
    # Space after the mark that ends a turn is not learnt: when the model is used, it has stopped there.
    stripped = said.rstrip()
    has_end_mark = not (content and stripped.endswith(content))
    return len(prompt), len(prompt) + len(stripped if has_end_mark else said)
