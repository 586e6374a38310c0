"""Chat templates as their authors publish them, and what each makes of an answer, written down by hand."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "templates"


class Said(NamedTuple):
    """Parts of an answer, named as the marks in `conversations.yaml` name them."""

    text: str
    thought: str
    calls: list[dict[str, Any]]


def said(mark: Any) -> Said:
    mark = {"text": mark} if isinstance(mark, str) else mark
    calls = mark.get("calls") or [call for call in [mark.get("call")] if call]
    return Said(mark.get("text", ""), mark.get("thought", ""), calls)


class Published(NamedTuple):
    """A published template."""

    answer: Callable[[Said], str]
    """Writes an answer as the model learns it, up to the end of its turn."""
    folds: bool
    """Whether thoughts are written in the text, because the template does not know them."""
    refuses: dict[str, str]
    """Part of the message for each need that it does not meet, as a regular expression."""


def tagged(own: Said) -> str:
    return (f"<think>\n{own.thought}\n</think>\n\n" if own.thought else "") + own.text


def as_json(call: dict[str, Any], arguments: str, **others: str) -> str:
    return json.dumps({"name": call["name"], arguments: call["arguments"]} | others)


def hermes(own: Said) -> str:
    """Calls in tags of their own, as Qwen writes them."""
    return "\n".join(f"<tool_call>\n{as_json(call, 'arguments')}\n</tool_call>" for call in own.calls)


def qwen2_5(own: Said) -> str:
    text = tagged(own)
    return "\n".join(part for part in (text, hermes(own)) if part) + "<|im_end|>"


def qwen3(own: Said) -> str:
    """An answer is served behind a thought, if only an empty one."""
    between = "\n" if own.text and own.calls else ""
    return f"<think>\n{own.thought}\n</think>\n\n{own.text}{between}{hermes(own)}<|im_end|>"


def mistral_nemo(own: Said) -> str:
    if not own.calls:
        return tagged(own) + "</s>"
    calls = [as_json(call, "arguments", id=call.get("id", "abcdef123")) for call in own.calls]
    return f"[TOOL_CALLS][{', '.join(calls)}]</s>"


def gpt_oss(own: Said) -> str:
    """Thoughts, or the text beside a call, in a channel of their own."""
    thought = own.thought or (own.text if own.calls else "")
    first = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    if not own.calls:
        return f"{first}<|channel|>final<|message|>{own.text}<|return|>"
    (call,) = own.calls
    return f"{first} to=functions.{call['name']}<|channel|>commentary json<|message|>{json.dumps(call['arguments'])}<|call|>"


def llama3_1(own: Said) -> str:
    if not own.calls:
        return tagged(own) + "<|eot_id|>"
    (call,) = own.calls
    return as_json(call, "parameters") + "<|eot_id|>"


def ended(end: str) -> Callable[[Said], str]:
    return lambda own: tagged(own) + end


NO_TOOLS = {"tools": "chat template: does not write "}
ALTERNATING = {"any_order": "roles must alternate user/assistant"}
PUBLISHED = {
    "qwen2_5": Published(qwen2_5, True, {}),
    "qwen3": Published(qwen3, False, {}),
    "mistral_nemo": Published(mistral_nemo, True, {
        **ALTERNATING,
        "system": r"does not write messages\[0\]\.content; name", "text_beside_call": "beside its tool_calls; name",
    }),
    "phi3_5": Published(ended("<|end|>\n</s>"), True, NO_TOOLS),
    "zephyr": Published(ended("</s>"), True, NO_TOOLS),
    "gpt_oss": Published(gpt_oss, False, {"two_calls": r"does not write messages\[1\]\.tool_calls"}),
    "llama3_1": Published(llama3_1, True, {
        "text_beside_call": "beside its tool_calls; name", "two_calls": "only supports single tool-calls at once!",
    }),
    "gemma": Published(ended("<end_of_turn>"), True, {
        **ALTERNATING, "tools": "does not write |roles must alternate",
        "system": "System role not supported; it accepts no system message: put that into the first question",
    }),
}  # fmt: skip
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|start|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<start_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<think>", "</think>", "<|user|>", "<|assistant|>",
)  # fmt: skip
"""Special tokens of these templates, beside `<s>` and `</s>`."""


def template(name: str) -> str | None:
    """Returns the text of a template; None if it comes with trl, which is not installed."""
    if (path := FOLDER / f"{name}.jinja").exists():
        return path.read_text()
    if (found := importlib.util.find_spec("trl")) is None:  # finds it without importing it
        return None
    folder = Path(next(iter(found.submodule_search_locations or ())))
    return (folder / "chat_templates" / path.name).read_text()
