"""Draws line charts over training steps as inline SVG that needs no script, style sheet or network.

The SVG is written by hand because a plotting library is a heavy dependency for six line charts: matplotlib adds some 50 MB,
and its SVG of a long run is larger than our whole report.
"""

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

WIDTH, HEIGHT = 720, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, WIDTH - 28, 10, HEIGHT - 38
_READ_OUTS = 400  # positions along a chart at which its values can be read
_MIN_STEPS_TO_SMOOTH = 100
_MAX_STRETCHES, _MIN_STEPS_PER_STRETCH = 200, 5  # sections that a smooth curve is made from


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve."""

    name: str
    steps: Int64[np.ndarray, "points"]
    """Step of each point, rising."""
    values: Float64[np.ndarray, "points"]
    """Value of each point; a value that is not finite leaves a gap."""
    noisy: bool = False
    """Whether to draw the values faintly, with medians of short sections on top."""
    dots: bool = False
    """Whether to mark each value; for curves with few values."""


def line_chart(
    title: str, lines: Sequence[Line], *, text: Callable[[float], str], from_zero: bool = False, restarts: Sequence[int] = ()
) -> str:
    """Returns a chart as an HTML `<figure>`: caption with legend, drawing, and the values to read out at each position.

    Args:
        title: what the chart shows, with its unit.
        lines: the curves, at least one with at least one value.
        text: formats a value for people, on the axis and in the read-out.
        from_zero: the axis starts at zero rather than at the smallest value.
        restarts: steps at which the run was restarted, drawn as vertical lines.
    """
    first = min(int(line.steps[0]) for line in lines)
    last = max(int(line.steps[-1]) for line in lines)
    low, high = _value_range(lines, from_zero=from_zero)

    def x_of(steps: np.ndarray | float) -> np.ndarray:
        return _LEFT + (np.asarray(steps, np.float64) - first) / max(last - first, 1) * (_RIGHT - _LEFT)

    def y_of(values: np.ndarray | float) -> np.ndarray:
        clipped = np.clip(np.where(np.isfinite(values), values, np.nan), low, high)
        return _BOTTOM - (clipped - low) / (high - low) * (_BOTTOM - _TOP)

    drawing = [*_axes(x_of, y_of, first, last, low, high, text)]
    for step in restarts:
        x = float(x_of(step))
        drawing.append(
            f'<line class="restart" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}"><title>restart</title></line>'
        )
    for index, line in enumerate(lines):
        x, y = x_of(line.steps), y_of(line.values)
        smooth = line.noisy and len(line.steps) >= _MIN_STEPS_TO_SMOOTH
        drawing.append(f'<path class="c{index}{" faint" if smooth else ""}" d="{_path(*_thin_out(x, y))}"/>')
        if smooth:
            steps, medians = _medians(line.steps, line.values)
            drawing.append(f'<path class="c{index}" d="{_path(x_of(steps), y_of(medians))}"/>')
        if line.dots or len(line.steps) == 1:
            places = zip(*_thin_out(x, y), strict=True)
            drawing += [f'<circle class="c{index}" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in places if np.isfinite(b)]

    places, texts = _read_outs(lines, text)
    data = json.dumps({"x": [round(x, 1) for x in x_of(places).tolist()], "text": texts}).replace("</", "<\\/")
    legend = "".join(f'<span class="key c{i}">{html.escape(line.name)}</span>' for i, line in enumerate(lines))
    label = html.escape(f"{title}: {texts[-1]}")
    return (
        f"<figure><figcaption><b>{html.escape(title)}</b>{legend}{_notes(lines, high)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(drawing)}'
        f'<line class="cursor" x1="-9" x2="-9" y1="{_TOP}" y2="{_BOTTOM}"/></svg>'
        f"<output>{html.escape(texts[-1])}</output>"
        f'<script type="application/json">{data}</script></figure>'
    )


def _value_range(lines: Sequence[Line], *, from_zero: bool) -> tuple[float, float]:
    """Returns the ends of the value axis. A few values far above all others are cut off, so that they do not flatten the
    rest."""
    values = np.concatenate([line.values for line in lines])
    values = values[np.isfinite(values)]
    if not values.size:
        return 0.0, 1.0
    low, high = (min(0.0, values.min()) if from_zero else values.min()), values.max()
    usual = np.percentile(values, 99) - low
    if usual > 0 and high - low > 4 * usual:
        high = low + 1.5 * usual
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return float(low if from_zero else low - margin), float(high + margin)


def _notes(lines: Sequence[Line], high: float) -> str:
    values = np.concatenate([line.values for line in lines])
    above, broken = int((values[np.isfinite(values)] > high).sum()), int((~np.isfinite(values)).sum())
    notes = [f"{above} above the top"] * (above > 0) + [f"{broken} not finite"] * (broken > 0)
    return f'<span class="note">{", ".join(notes)}</span>' if notes else ""


def _ticks(low: float, high: float, count: int) -> np.ndarray:
    """Returns about `count` round numbers between `low` and `high`."""
    raw = (high - low) / count
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(nice * power for nice in (1, 2, 2.5, 5, 10) if raw <= nice * power * 1.000001)
    return np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step


def _axes(x_of: Callable, y_of: Callable, first: int, last: int, low: float, high: float, text: Callable) -> list[str]:
    drawing = []
    for value in _ticks(low, high, 5):
        y = float(y_of(value))
        drawing.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawing.append(f'<text class="y" x="{_LEFT - 8}" y="{y + 4:.1f}">{html.escape(text(float(value)))}</text>')
    for value in np.unique(np.round(_ticks(first, max(last, first + 1), 7))):
        if value <= last:
            x = float(x_of(value))
            drawing.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{_BOTTOM}" y2="{_BOTTOM + 5}"/>')
            drawing.append(f'<text class="x" x="{x:.1f}" y="{_BOTTOM + 18}">{value:,.0f}</text>')
    drawing.append(f'<line class="tick" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>')
    drawing.append(f'<text class="x" x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 34}">step</text>')
    return drawing


def _thin_out(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns points that draw the same curve: the lowest and highest per pixel column, where there are more than two."""
    if len(x) <= 2 * (_RIGHT - _LEFT):
        return x, y
    columns = np.floor(x)
    starts = np.flatnonzero(np.diff(columns, prepend=-1.0))
    extremes = np.stack([np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)], axis=1)
    return np.repeat(columns[starts], 2), extremes.reshape(-1)


