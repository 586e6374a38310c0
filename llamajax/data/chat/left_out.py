"""Finds what a chat template leaves out of a conversation, judging by its output.

The template's source cannot show this: one that contains the word `thinking` may mean a switch, and `tools` may be a field
of a message. Therefore a unique marker word is added to everything that is said, and searched for in the output.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.documents.messages import ANSWERING, REASONING, Message
from llamajax.errors import DataError

_MAX_SHAPES = 2**16
"""Maximum number of shapes remembered per template, to bound memory."""
_ID = "callabcde"
"""ID of a call in the form that Mistral's templates require: nine letters."""
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}


def left_out(template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]) -> str | None:
    """Returns the first thing that the template leaves out of a conversation, such as `messages[1].content`, or None.

    Templates of reasoning models leave out thoughts before the last question, in training as in use. Therefore a part counts
    as written if it appears while its own answer or any later answer is the last message.

    Conversations of one shape are judged together, by a stand-in that contains only marker words. If the template does not
    write the stand-in completely, each conversation is judged by its own texts, so the result never depends on the others.
    """
    words = Words(keeps_text=False)
    stand_in = words.put_into(messages, variables)
    shape = hashlib.sha256(json.dumps(stand_in).encode()).digest()
    if shape in template.shapes_written:
        return None
    if _missing(template, *stand_in, words) == []:
        if len(template.shapes_written) >= _MAX_SHAPES:
            template.shapes_written.clear()
        template.shapes_written.add(shape)
        return None
    words = Words(keeps_text=True)
    missing = _missing(template, *words.put_into(messages, variables), words)
    return missing[0] if missing else None


def _missing(
    template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any], words: "Words"
) -> list[str] | None:
    """Returns the places of the marker words that are not written; None if the template rejects the conversation."""
    answers = [index for index, message in enumerate(messages) if message["role"] in ANSWERING]
    renders = [(len(messages), False), *((answer + 1, False) for answer in answers)]
    try:
        written = [one.text.casefold() for one in template.render_prefixes(messages, renders, None, variables)]
    except DataError:
        return None
    return [place for word, place in words.places.items() if not any(word in text for text in written)]


class Words:
    """Unique marker words, put after the texts of a conversation or in place of them."""

    places: dict[str, str]
    """Place of each word in the conversation."""
    messages: dict[str, int]
    """Index of each word's message."""

    def __init__(self, *, keeps_text: bool) -> None:
        self.places, self.messages = {}, {}
        self._keeps_text = keeps_text
        self._calls: dict[str, str] = {}

    def put_into(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """Returns the conversation with the words in it."""
        marked = []
        for index, message in enumerate(messages):
            marked.append(self._message(message, f"messages[{index}]"))
            self.messages |= dict.fromkeys(self.places.keys() - self.messages.keys(), index)
        tools = variables.get("tools")
        return marked, {**variables, **({"tools": self._tools(tools)} if tools else {})}

    def _text(self, text: str, place: str) -> str:
        if not text.strip():
            return text
        word = f"zq{len(self.places)}kx"
        self.places[word] = place
        return f"{text} {word}" if self._keeps_text else word

    def _other(self, text: str) -> str:
        """Returns the value for a text that need not be written, such as an ID."""
        return text if self._keeps_text else _ID

    def _message(self, message: Message, place: str) -> Message:
        thought = next((message[name] for name in REASONING if isinstance(message.get(name), str)), "")
        thought = self._text(thought, f"{place}.reasoning_content")
        marked = {}
        for key, value in message.items():
            if key == "tool_calls":
                marked[key] = [self._call(call, f"{place}.{key}") for call in value]
            elif key == "content":
                beside = " beside its tool_calls" if message.get("tool_calls") else ""
                marked[key] = self._content(value, f"{place}.{key}{beside}", is_answer=message["role"] in ANSWERING)
            elif key in REASONING:
                marked[key] = thought
            elif isinstance(value, str) and key != "role":
                marked[key] = self._calls.get(value) if key == "name" and value in self._calls else self._other(value)
            else:
                marked[key] = value
        return marked

    def _content(self, content: Any, place: str, *, is_answer: bool) -> Any:
        if isinstance(content, list):
            return [{**part, "text": self._text(part["text"], place)} for part in content]
        if not isinstance(content, str):
            return content
        thought, end, said = content.partition("</think>")
        if not (is_answer and end):
            return self._text(content, place)
        before, begin, thought = thought.rpartition("<think>")
        thought = self._text(thought.strip(), f"the thought in {place}")
        return f"{before if self._keeps_text else ''}{begin}\n{thought}\n{end}\n\n{self._text(said.strip(), place)}"

    def _call(self, call: Mapping[str, Any], place: str) -> dict[str, Any]:
        marked: dict[str, Any] = {}
        for key, value in call.items():
            if key == "function" and isinstance(value, dict):
                marked[key] = self._call(value, place)
            elif key == "name":
                marked[key] = self._calls[value] = self._text(value, place)
            elif key in ("arguments", "parameters") and not self._keeps_text:
                marked[key] = '{"x": "y"}' if isinstance(value, str) else {"x": "y"}
            else:
                marked[key] = self._other(value) if isinstance(value, str) and key != "type" else value
        return marked

    def _tools(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._tool(tool) for tool in (tools if self._keeps_text else tools[:1])]

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool.get("function")
        if isinstance(function, dict):
            kind = {} if self._keeps_text else {"type": "function"}
            return {**(tool if self._keeps_text else {}), **kind, "function": self._tool(function)}
        name = self._text(str(tool.get("name") or "f"), "tools")
        return {**tool, "name": name} if self._keeps_text else {"name": name, "description": "f", "parameters": _PARAMETERS}
