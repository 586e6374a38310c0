"""Each answer's blocks are told from those of others, however many a message has, and follow what is served before them."""

import pytest

from llamajax.errors import DataError
from tests.data.chat.talks import ONE, RESULT, SYSTEM, TWO, Q, R, calling, samples, served, spelling

USER = "{%- if m.role in ('user', 'system', 'tool') %}{{- m.role + ':' + m.content + '\n' }}{%- endif %}"
PROMPT = "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"
SAID = "{{- 'assistant:' }}{% generation %}{{- m.content + eos_token }}{% endgeneration %}"


def template(answer: str, user: str = USER, prompt: str = PROMPT) -> str:
    """One that writes an answer so."""
    turns = f"{user}{{%- if m.role == 'assistant' %}}{answer}{{%- endif %}}"
    return f"{{%- for m in messages %}}{turns}{{%- endfor %}}{prompt}"


# More blocks in a message that is not the last, before or behind what it says.
MORE_BEFORE = template("{%- if not loop.last %}{% generation %}{{- '<' }}{% endgeneration %}{{- '|' }}{%- endif %}" + SAID)
MORE_BEHIND = template(SAID + "{{- '|' }}{%- if not loop.last %}{% generation %}{{- '>' }}{% endgeneration %}{%- endif %}")
# As gpt-oss': a block for each channel, and what is thought in the last answer only, or beside calls before one.
CHANNELS = template("""\
{%- set said = namespace(later=false) %}{%- for later in messages[loop.index:] %}
{%- if later.role == 'assistant' and not later.tool_calls %}{%- set said.later = true %}{%- endif %}{%- endfor %}
{%- if m.thinking and (loop.last and not add_generation_prompt or m.tool_calls and not said.later) %}
{{- 'assistant:' }}{% generation %}{{- 'analysis ' + m.thinking + eos_token }}{% endgeneration %}{%- endif %}
{%- if m.tool_calls %}
{{- 'assistant:' }}{% generation %}{{- 'call ' + m.tool_calls[0].function.name + eos_token }}{% endgeneration %}
{%- else %}{{- 'assistant:' }}{% generation %}{{- 'final ' + m.content + eos_token }}{% endgeneration %}{%- endif %}""")
# As Phi-3's in trl: one more block at the end of all.
END_OF_ALL = template(
    SAID.replace("eos_token", "'<|im_end|>'"),
    prompt=PROMPT.replace("{%- endif", "{%- else %}{% generation %}{{- eos_token }}{% endgeneration %}{%- endif"),
)
# As DiffusionGemma's in trl: a call's result comes before the text beside it, whose turn ends where no answer follows.
RESULTS_FIRST = template(
    """\
{{- 'assistant:' }}{%- set next = messages[loop.index] | default({}) %}
{%- if m.tool_calls %}{% generation %}{{- 'call ' + m.tool_calls[0].function.name }}{% endgeneration %}
{{- 'tool:' + (next.content or '') }}{%- endif %}{% generation %}{{- m.content or '' }}{% endgeneration %}
{%- if not (messages[loop.index + 1] | default({})).role == 'assistant' %}
{%- generation %}{{- eos_token }}{% endgeneration %}{%- endif %}""",
    user=USER.replace(", 'tool'", ""),
)
# As that of R1's distillations: an answer opens with a thought, and none is in those that are there.
OPENS = template(SAID, prompt=PROMPT.replace("assistant:", "assistant:<think>\\n"))
WITHOUT_BLOCKS = OPENS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
READS_FIRST = "{%- if messages[0].role == 'system' %}{%- endif %}"
ASKS_FIRST = "{%- if messages[0].role != 'user' and messages | length < 3 %}{{- raise_exception('ask first') }}{%- endif %}"

WHY, HOW = ONE | {"thinking": "why"}, TWO | {"thinking": "how"}
OFF = {"train": False}
CALLING = calling({"x": 1}) | {"thinking": "why"}
LOOKING = calling({"x": 1}) | {"content": "look"}

