"""A chat template in a process of its own: hostile ones do no harm, and it ends with its template."""

import gc
import subprocess
from pathlib import Path

import pytest

from llamajax.data.chat import chat_template
from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.errors import DataError
from tests.faults.bad_templates import HOSTILE, TOKENIZER, TURNS

SYSTEM = {"role": "system", "content": "Be kind."}


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, TOKENIZER, "some.jinja")


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages | attr('__class__') }}",
        "{{ self.__init__ }}{{ config }}{{ open }}{{ __import__ }}{{ os }}",
    ],
)
def test_what_is_hidden_is_empty(text):
    assert template(text).render(TURNS, add_generation_prompt=True) == ""


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_one_line(monkeypatch, text):
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0)  # which leaves up to a second
    monkeypatch.setattr(chat_template, "MAX_MEMORY_BYTES", 2**28)
    with pytest.raises(DataError, match=r"^some.jinja: chat template: ") as caught:
        template(text).render(TURNS, add_generation_prompt=True)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 500
    assert "Traceback" not in message


@pytest.mark.slow
def test_a_template_may_take_its_time_for_every_conversation_anew(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 1)
    busy = "{% for a in range(3000) %}{% for b in range(500) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    made = template(busy)
    for number in range(40):
        message = {"role": "user", "content": str(number)}
        assert made.render([message], add_generation_prompt=True) == str(number)


def test_a_refusal_names_the_reason_and_leaves_the_template_usable():
    strict = template("{% if messages[0].role != 'user' %}{{ raise_exception('the user\n begins') }}{% endif %}ok")
    message = (
        r"^some.jinja: chat template: refuses the conversation: the user begins; correct the template or the conversation$"
    )
    with pytest.raises(DataError, match=message):
        strict.render([SYSTEM], add_generation_prompt=False)
    assert strict.render(TURNS, add_generation_prompt=False) == "ok"


def test_the_users_keys_are_not_known_to_it(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    made = template("a")
    assert b"a-secret" not in Path(f"/proc/{made._process.pid}/environ").read_bytes()


def test_messages_cannot_forge_a_mark_or_run():
    plain = template("{% for m in messages %}{{ m.content }}{% endfor %}")
    content = "{{ 1 + 1 }}{% generation %}\ue000x\ue001\u2028\0"
    assert plain.render([{"role": "user", "content": content}], add_generation_prompt=False) == content


def test_the_process_ends_with_its_template():
    made = template("a")
    process = made._process
    assert process.poll() is None
    del made
    gc.collect()
    assert process.returncode is not None
    kept = template("b")
    with pytest.raises(subprocess.TimeoutExpired):
        kept._process.wait(0)
    assert kept.text == "b"
