"""What is learned of a document is in colour on a terminal, and between marks elsewhere."""

import io

import pytest

from llamajax.watch import console, example
from llamajax.watch.example import print_example

TALK = [("<s>Hi\n", False), ("Yo\x1b[2J</s>", True), ("\n", False)]


def printed(monkeypatch, stretches, *, terminal: bool, what="document", num_learned=3, **settings) -> str:
    text = io.StringIO()
    colours = "standard" if terminal else None
    screen = console.Screen(file=text, width=80, force_terminal=terminal, color_system=colours, highlight=False, **settings)
    for module in (console, example):
        monkeypatch.setattr(module, "CONSOLE", screen)
    monkeypatch.setattr(example, "is_interactive", lambda: terminal)
    print_example(stretches, 8, num_learned, what)
    return text.getvalue()


def test_piped(monkeypatch):
    assert printed(monkeypatch, TALK, terminal=False).splitlines() == [
        "example    one document of 8 tokens, of which the model learns 3, between \u27e6 and \u27e7:",
        "           <s>Hi",
        "           \u27e6Yo\ufffd[2J</s>\u27e7",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_of_a_prompt_nothing_is_learned(monkeypatch, terminal):
    shown = printed(monkeypatch, [("<s>Hi", False)], terminal=terminal, what="prompt", num_learned=0)
    assert shown.splitlines() == ["example    one prompt of 8 tokens:", "           <s>Hi"]


def test_on_a_terminal(monkeypatch):
    shown = printed(monkeypatch, TALK, terminal=True)
    assert "\x1b[1;32mYo\ufffd[2J</s>\x1b[0m" in shown
    assert "the model learns 3, in green:" in shown


def test_a_terminal_without_colours_has_marks(monkeypatch):
    assert "\u27e6Yo" in printed(monkeypatch, TALK, terminal=True, no_color=True)


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_long_is_short_in_the_middle(monkeypatch, terminal):
    long = [("a" * 400 + "b" * 400, False), *[("q", False), ("r", True)] * 20]
    shown = printed(monkeypatch, long, terminal=terminal)
    assert "a [... 200 characters ...] b" in shown.replace("\n           ", "")
    assert "[... 29 stretches ...]" in shown
    assert len(shown) < 1200
