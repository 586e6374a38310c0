"""Renders conversations to text with the chat template of a tokenizer."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from llamajax.data.documents.messages import Message
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.disk import cannot_read
from llamajax.errors import DataError

TEMPLATE_FILE = "chat_template.jinja"
"""File name of a template beside its tokenizer."""
MAX_FILE_BYTES = 2**24
"""Maximum size of a file with a template. A tokenizer's configuration may also list thousands of tokens."""
MAX_CPU_S = 10
"""Maximum processor time of a template for one conversation, in seconds."""
MAX_MEMORY_BYTES = 2**30
"""Maximum memory of a template's process."""
MAX_CHARS = 2**24
"""Maximum length of a text that a template writes."""

_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "HOME", "TZ")
"""Environment variables that a template's process needs for its libraries and the time zone; it gets no user secrets."""
_PROCESS = Path(__file__).with_name("template_process.py")
_QUESTION = "Is it?"
"""Question used in probes of what a template accepts."""
_THOUGHT, _SAID = "ponderzqkx", "saidzqkx"
_FUNCTION, _JSON = "fetchzqkx", '{"x": 1}'
_ARGUMENTS = (_JSON, {"x": 1})
"""Forms of a call's arguments. The function's name occurs nowhere else."""
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}]
_WITHOUT_CONTENT: list[Message] = [{}, {"content": None}, {"content": ""}]
"""Forms of a message without content."""


class Rendered(NamedTuple):
    """A text that a template wrote, and the places of its `{% generation %}` blocks."""

    text: str
    marks: list[tuple[int, int]]
    """(start, end) of each block, in characters."""


