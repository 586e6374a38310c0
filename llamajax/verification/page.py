"""A verification as one self-contained HTML page: the verdict, each tensor's difference from one device, and the scaled
settings.

The page needs no network and no script; SVG titles describe the element under the pointer.
"""

import html
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from llamajax.verification import text
from llamajax.verification.text import Figures
from llamajax.watch.page import Card, build_page, table, verdict

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_WIDTH, _LEFT, _ROW, _HEAD = 1200, 300, 26, 26
_LEAST, _MOST = -9, 0
"""Powers of ten at the ends of the scale."""


def page(told: Figures) -> str:
    """Returns the page about a verification; `told` are its `figures`."""
    name = told["run"]
    forms = ", ".join(f"{html.escape(key)} {html.escape(str(value))}" for key, value in told["parallel"].items())
    intro = f"""mesh {text.mesh(told["mesh"])}, verified as {text.mesh(told["verified_mesh"])} on
{told["num_devices"]} emulated devices in fp32 &middot; {forms} &middot;
llamajax {told["llamajax"]}, jax {html.escape(told["jax_version"])}"""
    body = f"""{"".join(_cause(told))}
<h2>Largest difference of every tensor from one device{_until(told)}, in units of its largest entry</h2>
{_drawing(told)}
<h2>Steps</h2>
{_steps(told)}
{_forms(told)}
<h2>Scaled down</h2>
{_changes(told)}
<p>The loss, every gradient, moment and weight of {len(told["steps"])} steps were compared with those of one
device that shares no work, in each form that an
<i>auto</i> may resolve to. Not covered: GPU kernels,
16-bit rounding, speed.</p>"""
    return build_page(f"{name}: verification", heading=name, intro=intro, cards=_cards(told), body=body, style=_STYLE)


def _cards(told: Figures) -> Sequence[Card]:
    wrong = sum(not tensor["equal"] for tensor in told["tensors"])
    number = len(told["tensors"])
    return (
        Card(
            "verdict",
            verdict("equal" if told["equal"] else "different", bad=not told["equal"]),
            f"within {told['tolerance']:.0e}",
        ),
        Card("largest difference", text.difference(told["largest_difference"]), "of all numbers, relative"),
        Card("tensors", f"{number - wrong} of {number}", "match one device"),
        Card("took", f"{told['seconds']:.0f} s", f"{len(told['steps'])} steps on each side"),
    )


def _cause(told: Figures) -> Iterator[str]:
    if told["equal"]:
        return
    lines = [*told["clues"], text.trials(told)]
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines if line)
    yield f'<h2 class="bad">{html.escape(text.first_difference(told))}</h2><ul>{items}</ul>'


def _until(told: Figures) -> str:
    return "" if told["equal"] else f" up to step {told['first_difference']['step']}"


def _drawing(told: Figures) -> str:
    """Draws a row for every tensor and a dot for each of its kinds, on a scale of powers of ten."""
    tensors, kinds = told["tensors"], {kind: kind.replace("_", " ") for kind in told["kinds"]}
    height = _HEAD + _ROW * len(tensors) + 4

    def x(value: float | None) -> float:
        power = _MOST if value is None else math.log10(value) if value > 0 else _LEAST
        return _LEFT + (min(max(power, _LEAST), _MOST) - _LEAST) / (_MOST - _LEAST) * (_WIDTH - _LEFT - 16)

    drawing = []
    for power in range(_LEAST, _MOST + 1):
        at = x(10.0**power)
        drawing.append(f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{_HEAD - 6}" y2="{height}"/>')
        label = "equal" if power == _LEAST else f"1e{power}" if power else "1"
        drawing.append(f'<text class="mid" x="{at:.1f}" y="14">{label}</text>')
    limit = x(told["tolerance"])
    drawing.append(f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{_HEAD - 6}" y2="{height}"/>')
    for row, tensor in enumerate(tensors):
        y = _HEAD + _ROW * (row + 0.5)
        bad = "" if tensor["equal"] else " bad"
        name = html.escape(tensor["name"])
        drawing.append(f'<text class="end{bad}" x="{_LEFT - 18}" y="{y + 4:.1f}">{name}</text>')
        drawing.append(f'<line class="lane" x1="{_LEFT}" x2="{_WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}"/>')
        for kind in filter(tensor.__contains__, kinds):
            title = f"{kinds[kind]} of {name} [{text.shape(tensor)}]: {text.difference(tensor[kind])}"
            drawing.append(
                f'<circle class="{kind}" cx="{x(tensor[kind]):.1f}" cy="{y:.1f}" r="5"><title>{title}</title></circle>'
            )
    legend = "".join(f'<span class="{kind}"><i></i>{words}</span>' for kind, words in kinds.items())
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="differences">{"".join(drawing)}</svg>'
        f'<div class="legend">{legend}<span>line: the tolerance, {told["tolerance"]:.0e}</span></div>'
    )


def _steps(told: Figures) -> str:
    rows = []
    for step in told["steps"]:
        one, relative = step["one_device"], step["differences"]
        cells = [f"{step['step']}", f"{step['tokens']:,.0f}"]
        for key in ("loss", "gradient_norm"):
            cells += [_number(step[key]), _number(one[key]), text.difference(relative[key])]
        rows.append(cells)
    return _table(["step", "tokens", *(f"{what}{more}" for what in ("loss", "gradient norm") for more in _ON)], rows)


def _forms(told: Figures) -> str:
    rows = [[row["form"], text.difference(row["largest_difference"]), text.form_verdict(row)] for row in told["forms"]]
    return f"<h2>Forms</h2>{_table(['form', 'largest difference', 'verdict'], rows)}"


_ON = ("", ", one device", ", difference")


def _changes(told: Figures) -> str:
    rows = [[key, str(change["configured"]), _number(change["verified"])] for key, change in told["changes"].items()]
    return _table(["setting", "configured", "verified"], rows)


def _number(value: object) -> str:
    return "not finite" if value is None else f"{value:.7g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(head, [[html.escape(cell) for cell in cells] for cells in rows])
