"""Builds the self-contained HTML pages of all commands: one head, one style, cards and tables.

A page loads nothing: its content security policy allows its own style and, where a page has one, its own script.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class Card(NamedTuple):
    """A figure at the top of a page; all three are HTML."""

    label: str
    value: str
    note: str


def build_page(
    title: str, *, heading: str, intro: str, cards: Iterable[Card], body: str, style: str, script: str = ""
) -> str:
    """Returns a whole page.

    Args:
        title: shown by the browser, plain text.
        heading: shown above everything, plain text.
        intro: HTML of the line below the heading.
        cards: the figures at the top.
        body: HTML of everything below the cards.
        style: CSS of this page alone, after the shared one.
        script: JavaScript that runs once the page is loaded; a page without a script allows none.
    """
    policy = f"{_POLICY}; script-src 'unsafe-inline'" if script else _POLICY
    shown = "".join(f"<div><dt>{card.label}</dt><dd>{card.value}</dd><small>{card.note}</small></div>" for card in cards)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{html.escape(title)}</title>
<style>
{_STYLE}{style}</style>
</head>
<body>
<h1>{html.escape(heading)}</h1>
<p>{intro}</p>
<dl class="cards">{shown}</dl>
{body}
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def verdict(text: str, *, bad: bool) -> str:
    """Returns the HTML of a card's value, marked if it is bad news."""
    return f'<span class="bad">{text}</span>' if bad else text


def table(head: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    """Returns a table that scrolls sideways where it is too wide.

    Args:
        head: HTML of the column titles; empty for none.
        rows: HTML of the cells.
        style: class of the table.
    """
    titles = f"<tr>{''.join(f'<th>{title}</th>' for title in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{style}">{titles}{body}</table></div>'