class ChatTemplate:
    """A Jinja chat template in Hugging Face's format, rendered in a sandboxed process with limits.

    Raises:
        DataError: the template is malformed.
    """

    text: str
    """Source text of the template."""
    sha256: str
    """Hash of `text`."""
    where: str
    """File that the template came from, for messages."""
    shapes_written: set[bytes]
    """Shapes of conversations that the template is known to write completely; see `left_out.py`."""

    def __init__(self, text: str, tokenizer: Tokenizer, where: str) -> None:
        """Compiles `text` in a new process."""
        self.text = text
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.where = where
        self.shapes_written = set()
        named = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        special_tokens = {name: token for name, token in named.items() if token is not None}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,  # not hit by Ctrl-C; exits when its stdin closes
            text=True,
            encoding="ascii",
        )
        weakref.finalize(self, _end, self._process)
        limits = {"max_cpu_s": MAX_CPU_S, "max_memory_bytes": MAX_MEMORY_BYTES, "max_chars": MAX_CHARS}
        self._ask({"template": text, "special_tokens": special_tokens} | limits, "is malformed")

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended, as it does at its limits; it renders nothing any more."""
        return self._process.poll() is not None

    @functools.cached_property
    def has_generation_blocks(self) -> bool:
        """Whether the template marks the assistant's text with `{% generation %}` blocks."""
        return re.search(r"\{%[-+]?\s*generation\b", self.text) is not None

    @functools.cached_property
    def takes_text(self) -> bool:
        """Whether the template writes content given as text; templates of vision models may need a list of parts."""
        return _QUESTION in self._written(_QUESTION)

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes the texts in a list of text parts, rather than the list itself."""
        written = self._written([{"type": "text", "text": _QUESTION}])
        return _QUESTION in written and re.search(r"['\"]type['\"]", written) is None

    def _written(self, content: object) -> str:
        try:
            return self.render([{"role": "user", "content": content}], add_generation_prompt=False)
        except DataError:
            return ""

    @functools.cached_property
    def takes_calls(self) -> bool:
        """Whether the template writes tool calls. Also true if it rejects all probes; real calls then report why."""
        contents = [*_WITHOUT_CONTENT, {"content": _QUESTION}, {"content": [{"type": "text", "text": _QUESTION}]}]
        written = [self._written_call(content, arguments) for content in contents for arguments in _ARGUMENTS]
        return any(_FUNCTION in text for text in written) or not any(written)

    @functools.cached_property
    def without_content(self) -> Message:
        """Content that the template accepts beside tool calls alone: none, as transformers passes it, else null or "".

        Templates written before transformers left the content out expect null.
        """
        taken = (
            content
            for content in _WITHOUT_CONTENT
            if any(_FUNCTION in self._written_call(content, arguments) for arguments in _ARGUMENTS)
        )
        return next(taken, {})

    @functools.cached_property
    def takes_json_arguments(self) -> bool:
        """Whether the template writes tool-call arguments that are already JSON unchanged, without quoting them again."""
        return _JSON in self._written_call(self.without_content, _JSON)

    @functools.cached_property
    def takes_any_id(self) -> bool:
        """Whether the template accepts calls with IDs of any length; Mistral's accept only nine letters and digits."""
        written = [
            self._written_call(self.without_content, arguments, own)
            for own in ("call_1", "callabcde")
            for arguments in _ARGUMENTS
        ]
        return any(_FUNCTION in text for text in written[:2]) or not any(_FUNCTION in text for text in written)

    @functools.cached_property
    def thoughts_in(self) -> Literal["field", "text", "prompt"]:
        """Place of an answer's thought.

        `field`: the template writes `reasoning_content`, or takes no thoughts. `text`: it writes a thought in the content,
        between the tags `<think>` and `</think>`. `prompt`: it writes none, but its generation prompt opens one.
        """
        asked = {"role": "user", "content": self.in_its_form(_QUESTION)}
        fields = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        tagged = f"<think>\n{_THOUGHT}\n</think>\n\n{_SAID}"
        written = []
        for answer in ({"content": self.in_its_form(_SAID)} | fields, {"content": self.in_its_form(tagged)}):
            with contextlib.suppress(DataError):
                written.append(self.render([asked, {"role": "assistant", **answer}], add_generation_prompt=False))
        if len(written) < 2 or _THOUGHT in written[0]:
            return "field"
        if tagged in written[1]:
            return "text"
        prompt = self.render([asked], add_generation_prompt=True)
        return "prompt" if prompt.rstrip().endswith("<think>") and not self.has_generation_blocks else "field"

    def in_its_form(self, text: str) -> Any:
        """Returns a message's content as the template takes it: a text, or a list of parts."""
        return [{"type": "text", "text": text}] if self.takes_parts and not self.takes_text else text

    def _written_call(self, content: Message, arguments: object, own_id: str = "callabcde") -> str:
        """Returns what the template writes of a call, with or without tools and a result; empty if it rejects them all."""
        call = {"id": own_id, "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}
        talk = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", **content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": _FUNCTION, "content": "1"},
        ]
        written = ""
        for tools, length in itertools.product((_TOOLS, None), (3, 2)):
            with contextlib.suppress(DataError):
                written = next(self.render_prefixes(talk, [(length, False)], None, {"tools": tools})).text or written
            if _FUNCTION in written:
                break
        return written

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Returns the conversation as text; with `add_generation_prompt` it ends where the assistant's next turn begins.

        Raises:
            DataError: the template refuses the messages, or takes too much time or memory.
        """
        return next(self.render_prefixes(messages, [(len(messages), add_generation_prompt)], None)).text

    def render_prefixes(
        self,
        messages: Sequence[Message],
        renders: Sequence[tuple[int, bool]],
        date: str | None,
        variables: Mapping[str, Any] | None = None,
    ) -> Iterator[Rendered]:
        """Yields the first n messages as text, with or without a generation prompt, for each (n, prompt).

        Args:
            messages: the whole conversation.
            renders: the (n, prompt) pairs.
            date: today's date for templates that write it, in ISO format; None: the real one.
            variables: further variables of the template, such as `tools`.

        Raises:
            DataError: see `render`.
        """
        request = {"messages": list(messages), "renders": list(renders), "date": date, "variables": dict(variables or {})}
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
        if not line:  # its limits ended it
            limits = f"{MAX_CPU_S} s or {MAX_MEMORY_BYTES:,} bytes of memory"
            raise DataError(f"{self.where}: chat template: needs more than {limits}; use another template")
        answer = json.loads(line)
        if "error" in answer:
            reason = " ".join(answer["error"].split())[:300]
            raise DataError(f"{self.where}: chat template: {complaint}: {reason}; correct the template or the conversation")
        return answer


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def load_chat_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Loads the template in a file, or in a tokenizer's directory: `chat_template.jinja`, else in `tokenizer_config.json`.

    Args:
        path: the file or directory.
        tokenizer: the tokenizer with the `bos_token` and `eos_token` that the template writes.

    Returns:
        The template, or None if the directory has none.

    Raises:
        DataError: the template is malformed or cannot be read.
    """
    try:
        file = path / TEMPLATE_FILE if path.is_dir() else path
        config = path / "tokenizer_config.json"
        if not path.is_dir() or file.exists():
            return ChatTemplate(_read(file).decode("utf-8-sig"), tokenizer, str(file))
        if not config.exists():
            return None
        text = _template_of(json.loads(_read(config)), config)
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


def _template_of(config: object, where: Path) -> str | None:
    """Returns the template of a `tokenizer_config.json`, which has one, or several with names, or none.

    Of several, `tool_use` applies to conversations with tools and `default` to all others, as in transformers.
    """
    templates = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(templates, list):
        named = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        with_tools, without = named.get("tool_use"), named.get("default")
        if not isinstance(without, str):
            raise DataError(f"{where}: chat template: no template in the list is named default; put one into a file")
        if not isinstance(with_tools, str):
            return without
        # The + signs preserve white space at the edges of both templates, except the one newline that Jinja always strips.
        first, second = with_tools.removesuffix("\n"), without.removesuffix("\n")
        return f"{{% if tools is defined and tools is not none +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"
    if templates is not None and not isinstance(templates, str):
        raise DataError(f"{where}: chat template: must be text or a list of named ones, not {type(templates).__name__}")
    return templates