def _path(x: np.ndarray, y: np.ndarray) -> str:
    commands, pen_up = [], True
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if b != b:  # not a number: a gap
            pen_up = True
        else:
            commands.append(f"{'M' if pen_up else 'L'}{a:.1f} {b:.1f}")
            pen_up = False
    return "".join(commands)


def _medians(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the middle step, and the median of the finite values, of each section of the curve."""
    stretches = min(_MAX_STRETCHES, len(values) // _MIN_STEPS_PER_STRETCH)
    middles = [stretch.mean() for stretch in np.array_split(steps, stretches)]
    finite = [stretch[np.isfinite(stretch)] for stretch in np.array_split(values, stretches)]
    return np.array(middles), np.array([np.median(stretch) if stretch.size else np.nan for stretch in finite])


def _read_outs(lines: Sequence[Line], text: Callable[[float], str]) -> tuple[np.ndarray, list[str]]:
    """Returns steps at which the chart can be read, and a line of text for each: the newest value of every curve by then."""
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    steps = steps[np.unique(np.linspace(0, len(steps) - 1, _READ_OUTS).round().astype(int))]
    texts = []
    for step in steps.tolist():
        parts = []
        for line in lines:
            i = int(np.searchsorted(line.steps, step, side="right")) - 1
            if i >= 0:
                at = "" if line.steps[i] == step else f" (step {line.steps[i]:,})"
                parts.append(f"{line.name} {text(float(line.values[i]))}{at}")
        texts.append(f"step {step:,}: {', '.join(parts)}")
    return steps, texts
