"""What a chat template leaves out of a conversation, judged by what it writes.

A template's text does not tell: one that has the word `thinking` in it may mean a switch, one that has `tools` those of a
message. So a word that stands nowhere else is put into everything that is said, and looked for in what is written.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.documents.conversations import ANSWERING, REASONING, Message
from llamajax.errors import DataError

_MAX_SHAPES = 2**16
"""That are remembered of a template, for the sake of memory."""
_ID = "callabcde"
"""Of a call, as Mistral's templates want it: nine letters."""
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}


def left_out(template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]) -> str | None:
    """The first thing that the template leaves out of a conversation, as `messages[1].content`; None if it writes all.

    Templates of reasoning models leave out what was thought before the last question, and are served so. Therefore it is
    enough that something is written while the answer that it is in, or one behind it, is the last message.

    Conversations of one shape are judged together, by one that says nothing but the words; where that is not written as a
    whole, each by its own texts. So what is found does not depend on which others there are.
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
    """The places of the words that are not written; None if the template does not take the conversation."""
    answers = [index for index, message in enumerate(messages) if message["role"] in ANSWERING]
    renders = [(len(messages), False), *((answer + 1, False) for answer in answers)]
    try:
        written = [one.text.casefold() for one in template.render_prefixes(messages, renders, None, variables)]
    except DataError:
        return None
    return [place for word, place in words.places.items() if not any(word in text for text in written)]


class Words:
    """Words that stand nowhere else, put behind the texts of a conversation, or in their place."""

    places: dict[str, str]
    """Where each word is."""
    messages: dict[str, int]
    """Of which message each word is."""

    def __init__(self, *, keeps_text: bool) -> None:
        self.places, self.messages = {}, {}
        self._keeps_text = keeps_text
        self._calls: dict[str, str] = {}

    def put_into(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """The conversation with the words in it."""
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
        """What is no text that must be written, such as an id."""
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
