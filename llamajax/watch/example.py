"""Shows what a run reads and learns of a document: in another colour on a terminal, between marks elsewhere."""

from collections.abc import Sequence

import jax
from rich.text import Text

from llamajax.watch.console import CONSOLE, is_interactive, log

LEARNED = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"
"""Marks around what is learned."""
_STYLE, _COLOUR = "bold green", "green"
_INDENT = " " * 11
_MAX_CHARS, _MAX_STRETCHES = 600, 12


def print_example(stretches: Sequence[tuple[str, bool]], num_tokens: int, num_learned: int, what: str = "document") -> None:
    """Prints a document, on process 0 only; what is long is shortened in the middle.

    Args:
        stretches: texts of the document in order, each with whether it is learned.
        num_tokens: number of its tokens.
        num_learned: number of these that are learned; 0 for a prompt.
        what: word for the document.
    """
    if jax.process_index() != 0:
        return
    in_colour = is_interactive() and not CONSOLE.no_color
    how = f"in {_COLOUR}" if in_colour else "between {} and {}".format(*LEARNED)
    learned = f", of which the model learns {num_learned:,}, {how}" if num_learned else ""
    log(f"example    one {what} of {num_tokens:,} tokens{learned}:")
    shown = Text()
    for text, is_learned in _few(stretches):
        if in_colour:
            shown.append(text, _STYLE if is_learned else None)
        else:
            shown.append("".join((LEARNED[0], text, LEARNED[1])) if is_learned else text)
    for line in shown.split("\n"):
        CONSOLE.print(Text(_INDENT) + line, soft_wrap=True)


def _few(stretches: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Returns the stretches without the middle of long ones, and without those in the middle of many."""
    half = _MAX_STRETCHES // 2
    left_out = len(stretches) - 2 * half
    if left_out > 0:
        told = f"\n[... {left_out:,} stretches ...]\n"
        stretches = [*stretches[:half], (told, False), *stretches[-half:]]
    return [(_short(text), is_learned) for text, is_learned in stretches]


def _short(text: str) -> str:
    """Returns a text without its middle if it is long, and without characters that control a terminal."""
    half = _MAX_CHARS // 2
    if len(text) > _MAX_CHARS:
        text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
