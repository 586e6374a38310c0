"""Conversations of all kinds become the tokens that transformers gives them, and what is learnt is what is marked so."""

import hashlib
import json

import pytest

from llamajax.data.chat.chat_tokens import end_problem, end_token
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

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = """\
{%- if tools is not none %}{{- '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}{%- if m.content %}{{- m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}{%- set call = call.function %}
{{- '<tool_call>' + call.name + ' ' + call.arguments | tojson + '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
TOOLS_AS_TEXT = TOOLS.replace(
    "call.arguments | tojson", "(call.arguments if call.arguments is string else call.arguments | tojson)"
)
PARTS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.content is string %}{{- m.content }}{%- else %}{%- for part in m.content %}{{- part.text }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# As Qwen3's: only the last question's answer shows what was thought, or that nothing was.
THINKING = """\
{%- set state = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set state.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > state.last and (loop.last or m.reasoning_content) %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif %}
{{- (m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content) + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# As gpt-oss': it asks whether there is a thought, whatever that says.
CHANNEL = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if 'thinking' in m %}{{- 'analysis: ' + m.thinking + '\n' }}{%- endif %}{{- m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# As DeepSeek-V3's: beside calls, content is null or a text.
NULL = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if 'tool_calls' in m %}{%- for call in m.tool_calls %}
{%- if m['content'] is none %}{{- 'null ' }}{%- else %}{{- 'text ' + m['content'] }}{%- endif %}
{{- call['function']['name'] + ' ' + call['function']['arguments'] }}{%- endfor %}
{%- else %}{{- m['content'] }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
BLOCKS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"""
BLOCKS_WITHOUT_END = BLOCKS.replace(
    "{{- m.content + '<|im_end|>' }}{% endgeneration %}", "{{- m.content }}{% endgeneration %}{{- '<|im_end|>' }}"
)
OPENS_WITHOUT_END = (
    BLOCKS_WITHOUT_END + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
LAST_BLOCK = BLOCKS.replace("m.role == 'assistant' %}", "m.role == 'assistant' and loop.last %}")
NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# As Mistral's first one.
ALTERNATING = """\
{{- bos_token }}{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{{- '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token }}{%- endfor %}"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return spelling(tmp_path_factory.mktemp("spelling"))


LEARNT = [
    (PLAIN, [Q, ONE, R, TWO], ["one<|im_end|>", "two<|im_end|>"]),
    (PLAIN, [ONE, Q, TWO, TWO], ["one<|im_end|>", "two<|im_end|>", "two<|im_end|>"]),
    (PARTS, [Q | {"content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "!"}]}, ONE], ["one<|im_end|>"]),
    (THINKING, [Q, ONE | {"reasoning_content": "why"}], ["<think>\nwhy\n</think>\n\none<|im_end|>"]),
    (THINKING, [Q, ONE | {"reasoning": "why"}], ["<think>\nwhy\n</think>\n\none<|im_end|>"]),
    (BLOCKS, [Q, ONE, R, TWO], ["one<|im_end|>", "two<|im_end|>"]),
]


def test_a_thought_that_the_template_does_not_know_is_part_of_the_text(both):
    found = samples(both, PLAIN, {"messages": [Q, ONE | {"reasoning_content": "why"}]})
    said = "<think>\nwhy\n</think>\n\none"
    assert found == [(served(both, PLAIN, [Q, ONE | {"content": said}]), [f"{said}<|im_end|>"])]
    twice = {"content": said, "reasoning_content": "why"}
    with pytest.raises(DataError, match=r"does not write messages\[1\].reasoning_content; name a template that does"):
        samples(both, PLAIN, {"messages": [Q, ONE | twice]})


def test_ids_of_calls_are_as_long_as_the_template_asks(both):
    """As Mistral's; a call and its result keep one ID."""
    strict = TOOLS.replace(
        "{{- '<tool_call>'",
        "{%- set own = m.tool_calls[0].id %}{%- if own is not defined or own | length != 9 %}"
        "{{- raise_exception('9!') }}{%- endif %}"
        "{{- '<tool_call>' + m.tool_calls[0].id",
    ).replace("{%- if m.content %}", "{{- m.tool_call_id }}{%- if m.content %}")
    ((whole, _),) = samples(both, strict, {"messages": [Q, calling({"x": 1}), RESULT, TWO]})
    own = hashlib.sha256(b"a").hexdigest()[:9]
    assert whole.count(own) == 2
    nine = "abcdef123"
    call = calling({"x": 1})
    call["tool_calls"][0]["id"] = nine
    ((whole, _),) = samples(both, strict, {"messages": [Q, call, {"role": "tool", "content": "4"}, TWO]})
    assert whole.count(nine) == 2
    ((whole, _),) = samples(both, TOOLS, {"messages": [Q, calling({"x": 1}), RESULT, TWO]})
    assert own not in whole


@pytest.mark.parametrize(("text", "messages", "learnt"), LEARNT, ids=range(len(LEARNT)))
def test_text_is_transformers_and_every_answer_is_learnt(both, text, messages, learnt):
    assert samples(both, text, {"messages": messages}) == [(served(both, text, messages), learnt)]


@pytest.mark.parametrize("text", [TOOLS, TOOLS_AS_TEXT])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_calls_and_tools_are_what_the_template_writes(both, text, tools):
    messages = [Q, calling({"x": "y"}), RESULT, TWO]
    ((whole, learnt),) = samples(both, text, {"messages": messages, "tools": tools})
    assert whole == served(both, text, messages, tools=tools)
    assert learnt == ['<tool_call>f {"x": "y"}</tool_call><|im_end|>', "two<|im_end|>"]


def test_arguments_that_are_json_are_not_quoted_again(both):
    """transformers' documentation asks for objects; what OpenAI's servers return, and data have, is their JSON."""
    as_objects, as_json = ([Q, calling(arguments), RESULT, TWO] for arguments in ({"x": 1}, '{"x": 1}'))
    ((whole, _),) = samples(both, TOOLS, {"messages": as_json})
    assert whole == served(both, TOOLS, as_objects)
    compact = [Q, calling('{"x":1}'), RESULT, TWO]
    ((whole, _),) = samples(both, TOOLS_AS_TEXT, {"messages": compact})
    assert whole == served(both, TOOLS_AS_TEXT, compact)


@pytest.mark.parametrize("content", [None, "", "I look: "])
def test_calls_of_a_template_that_asks_for_null(both, content):
    """transformers leaves null out, which such a template fails at; it was written for one that did not."""
    messages = [Q, calling('{"x": 1}') | {"content": content}, RESULT, TWO]
    ((whole, learnt),) = samples(both, NULL, {"messages": messages})
    said = "null " if content is None else f"text {content}"
    assert learnt == [said + 'f {"x": 1}<|im_end|>', "two<|im_end|>"]
    if content is not None:
        assert whole == served(both, NULL, messages)


@pytest.mark.parametrize("text", [CHANNEL, THINKING])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_an_empty_thought_is_what_transformers_makes_of_it(both, text, name):
    messages = [Q, ONE | {name: ""}]
    ((whole, _),) = samples(both, text, {"messages": messages})
    assert whole == served(both, text, messages)


@pytest.mark.parametrize("value", ['{"name": "f", "arguments": {"x": 1}}', '[{"name": "f", "arguments": "{\\"x\\": 1}"}]'])
def test_function_calls_of_sharegpt_are_calls(both, value):
    turns = [("human", "q"), ("function_call", value), ("observation", "4"), ("gpt", "two")]
    record = {"conversations": [{"from": role, "value": text} for role, text in turns], "tools": json.dumps([TOOL])}
    ((whole, learnt),) = samples(both, TOOLS, record, "sharegpt")
    assert whole == served(both, TOOLS, [Q, calling({"x": 1}), RESULT, TWO], tools=[TOOL])
    assert learnt == ['<tool_call>f {"x": 1}</tool_call><|im_end|>', "two<|im_end|>"]


def test_function_calls_are_text_to_a_template_without_calls(both):
    turns = [("human", "q"), ("function_call", "{}"), ("observation", "4"), ("gpt", "two")]
    record = {"conversations": [{"from": role, "value": text} for role, text in turns], "tools": "[]"}
    ((_, learnt),) = samples(both, PLAIN, record, "sharegpt")
    assert learnt == ["{}<|im_end|>", "two<|im_end|>"]


def test_parts_are_lines_to_a_template_of_texts(both):
    parts = Q | {"content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]}
    ((whole, _),) = samples(both, PLAIN, {"messages": [parts, ONE]})
    assert whole == served(both, PLAIN, [Q | {"content": "hello\nyou"}, ONE])


def test_texts_are_parts_to_a_template_of_parts(both):
    text = PARTS.replace("{%- if m.content is string %}{{- m.content }}{%- else %}", "").replace("{%- endif %}\n", "\n", 1)
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in (Q, ONE)]
    assert samples(both, text, {"messages": [Q, ONE]}) == [(served(both, text, parts), ["one<|im_end|>"])]
    assert end_problem(both[2](text), both[0]) is None


def test_variables_of_the_record_are_told(both):
    text = "{{ 'short\n' if brief else '' }}" + PLAIN
    ((whole, _),) = samples(both, text, {"messages": [Q, ONE], "chat_template_kwargs": {"brief": True}})
    assert whole == served(both, text, [Q, ONE], brief=True)


@pytest.mark.parametrize("text", [PLAIN, BLOCKS])
@pytest.mark.parametrize("mark", ["train", "weight", "loss"])
def test_what_is_marked_is_in_the_text_and_not_learnt(both, text, mark):
    messages = [Q, ONE | {mark: 0}, R, TWO | {mark: 1}, Q, ONE]
    expected = served(both, text, [Q, ONE, R, TWO, Q, ONE])
    assert samples(both, text, {"messages": messages}) == [(expected, ["two<|im_end|>", "one<|im_end|>"])]


def test_answers_that_change_are_learnt_as_they_are_served(both):
    """Each in a sample of its own, which ends with it: behind it, the template leaves out what was thought."""
    thoughtful = [Q, ONE | {"reasoning_content": "why"}, R, TWO | {"reasoning_content": "how"}]
    assert samples(both, THINKING, {"messages": [SYSTEM, *thoughtful]}) == [
        (served(both, THINKING, [SYSTEM, *thoughtful[:2]]), ["<think>\nwhy\n</think>\n\none<|im_end|>"]),
        (served(both, THINKING, [SYSTEM, *thoughtful]), ["<think>\nhow\n</think>\n\ntwo<|im_end|>"]),
    ]
    assert "why" not in served(both, THINKING, thoughtful)
    marked = [Q, ONE | {"train": False}, R, TWO]
    assert samples(both, THINKING, {"messages": marked}) == [
        (served(both, THINKING, [Q, ONE, R, TWO]), ["<think>\n\n</think>\n\ntwo<|im_end|>"])
    ]
    first_only = [Q, ONE, R, TWO | {"train": False}]
    assert samples(both, THINKING, {"messages": first_only}) == [
        (served(both, THINKING, [Q, ONE]), ["<think>\n\n</think>\n\none<|im_end|>"])
    ]


def test_answers_in_blocks_that_change_are_learnt_as_they_are_served(both):
    text = BLOCKS.replace("m.content +", "('' if loop.last else 'short: ') + m.content +", 1)
    first = (served(both, text, [Q, ONE]), ["one<|im_end|>"])
    last = (served(both, text, [Q, ONE, R, TWO]), ["two<|im_end|>"])
    assert samples(both, text, {"messages": [Q, ONE, R, TWO]}) == [first, last]
    assert samples(both, text, {"messages": [Q, ONE | {"weight": 0}, R, TWO]}) == [last]


def test_a_template_may_mark_some_answers_only(both):
    whole = served(both, LAST_BLOCK, [Q, ONE, R, TWO])
    for one in (ONE, ONE | {"train": False}):
        assert samples(both, LAST_BLOCK, {"messages": [Q, one, R, TWO]}) == [(whole, ["two<|im_end|>"])]


def test_answers_to_one_question_share_a_sample(both):
    """Thoughts between calls stay until the next question."""
    text = THINKING.replace("m.content.split", "(m.tool_calls | tojson if m.tool_calls else m.content).split")
    thinking = calling("{}") | {"reasoning_content": "why"}
    found = samples(both, text, {"messages": [Q, thinking, RESULT, TWO | {"reasoning_content": "how"}, R, ONE]})
    assert [len(learnt) for _, learnt in found] == [2, 1]
    assert [learnt[0].partition("\n</think>")[0] for _, learnt in found] == ["<think>\nwhy", "<think>\n"]


REFUSED = [
    (PLAIN, [Q, calling("{}"), RESULT, TWO], {}, "does not write messages[1].tool_calls; name a template that does, or"),
    (PLAIN, [Q, ONE], {"tools": [TOOL]}, "does not write tools; name a template that does, or remove it"),
    (
        ALTERNATING, [SYSTEM, Q, ONE], {},
        "refuses the conversation: roles must alternate; it accepts no system message: put that into the first"
        " question, or name a template that accepts one",
    ),
    (ALTERNATING, [Q, Q, ONE], {}, "refuses the conversation: roles must alternate; correct the template or"),
    (
        PLAIN.replace("assistant\n'", "assistant\n<think>'"), [Q, ONE], {},
        "begins an answer with '<|im_start|>assistant\\n<think>' in its generation prompt, but not before the answer"
        " itself; add",
    ),
    (
        LAST_BLOCK, [Q, ONE, R, TWO | {"train": False}], {},
        "has no {% generation %} block around an answer to train on; put one around each, or remove the marks of",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "messages", "others", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_be_learnt_wrongly_is_refused(both, text, messages, others, message):
    with pytest.raises(DataError) as caught:
        samples(both, text, {"messages": messages} | others)
    assert str(caught.value).startswith(f"some.jinja: chat template: {message}")


def test_a_call_without_a_name_is_refused(both):
    record = {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{}"}]}
    with pytest.raises(DataError, match=r"^a turn of function_call must be \{.*\}, or a list of these, not \{\}; "):
        samples(both, TOOLS, record, "sharegpt")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (PLAIN, None),
        (TOOLS, None),
        (THINKING, None),
        (BLOCKS, None),
        (ALTERNATING, None),
        (
            BLOCKS_WITHOUT_END,
            "has <|im_end|>, where generation stops, outside of {% generation %}, so the model never learns to stop; put",
        ),
        (
            OPENS_WITHOUT_END,
            "has <|im_end|>, where generation stops, outside of {% generation %}, so the model never learns to stop; put",
        ),
        (
            NO_END,
            "writes no token after an answer that generation stops at, so the model never learns to stop; write </s> there",
        ),
        (PLAIN.replace("<|im_end|>", "###"), "writes no token after an answer that generation stops at"),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_a_template_whose_answers_have_no_end_is_told_of(both, text, problem):
    tokenizer, _, template = both
    found = end_problem(template(text), tokenizer)
    assert (found is None) == (problem is None)
    if found is not None:
        assert found.startswith(f"some.jinja: chat template: {problem}")
        assert len(found.splitlines()) == 1


def test_the_token_that_ends_a_turn(both):
    tokenizer, _, template = both
    ends = [end_token(template(text), tokenizer) for text in (PLAIN, ALTERNATING, NO_END)]
    assert ends == [tokenizer.vocab_size - 1, tokenizer.eos_id, None]
