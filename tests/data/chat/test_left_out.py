"""A run reports the parts of a conversation that a template would leave out, whatever words its text has."""

import pytest

from llamajax.data.chat.left_out import left_out
from llamajax.errors import DataError
from tests.data.chat.talks import (
    ONE,
    RESULT,
    SYSTEM,
    TOOL,
    TWO,
    Q,
    R,
    calling,
    samples,
    served,
    spelling,
)

# As DeepSeek-V3.1's: what is thought is a switch, and taken out of what is said.
SWITCH = """\
{%- if thinking is not defined %}{%- set thinking = false %}{%- endif %}
{%- for m in messages %}
{{- m.role + ':' + ('</think>' if m.role == 'assistant' else '') + m.content.split('</think>')[-1] + eos_token }}
{%- endfor %}{%- if add_generation_prompt %}{{- 'assistant:' + ('<think>' if thinking else '</think>') }}{%- endif %}"""
# As SmolLM3's: its system prompt speaks of it.
SPEAKING = """\
{%- if messages[0].role != 'system' %}{{- 'system:Give reasoning before you answer, thinking first.\n' }}{%- endif %}
{%- for m in messages %}{{- m.role + ':' + m.content + eos_token }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""
# As Phi-4-mini's: tools are a message's.
TOOLS_OF_SYSTEM = """\
{%- for m in messages %}{{- m.role + ':' + m.content }}
{%- if m.role == 'system' and 'tools' in m and m['tools'] is not none %}{{- '<tools>' + m['tools'] }}{%- endif %}
{{- eos_token }}{%- endfor %}{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""
# As Llama 3.1's: a turn is a text or a call.
CALL_ALONE = """\
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for m in messages %}{{- m.role + ':' }}
{%- if 'tool_calls' in m %}{{- m.tool_calls[0].function | tojson }}{%- else %}{{- m.content }}{%- endif %}
{{- eos_token }}{%- endfor %}{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""
# As of a tokenizer with two templates, of which the one for tools knows calls.
CALLS_WITH_TOOLS = f"{{% if tools is not none +%}}{CALL_ALONE}{{%+ else +%}}{SPEAKING}{{%+ endif %}}"
# As Gemma's second: no turn of the system's, and no word of it.
NO_SYSTEM = SPEAKING.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'system' %}")
# It takes certain words only, so that nothing can be said in their place.
CERTAIN = """\
{%- for m in messages %}
{%- if m.content[0] not in 'qot' %}{{- raise_exception('no') }}{%- endif %}{{- m.role + ':' + m.content + eos_token }}
{%- endfor %}{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""

THOUGHTFUL = [Q, ONE | {"reasoning_content": "WHY"}]
INLINE = [Q, ONE | {"content": "<think>\nWHY\n</think>\n\none"}]
BESIDE = [Q, calling({"x": 1}) | {"content": "LET ME LOOK"}, RESULT, TWO]

LEFT_OUT = [
    (SWITCH, THOUGHTFUL, {}, "messages[1].reasoning_content"),
    (SWITCH, INLINE, {}, "the thought in messages[1].content"),
    (SWITCH, [*INLINE, R, TWO], {}, "the thought in messages[1].content"),
    (CERTAIN, THOUGHTFUL, {}, "messages[1].reasoning_content"),
    (TOOLS_OF_SYSTEM, [Q, ONE], {"tools": [TOOL]}, "tools"),
    (TOOLS_OF_SYSTEM, [SYSTEM, Q, ONE], {"tools": [TOOL["function"]]}, "tools"),
    (CALL_ALONE, BESIDE, {"tools": [TOOL]}, "messages[1].content beside its tool_calls"),
    (CALL_ALONE, [*BESIDE, R, ONE | {"weight": 0}], {}, "messages[1].content beside its tool_calls"),
    (CALLS_WITH_TOOLS, [Q, calling({"x": 1}) | {"content": ""}, RESULT, TWO], {}, "messages[1].tool_calls"),
    (NO_SYSTEM, [SYSTEM, Q, ONE], {}, "messages[0].content"),
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return spelling(tmp_path_factory.mktemp("spelling"))


@pytest.mark.parametrize(("text", "messages", "others", "what"), LEFT_OUT, ids=range(len(LEFT_OUT)))
def test_what_is_left_out_is_refused(both, text, messages, others, what):
    with pytest.raises(DataError) as caught:
        samples(both, text, {"messages": messages} | others)
    rule = f"some.jinja: chat template: does not write {what}; name a template that does, or remove it"
    assert str(caught.value) == rule


WRITTEN = [
    (SWITCH, [SYSTEM, Q, ONE, R, TWO], None),
    (SWITCH, [Q, ONE | {"content": "<think>\n\n</think>one"}], None),
    (CALL_ALONE, [Q, calling({"x": 1}), RESULT, TWO], [TOOL]),
    (CALL_ALONE, [Q, calling({"x": 1}) | {"content": ""}, RESULT, TWO], None),
    (CALLS_WITH_TOOLS, [Q, calling({"x": 1}), RESULT, TWO], [TOOL]),
    (CALLS_WITH_TOOLS, [Q, ONE], None),
    (CERTAIN, [Q, ONE], None),
]


@pytest.mark.parametrize(("text", "messages", "tools"), WRITTEN, ids=range(len(WRITTEN)))
def test_what_is_written_is_learnt_as_transformers_writes_it(both, text, messages, tools):
    ((whole, _),) = samples(both, text, {"messages": messages, "tools": tools})
    assert whole == served(both, text, messages, tools=tools)


def test_a_shape_is_judged_once(both, monkeypatch):
    _, _, template = both
    one = template(SPEAKING + " ")
    render_prefixes, asked = one.render_prefixes, []
    monkeypatch.setattr(one, "render_prefixes", lambda *args: [asked.append(args), *render_prefixes(*args)][1:])
    for name in ("one", "two", "three"):
        assert left_out(one, [Q, {"role": "assistant", "content": name}], {}) is None
    assert len(asked) == 1
    assert left_out(one, THOUGHTFUL, {}) == "messages[1].reasoning_content"
    assert left_out(one, [Q, ONE | {"reasoning_content": " "}], {}) is None
