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
    """Text that begins a call."""
    ends: str
    """Text that ends it; the last call of an answer may lack it."""
    is_whole: bool
    """Whether an answer is either calls or text; otherwise calls follow text."""


HERMES = ToolFormat("<tool_call>", "</tool_call>", is_whole=False)
"""Format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, after text or each other."""
LLAMA = ToolFormat("{", "}", is_whole=True)
"""Format of Llama 3: `{"name": ..., "parameters": {...}}`, several separated by `;`."""
MISTRAL = ToolFormat("[", "]", is_whole=True)
"""Format of Mistral: `[{"name": ..., "arguments": {...}}]`, after a special token, which has no text."""

_ARGUMENTS = ("arguments", "parameters")


def format_of(template: str) -> ToolFormat | None:
    """Returns how a chat template asks for calls, or None if it is not one that is known."""
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA if '"parameters":' in template.replace("\\", "") or "<|python_tag|>" in template else None


def find_calls(text: str, format: ToolFormat | None) -> tuple[str, list[dict[str, Any]]]:
    """Returns the text before the calls, and the calls in OpenAI's form. All of it is text if a call cannot be read."""
    if format is None:
        return text, []
    before, *bodies = [text[:0], text] if format.is_whole else text.split(format.begins)
    if format.is_whole:
        stripped = text.strip()
        if not (stripped.startswith(format.begins) and stripped.endswith(format.ends)):
            return text, []
    else:
        cut = [body.partition(format.ends) for body in bodies]
        if any(after.strip() for _, _, after in cut) or not all(end for _, end, _ in cut[:-1]):
            return text, []
        bodies = [body for body, _, _ in cut]
    calls = [_call(value) for body in bodies for value in _parse(body) or [None]]
    found = [call for call in calls if call is not None]
    return (before.strip(), found) if found and len(found) == len(calls) else (text, [])


def certain_text(text: str, format: ToolFormat | None) -> str:
    """Returns the beginning of an unfinished answer that belongs to no call."""
    if format is None:
        return text
    if format.is_whole:
        return "" if not text.strip() or text.lstrip().startswith(format.begins) else text
    at = text.find(format.begins)
    if at >= 0:
        return text[:at].rstrip()
    begun = (n for n in range(len(format.begins) - 1, 0, -1) if text.endswith(format.begins[:n]))
    return text[: len(text) - next(begun, 0)].rstrip()


def _parse(text: str) -> Sequence[Any] | None:
    """Returns the values in a text of JSON: one, those of a list, or several separated by `;`."""
    for candidate in (text, f"[{re.sub(r'} *; *{', '},{', text)}]"):
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, list) else [value]
    return None


def _call(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[key] for key in _ARGUMENTS if key in value), {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": value["name"], "arguments": text},
    }
