"""Finds calls of tools in the text of an answer, in the formats that chat templates ask for."""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolFormat:
    """How the models of a chat template write calls."""

    begins: str
    """Text that begins a call. If it is a bracket, it does so only at the start of an answer."""
    pattern: re.Pattern[str]
    """A call, or a list of calls, in its first group."""
    arguments: tuple[str, ...] = ("arguments", "parameters")

    @property
    def is_whole(self) -> bool:
        """Whether an answer is either calls or text."""
        return self.begins in ("{", "[")


HERMES = ToolFormat("<tool_call>", re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", re.DOTALL))
"""Of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, after text or each other."""
LLAMA = ToolFormat("{", re.compile(r"\s*(\{.*\})\s*$", re.DOTALL))
"""Of Llama 3: `{"name": ..., "parameters": {...}}`, several separated by `;`."""
MISTRAL = ToolFormat("[", re.compile(r"\s*(\[.*\])\s*$", re.DOTALL))
"""Of Mistral: `[{"name": ..., "arguments": {...}}]`, after a special token, which has no text."""


def format_of(template: str) -> ToolFormat | None:
    """Returns how a chat template asks for calls, or None if it is not one that is known."""
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA if re.search(r'\\?"parameters\\?":', template) or "<|python_tag|>" in template else None


def find_calls(text: str, format: ToolFormat | None) -> tuple[str, list[dict[str, Any]]]:
    """Returns the text without its calls, and the calls in OpenAI's form. All of it is text if a call cannot be read."""
    if format is None or format.begins not in text:
        return text, []
    found = [_parse(match[1]) for match in format.pattern.finditer(text)]
    calls = [_call(call, format) for some in found for call in some or [None]]
    if not calls or None in calls:
        return text, []
    return format.pattern.sub("", text).strip(), [call for call in calls if call is not None]


def certain_text(text: str, format: ToolFormat | None) -> str:
    """Returns the beginning of an unfinished answer that belongs to no call."""
    if format is None:
        return text
    if format.is_whole:
        return "" if not text.strip() or text.lstrip().startswith(format.begins) else text
    at = text.find(format.begins)
    if at >= 0:
        return text[:at]
    begun = (n for n in range(len(format.begins) - 1, 0, -1) if text.endswith(format.begins[:n]))
    return text[: len(text) - next(begun, 0)]


def _parse(text: str) -> Sequence[Any] | None:
    """Returns the values in a text of JSON: one, those of a list, or several separated by `;`."""
    for candidate in (text, f"[{text.replace('};', '},')}]"):
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, list) else [value]
    return None


def _call(value: Any, format: ToolFormat) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[key] for key in format.arguments if key in value), {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": value["name"], "arguments": text},
    }
