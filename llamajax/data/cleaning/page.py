"""Renders the report as one self-contained HTML page.

The texts in it are untrusted: all of them are escaped, and the page loads and runs nothing.
"""

import difflib
import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

from llamajax.units import format_bytes
from llamajax.watch.page import Card, build_page

_STYLE = """:root { --c0: #2563c9; --c1: #d9580d; }
@media (prefers-color-scheme: dark) { :root { --c0: #6ea6ff; --c1: #ff9a4d; } }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; margin: 4px 0 14px;
  background: var(--card); border-radius: 10px; padding: 10px 14px; max-height: 260px; overflow-y: auto; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
.numbers td:not(:first-child, .bars), .numbers th:not(:first-child) { text-align: right; }
.share { display: inline-block; height: 10px; border-radius: 3px; background: var(--c0); vertical-align: middle; }
small { color: var(--soft); }
mark { background: color-mix(in srgb, var(--c1) 35%, transparent); color: inherit; }
"""
_BAR = 160


def page(told: dict[str, Any]) -> str:
    """Returns the HTML page of a report."""
    body = f"""<h2>Steps</h2>
{_steps(told)}
<h2>Sources, and their documents after each step</h2>
{_sources(told)}
<h2>Reasons</h2>
{_reasons(told)}
{_languages(told)}
{_near(told)}
{_pairs("Near duplicates: the document that stays, and the similar one", told["alike"], with_similarity=True)}
{_pairs("Exact duplicates: the document that stays, and its copy", told["copies"], with_similarity=False)}
{_pairs("Lines that filters removed from documents that stay", told["cut"], with_similarity=False)}
{_examples(told)}"""
    title, intro = "Cleaned documents", f"{html.escape(', '.join(told['steps']))} &middot; {_versions(told)}"
    return build_page(title, heading=title, intro=intro, cards=_cards(told), body=body, style=_STYLE)


def _versions(told: dict[str, Any]) -> str:
    return html.escape(", ".join(f"{name} {version}" for name, version in told["versions"].items()))


def _cards(told: dict[str, Any]) -> list[Card]:
    (documents, num_bytes), (documents_left, bytes_left) = told["before"], told["left"]
    empty, bad = (sum(source[kind] for source in told["sources"]) for kind in ("empty", "bad"))
    cards = [
        Card("documents", f"{documents_left:,}", f"of {documents:,}"),
        Card("stay", _percent(documents_left, documents), "of the documents"),
        Card("text", format_bytes(bytes_left), f"of {format_bytes(num_bytes)}"),
        Card("stays", _percent(bytes_left, num_bytes), f"of the text; {empty:,} empty and {bad:,} bad records besides"),
    ]
    if told["held_out"]:
        held_out = told["held_out"]
        cards.append(
            Card("held-out texts", f"{held_out['texts']:,}", f"{held_out['too_short']:,} of them too short to be found")
        )
    return cards


def _steps(told: dict[str, Any]) -> str:
    rows, before = [], told["before"]
    for step in told["steps"]:
        after = told["after"][step]
        rows.append([step, *_counts(before), *_counts(after), _percent(after[0], before[0]), _percent(after[1], before[1])])
        before = after
    return _table(
        ["step", "documents before", "text before", "documents after", "text after", "of documents", "of text"], rows
    )


def _sources(told: dict[str, Any]) -> str:
    rows = [
        [
            source["key"],
            *_counts(source["before"]),
            *(f"{source['after'][step][0]:,}" for step in told["steps"]),
            format_bytes(source["left"][1]),
            _percent(source["left"][0], source["before"][0]),
            format_bytes(source["cut"][1]),
        ]
        for source in told["sources"]
    ]
    return _table(
        ["source", "documents", "text", *told["steps"], "text left", "stays", "removed from documents that stay"], rows
    )