BLOCKS = [
    (MORE_BEFORE, [Q, ONE | OFF, R, TWO], [["two</s>"]]),
    (MORE_BEFORE, [Q, ONE, R, TWO], [["one</s>"], ["two</s>"]]),
    (MORE_BEHIND, [Q, ONE | OFF, R, TWO], [["two</s>"]]),
    (MORE_BEHIND, [Q, ONE, R, TWO], [["one</s>", ">", "two</s>"]]),
    (MORE_BEHIND, [Q, ONE, R, TWO | OFF], [["one</s>", ">"]]),
    (MORE_BEFORE, [Q, ONE, TWO], [["one</s>"], ["two</s>"]]),
    (CHANNELS, [Q, WHY, R, HOW], [["analysis why</s>", "final one</s>"], ["analysis how</s>", "final two</s>"]]),
    (CHANNELS, [Q, WHY | OFF, R, HOW], [["analysis how</s>", "final two</s>"]]),
    (CHANNELS, [Q, CALLING, RESULT, HOW], [["analysis why</s>", "call f</s>"], ["analysis how</s>", "final two</s>"]]),
    (CHANNELS, [Q, CALLING | OFF, RESULT, TWO], [["final two</s>"]]),
    (CHANNELS, [Q, CALLING | OFF, RESULT, HOW, R, ONE], [["analysis how</s>", "final two</s>"], ["final one</s>"]]),
    (END_OF_ALL, [Q, ONE, R, TWO], [["one<|im_end|></s>"], ["two<|im_end|></s>"]]),
    (END_OF_ALL, [SYSTEM, ONE, R, TWO], [["one<|im_end|></s>"], ["two<|im_end|></s>"]]),
    (RESULTS_FIRST, [Q, LOOKING | OFF, RESULT, TWO], [["two</s>"]]),
    (READS_FIRST + MORE_BEFORE, [ONE, R, TWO], [["one</s>"], ["two</s>"]]),
    (OPENS, [Q, ONE | {"content": "<think>\nwhy\n</think>one"}], [["<think>\nwhy\n</think>one</s>"]]),
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return spelling(tmp_path_factory.mktemp("spelling"))


@pytest.mark.parametrize(("text", "messages", "learnt"), BLOCKS, ids=range(len(BLOCKS)))
def test_blocks_are_those_of_the_answers_that_are_learnt(both, text, messages, learnt):
    found = samples(both, text, {"messages": messages})
    assert [said for _, said in found] == learnt
    plain = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    assert {whole for whole, _ in found} <= {served(both, text, plain[:end]) for end in range(1, len(plain) + 1)}


BEGINS = "begins an answer with {!r} in its generation prompt, but not before the answer itself; add it there too"
REFUSED = [
    (OPENS, [Q, ONE], BEGINS.format("assistant:<think>\n")),
    (WITHOUT_BLOCKS, [Q, ONE], BEGINS.format("assistant:<think>\n")),
    (OPENS, [Q, ONE | {"content": "<think>\nwhy\n</think>one"}, R, TWO], BEGINS.format("assistant:<think>\n")),
    (READS_FIRST + WITHOUT_BLOCKS, [ONE, R, TWO], BEGINS.format("assistant:<think>\n")),
    (
        ASKS_FIRST + WITHOUT_BLOCKS, [SYSTEM, ONE, R, TWO],
        "refuses the conversation: ask first; messages[1] answers nothing: put a question before it, or",
    ),
    (
        ASKS_FIRST + OPENS, [ONE, R, TWO],
        "refuses the conversation: ask first; messages[0] answers nothing: put a question before it",
    ),
    (
        MORE_BEHIND, [Q, ONE, TWO],
        "which {% generation %} blocks belong to messages[2] and which to messages before it is unclear;"
        " name another template",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "messages", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_told_is_refused(both, text, messages, message):
    with pytest.raises(DataError) as caught:
        samples(both, text, {"messages": messages})
    assert str(caught.value).startswith(f"some.jinja: chat template: {message}")
