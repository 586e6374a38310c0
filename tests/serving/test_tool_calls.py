"""Calls of tools in the formats of published templates, whole and while they are written."""

import itertools
import json
import re

import pytest

from llamajax.serving.tool_calls import HERMES, LLAMA, MISTRAL, certain_text, find_calls, format_of

ANSWERS = {
    "one": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": "</b>"}}\n</tool_call>', "", [("f", {"x": "</b>"})]),
    "text before, two calls": (
        HERMES,
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{"y":[1]}}</tool_call>',
        "Let me see.",
        [("f", {}), ("g", {"y": [1]})],
    ),
    "no end": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": {"y": 1}}}', "", [("f", {"x": {"y": 1}})]),
    "no JSON": (HERMES, "<tool_call>\n{name: f}\n</tool_call>", "<tool_call>\n{name: f}\n</tool_call>", []),
    "no call": (HERMES, "It is 3.", "It is 3.", []),
    "llama": (LLAMA, '{"name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})]),
    "llama, two": (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", {}), ("g", {})]),
    "JSON that is no call": (LLAMA, '{"x": 1}', '{"x": 1}', []),
    "mistral": (MISTRAL, ' [{"name": "f", "arguments": {"x": "]"}, "id": "a"}]', "", [("f", {"x": "]"})]),
    "a list that is no call": (MISTRAL, "[1, 2]", "[1, 2]", []),
    "text after": (HERMES, '<tool_call>{"name": "f"}</tool_call> so', '<tool_call>{"name": "f"}</tool_call> so', []),
    "deep": (LLAMA, '{"a":' * 100_000, '{"a":' * 100_000, []),
}


@pytest.mark.parametrize(("format", "text", "content", "calls"), ANSWERS.values(), ids=ANSWERS.keys())
def test_calls_are_found_and_the_rest_is_text(format, text, content, calls):
    found_content, found = find_calls(text, format)
    assert found_content == content
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found] == calls
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call["id"]) and call["type"] == "function" for call in found)
    if len(text) > 1000:
        return
    certain = [certain_text(text[:n], format) for n in range(len(text) + 1)]
    for shorter, longer in itertools.pairwise(certain):
        assert longer.startswith(shorter)
    assert (content if calls else text).startswith(certain[-1].strip())


def test_text_is_held_back_no_longer_than_a_call_may_begin():
    said = {"a <": "a", "a <tool_": "a", "a <tool>": "a <tool>", "a <tool_call>{": "a", "a ": "a"}
    assert {text: certain_text(text, HERMES) for text in said} == said
    assert [certain_text(text, LLAMA) for text in (" ", "{", "It is {")] == ["", "", "It is {"]
    assert certain_text("<tool_call>", None) == "<tool_call>"


def test_formats_of_published_templates():
    hermes = "For each function call return a json object within <tool_call></tool_call> tags"
    llama3 = """Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}."""
    llama3_code = """{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}"""
    mistral = """{{- "[TOOL_CALLS] [" }}"""
    assert [format_of(text) for text in (hermes, llama3, llama3_code, mistral)] == [HERMES, LLAMA, LLAMA, MISTRAL]
    assert format_of("{{ messages }}") is None