def _reasons(told: dict[str, Any]) -> str:
    if not told["removed"]:
        return "<p>Everything stays.</p>"
    most = max(documents for documents, _ in told["removed"].values()) or 1
    bars = {reason: documents / most for reason, (documents, _) in told["removed"].items()}
    rows = [[reason, *_counts(counts), _percent(counts[0], told["before"][0])] for reason, counts in told["removed"].items()]
    return _table(["left out by", "documents", "text", "of all documents"], rows, list(bars.values()))


def _languages(told: dict[str, Any]) -> str:
    if not told["languages"]:
        return ""
    total = sum(documents for documents, _ in told["languages"].values())
    rows = [[code, *_counts(counts), _percent(counts[0], total)] for code, counts in told["languages"].items()]
    table = _table(["language", "documents", "text", "of those checked"], rows, [row[0] / total for row in _values(told)])
    return f"<h2>Languages before any document was left out</h2>{table}"


def _values(told: dict[str, Any]) -> list[list[int]]:
    return list(told["languages"].values())


def _near(told: dict[str, Any]) -> str:
    if not told["near"]:
        return ""
    near, settings = told["near"], told["settings"]["near_duplicates"]
    histogram = near["histogram"]
    most = max(histogram) or 1
    rows = [
        [f"{index / len(histogram):.2f} to {(index + 1) / len(histogram):.2f}", f"{count:,}"]
        for index, count in enumerate(histogram)
        if count
    ]
    bars = [count / most for count in histogram if count]
    words = (
        f"{near['candidates']:,} candidate pairs from {settings['num_permutations']} minima; {sum(histogram):,} were"
        f" measured, the others were connected before; {near['clusters']:,} clusters at {settings['threshold']} or more"
    )
    return f"<h2>Similarity of candidates</h2><p>{words}</p>{_table(['Jaccard similarity', 'pairs'], rows, bars)}"


def _pairs(title: str, pairs: Sequence[Sequence[Any]], *, with_similarity: bool) -> str:
    if not pairs:
        return ""
    shown = []
    for similarity, where, text, other_where, other_text in pairs:
        note = f"<small>similarity {similarity:.3f}</small>" if with_similarity else ""
        sides = zip((where, other_where), _differences(text, other_text), strict=True)
        halves = "".join(f"<div>{_escaped_text(place, marked)}</div>" for place, marked in sides)
        shown.append(f'{note}<div class="pair">{halves}</div>')
    return f"<h2>{title}</h2>{''.join(shown)}"


def _examples(told: dict[str, Any]) -> str:
    return "".join(
        f"<h2>Left out by {html.escape(reason)}</h2>{''.join(_text(f'{where}: {why}', text) for where, text, why in found)}"
        for reason, found in told["examples"].items()
    )


def _differences(one: str, other: str) -> tuple[str, str]:
    """Returns both texts, escaped, with marks around the words that differ."""
    words = [re.findall(r"\s+|\S+", text) for text in (one, other)]
    marked: tuple[list[str], list[str]] = ([], [])
    for kind, *places in difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for side, (start, end) in enumerate((places[:2], places[2:])):
            text = html.escape("".join(words[side][start:end]))
            marked[side].append(f"<mark>{text}</mark>" if kind != "equal" and text else text)
    return "".join(marked[0]), "".join(marked[1])


def _text(where: str, text: str) -> str:
    return _escaped_text(where, html.escape(text))


def _escaped_text(where: str, escaped: str) -> str:
    return f'<small>{html.escape(where)}</small><div class="text">{escaped}</div>'


def _counts(counts: Sequence[int]) -> tuple[str, str]:
    return f"{counts[0]:,}", format_bytes(counts[1])


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], bars: Sequence[float] | None = None) -> str:
    """Returns a table with escaped cells; `bars` are shares of a bar's full width, one for each row."""
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in [*head, *([""] if bars is not None else [])])
    body = []
    for index, cells in enumerate(rows):
        bar = (
            f'<td class="bars"><i class="share" style="width: {bars[index] * _BAR:.0f}px"></i></td>'
            if bars is not None
            else ""
        )
        body.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}{bar}</tr>")
    return f'<div class="wide"><table class="numbers"><tr>{titles}</tr>{"".join(body)}</table></div>'
