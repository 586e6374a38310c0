"""Chat templates that are damaged, or leave the sandbox, or never end; each asked to write a conversation."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from llamajax.data.chat import chat_template
from llamajax.data.chat.chat_template import ChatTemplate

SHIPPED = sorted((Path(__file__).parent.parent.parent / "configs" / "chat_templates").glob("*"))
TOKENIZER: Any = SimpleNamespace(bos_token="<s>", eos_token="</s>")
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]

HOSTILE = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "another module": "{{ cycler.__init__.__globals__.os.popen('id') }}",
    "a format string past the sandbox": "{% set n = namespace() %}{% set n.__html__ = '{0}'.format %}{{ n }}",
    "a namespace by name": "{{ namespace(__html__=1) }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a change of a message": "{{ messages[0].update(role='x') }}",
    "a large range": "{% for x in range(10**8) %}{% endfor %}",
    "too much text": "{% for x in range(9999) %}{{ 'a' * 10000 }}{% endfor %}",
    "a power": "{{ (messages | length + 8) ** (9 ** (9 ** 9)) }}",
    "a product": "{{ 'a' * 10 ** 11 * messages | length }}",
    "a wide field": "{{ messages | string | center(10 ** 11) }}",
    "text that doubles": "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "half a character": r"{{ '\ud800' }}",
    "lines in its complaint": "{{ raise_exception('a\nb\r\n' * 9999) }}",
}
FRAGMENTS = (
    "{{", "}}", "{%", "%}", "{#", "{% for x in range(999) %}", "{% endfor %}", "{{ messages", " | map('attr', '__class__') ",
    ".__class__", "['__globals__']", "{% set messages = 1 %}", "{% generation %}", "{% endgeneration %}", "\0", "'", '"',
    "(" * 500, "{% if " * 300, "{{ lipsum.__globals__ }}", "{{ self._TemplateReference__context }}", "{% extends 'x' %}",
    "{{ 9 ** 9 ** 9 }}",
)  # fmt: skip


def prepare(directory: Path):
    """Limits templates to a second, so that those that never end do not take ten each."""
    chat_template.MAX_CPU_S, chat_template.MAX_MEMORY_BYTES = 0, 1 << 28
    texts = [path.read_text() for path in SHIPPED]

    def attempt(rng: np.random.Generator) -> None:
        text = texts[rng.integers(len(texts))]
        if rng.random() < 0.2:
            text = list(HOSTILE.values())[rng.integers(len(HOSTILE))]
        for _ in range(rng.integers(1, 4)):
            start = rng.integers(len(text) + 1)
            end = start + rng.choice((0, 0, 1, 5, 50))
            text = text[:start] + FRAGMENTS[rng.integers(len(FRAGMENTS))] * int(rng.choice([0, 1, 1])) + text[end:]
        ChatTemplate(text, TOKENIZER, "some.jinja").render(TURNS, add_generation_prompt=True)

    return attempt
