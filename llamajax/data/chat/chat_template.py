"""Conversations to text, by the chat template that comes with a tokenizer."""

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
from typing import Any, NamedTuple

from llamajax.data.documents.conversations import Message
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
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

_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "HOME", "TZ")
"""What a template's process needs to find its libraries and the time; the user's keys are not for it."""
_PROCESS = Path(__file__).with_name("template_process.py")
_QUESTION = "Is it?"
"""What a template is asked to write, to see what it takes."""
_FUNCTION, _JSON = "fetchzqkx", '{"x": 1}'
_ARGUMENTS = (_JSON, {"x": 1})
"""Forms of a call's arguments, of a function whose name stands nowhere else."""
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}]
_WITHOUT_CONTENT: list[Message] = [{}, {"content": None}, {"content": ""}]
"""Forms of a message that has no content."""


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
    shapes_written: set[bytes]
    """Shapes of conversations of which it is known that it writes all; see `left_out.py`."""

    def __init__(self, text: str, tokenizer: Tokenizer, where: str) -> None:
        """Compiles `text`."""
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
            start_new_session=True,  # Ctrl-C is ours alone; without us its stdin ends, and so does it
            text=True,
            encoding="ascii",
        )
        weakref.finalize(self, _end, self._process)
        limits = {"max_cpu_s": MAX_CPU_S, "max_memory_bytes": MAX_MEMORY_BYTES, "max_chars": MAX_CHARS}
        self._ask({"template": text, "special_tokens": special_tokens} | limits, "is malformed")

    @functools.cached_property
    def has_generation_blocks(self) -> bool:
        """Whether it says itself what the assistant says."""
        return re.search(r"\{%[-+]?\s*generation\b", self.text) is not None

    @functools.cached_property
    def takes_text(self) -> bool:
        """Whether it writes content that is a text; those of models that see images may want a list of parts."""
        return _QUESTION in self._written(_QUESTION)

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether it writes the texts of content that is a list of text parts, rather than the list."""
        written = self._written([{"type": "text", "text": _QUESTION}])
        return _QUESTION in written and re.search(r"['\"]type['\"]", written) is None

    def _written(self, content: object) -> str:
        try:
            return self.render([{"role": "user", "content": content}], add_generation_prompt=False)
        except DataError:
            return ""

    @functools.cached_property
    def takes_calls(self) -> bool:
        """Whether it writes tool calls; also if it takes none of those that it is asked to, which it then says itself."""
        contents = [*_WITHOUT_CONTENT, {"content": _QUESTION}, {"content": [{"type": "text", "text": _QUESTION}]}]
        written = [self._written_call(content, arguments) for content in contents for arguments in _ARGUMENTS]
        return any(_FUNCTION in text for text in written) or not any(written)

    @functools.cached_property
    def without_content(self) -> Message:
        """What it takes as content beside tool calls that stand alone: none, as transformers gives it, else null or "".

        Templates ask for null that were written before transformers left it out.
        """
        taken = (
            content
            for content in _WITHOUT_CONTENT
            if any(_FUNCTION in self._written_call(content, arguments) for arguments in _ARGUMENTS)
        )
        return next(taken, {})

    @functools.cached_property
    def takes_json_arguments(self) -> bool:
        """Whether it writes the arguments of a tool call that are JSON already as they are, and not quoted once more."""
        return _JSON in self._written_call(self.without_content, _JSON)

    def _written_call(self, content: Message, arguments: object) -> str:
        """What it writes of a call, with tools to call or none, with a result or none; nothing if it takes no such talk."""
        call = {"id": "callabcde", "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}
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
        """The conversation as text; with `add_generation_prompt` it ends where the assistant's next turn begins.

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
        """The first n messages as text, without or with a generation prompt, for each (n, prompt).

        Args:
            messages: the whole conversation.
            renders: what to write.
            date: what a template is told that asks for it, ISO; None: today.
            variables: what it is told besides, such as `tools`.

        Raises:
            DataError: as `render`.
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
    """The template of a `tokenizer_config.json`, which holds one, or several with names, or none.

    Of several, `tool_use` is for conversations with tools, and `default` for others, as transformers chooses.
    """
    templates = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(templates, list):
        named = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        with_tools, without = named.get("tool_use"), named.get("default")
        if not isinstance(without, str):
            raise DataError(f"{where}: chat template: none of those in the list is named default; put one into a file")
        if not isinstance(with_tools, str):
            return without
        # The signs keep the lines' ends and spaces that begin and end the two, but for the one end that Jinja takes off.
        first, second = with_tools.removesuffix("\n"), without.removesuffix("\n")
        return f"{{% if tools is defined and tools is not none +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"
    if templates is not None and not isinstance(templates, str):
        raise DataError(f"{where}: chat template: must be text or a list of named ones, not {type(templates).__name__}")
    return templates
