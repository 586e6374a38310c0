"""A plan as one self-contained HTML page: the memory of a GPU, and the timeline of one layer, drawn as inline SVG.

The page needs no network and no script; SVG titles describe the element under the pointer.
"""

import dataclasses
import html
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamajax.estimates.gpus import planned_gpu
from llamajax.planning.cost.timeline import ALL_LANES, Timeline, layer_loops, perfetto, tick_loops
from llamajax.planning.plan import Plan
from llamajax.planning.report import host_memory
from llamajax.planning.report.text import DISCLAIMER, Figures, known_error
from llamajax.planning.scopes import MEMORY_KINDS
from llamajax.units import format_bytes, format_count
from llamajax.watch.page import Card, build_page, verdict

_WIDTH, _LEFT, _LANE, _GAP = 1200, 104, 34, 12
_RIGHT = _WIDTH - 8
_LEAST_WIDTH = 0.7
"""Events narrower than this, in pixels of 1200, are merged with their neighbours of the same kind."""

_KINDS = {
    "matmul": "matrix products", "experts": "products of experts", "attention": "fused attention",
    "memory": "elementwise and reductions", "copy": "copies",
    "wait": "waiting for a collective", "all-gather": "all-gather", "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce", "all-to-all": "all-to-all", "collective-permute": "permutes", "other": "other collectives",
}  # fmt: skip
"""Kinds of events with a colour of their own, with their text in the legend."""

_STYLE = Path(__file__).with_name("picture.css").read_text(encoding="utf-8")


def page(plan: Plan, told: Figures) -> str:
    """Returns the page about `plan`; `told` are its `figures`."""
    name, gpu = told["run"], planned_gpu(plan.config.hardware)
    mesh = " x ".join(f"{axis} {size}" for axis, size in told["mesh"].items() if size > 1) or "one device"
    nodes = f"{told['nodes']} node{'s' if told['nodes'] > 1 else ''}"
    intro = f"""{format_count(told["num_params"])} parameters on {told["num_devices"]:,} x {gpu.name} in {nodes},
mesh {mesh} &middot; {told["tokens_per_step"]:,} tokens per step &middot;
jax {html.escape(told["jax_version"])} &middot; {DISCLAIMER};
{html.escape(known_error(told))}"""
    body = f"""<h2>Memory of a GPU at the fullest moment</h2>
{_memory(told)}
{"".join(_loops(plan.chosen.timeline, told["pipeline"]))}
{_sweep(told) if told["sweep"] else ""}"""
    return build_page(f"{name}: plan", heading=name, intro=intro, cards=_cards(told), body=body, style=_STYLE)


def _cards(told: Figures) -> Sequence[Card]:
    total = told["peak_bytes"] + told["allowance_bytes"]
    waits = told["exposed_fraction"]
    blind = told["without_profile"]["exposed_fraction"]
    price = told["price_per_billion_tokens"]
    lack = host_memory.lack(told["host"]["bytes"], told["host"]["host_room_bytes"]) if told["host"] else ""
    of_card = f"{lack}{format_bytes(total)} of {format_bytes(told['capacity_bytes'])}"
    cost = "no price is set" if price is None else f"{price:,.2f} per billion tokens"
    return (
        Card("memory", verdict("fits" if told["fits"] else "does not fit", bad=not told["fits"]), of_card),
        Card(
            "tokens per second and GPU", f"{told['tokens_per_sec_per_device']:,.0f}", f"{told['step_time_s']:.4g} s per step"
        ),
        Card("MFU", f"{told['mfu']:.1%}", f"{told['mfu_full_attention']:.1%} counting full attention"),
        Card("waiting for communication", f"{waits:.1%}", f"{blind:.1%} scheduled without latencies"),
        Card(f"{format_count(told['token_budget'])} tokens", f"{told['days']:,.1f} days", cost),
    )


def _memory(told: Figures) -> str:
    """Draws one bar: the contents of the card's memory, up to its capacity or beyond."""
    total, capacity = told["peak_bytes"] + told["allowance_bytes"], told["capacity_bytes"]
    parts = [(kind, size, MEMORY_KINDS[kind]) for kind, size in told["memory"].items() if size]
    parts.append(("beside XLA", told["allowance_bytes"], "CUDA context, libraries, NCCL"))
    if total < capacity:
        parts.append(("free", capacity - total, "free"))
    scale = (_RIGHT - 8) / max(total, capacity)
    x, bars, legend = 8.0, [], []
    for kind, size, meaning in parts:
        style, width = kind.split()[0], size * scale
        title = f"{meaning}: {format_bytes(size)}, {size / capacity:.1%} of the card"
        bars.append(f'<rect class="{style}" x="{x:.1f}" y="6" width="{width:.1f}" height="46"><title>{title}</title></rect>')
        if width > 9 * len(kind):
            bars.append(f'<text class="inside" x="{x + width / 2:.1f}" y="34">{kind}</text>')
        x += width
        if size >= capacity / 1000:
            legend.append(f'<span class="{style}"><i></i>{meaning} {format_bytes(size)}</span>')
    limit = 8 + capacity * scale
    label = f"the card: {format_bytes(capacity)}"
    drawing = (
        f'{"".join(bars)}<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="58"/>'
        f'<text class="end" x="{limit:.1f}" y="74">{label}</text>'
    )
    alt = f"{format_bytes(total)} of {format_bytes(capacity)}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} 80" role="img" aria-label="{alt}">{drawing}</svg>'
        f'<div class="legend">{"".join(legend)}</div>'
    )


def _loops(timeline: Timeline, pipeline: Figures | None) -> Iterator[str]:
    """Yields the lanes of one layer forward and of one backward, or of one tick of each kind, on the same scale."""
    if pipeline is None:
        what, loops, titles = "layer", layer_loops(timeline), ("forward", "backward")
    else:
        what, loops = "tick", tick_loops(timeline, **pipeline["ticks"])
        titles = ("that fills the pipeline", "with both passes", "that drains the pipeline")
    if loops is None:
        yield f"<h2>Timeline of a {what}</h2><p>The compiled step has no loop over its {what}s to draw.</p>"
        return
    usual = [max(loop.iterations, key=lambda iteration: iteration[0]) for loop in loops]
    longest = max(period for _, period, _ in usual)
    seen: set[str] = set()
    for title, loop, (_, period, events) in zip(titles, loops, usual, strict=True):
        yield f"<h2>One {what} {title}: {_time(period)}, {loop.num_iterations} times in a row</h2>"
        yield _lanes(dataclasses.replace(timeline, events=events), period, longest, seen)
    legend = "".join(f'<span class="{kind}"><i></i>{text}</span>' for kind, text in _KINDS.items() if kind in seen)
    yield f'<div class="legend">{legend}</div>'


def _lanes(layer: Timeline, period: float, longest: float, seen: set[str]) -> str:
    """Draws the lanes that have events, under a scale of `longest` seconds; adds the kinds drawn to `seen`."""
    slices = [event for event in perfetto(layer)["traceEvents"] if event["ph"] == "X"]
    scale = (_RIGHT - _LEFT) / longest
    used = [lane for lane in layer.lanes if lane != "copy" or any(e["tid"] == ALL_LANES.index("copy") for e in slices)]
    drawing = []
    for row, lane in enumerate(used):
        y = row * (_LANE + _GAP)
        own = [event for event in slices if event["tid"] == ALL_LANES.index(lane)]
        busy = sum(event["dur"] for event in own if event["cat"] != "wait") / 1e6 / period
        drawing.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{period * scale:.1f}" height="{_LANE}"/>')
        drawing.append(f'<text class="end" x="{_LEFT - 10}" y="{y + 15}">{lane.replace("_", "-")}</text>')
        drawing.append(f'<text class="end" x="{_LEFT - 10}" y="{y + 31}">{busy:.0%} busy</text>')
        for kind, start, seconds, title in _merged(own, _LEAST_WIDTH / scale):
            seen.add(kind)
            drawing.append(
                f'<rect class="{kind}" x="{_LEFT + start * scale:.1f}" y="{y}" width="{max(seconds * scale, 0.3):.1f}"'
                f' height="{_LANE}"><title>{html.escape(title)}</title></rect>'
            )
    bottom, ticks = len(used) * (_LANE + _GAP), []
    for tick in _ticks(longest):
        x = _LEFT + tick * scale
        ticks.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
        ticks.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 14}">{_time(tick)}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {bottom + 20}" role="img" aria-label="timeline">{"".join(drawing + ticks)}</svg>'


def _ticks(longest: float) -> Iterator[float]:
    """Yields four to ten round numbers from zero on, below `longest`."""
    power = 10.0 ** math.floor(math.log10(longest))
    step = next(power * share for share in (0.1, 0.2, 0.25, 0.5, 1.0) if longest / (power * share) <= 10)
    yield from (step * index for index in range(math.ceil(longest / step)))


def _merged(events: Sequence[Mapping[str, Any]], least: float) -> Iterator[tuple[str, float, float, str]]:
    """Yields (kind, start, seconds, title) of each rectangle: events shorter than `least` seconds join their neighbours."""
    together: list[Any] = []
    for event in events:
        kind = event["cat"] if event["cat"] in _KINDS else "other"
        start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
        if together and seconds < least and together[0] == kind and start - together[1] - together[2] < least:
            together[2] = start + seconds - together[1]
            together[4] += 1
            continue
        if together:
            yield _drawn(*together)
        place = "/".join(event["args"]["op_name"].split("/")[-3:])
        together = [kind, start, seconds, f"{event['cat']}: {event['name']}{f' ({place})' if place else ''}", 1]
    if together:
        yield _drawn(*together)


def _drawn(kind: str, start: float, seconds: float, text: str, count: int) -> tuple[str, float, float, str]:
    more = f" and {count - 1} more" if count > 1 else ""
    return kind, start, seconds, f"{text}{more}, {_time(seconds)}"


def _sweep(told: Figures) -> str:
    """Draws a bar with the tokens per second and GPU for each value."""
    sweep, rows = told["sweep"], told["sweep"]["rows"]
    most = max(row["tokens_per_sec_per_device"] for row in rows)
    width, base = (_RIGHT - 8) / len(rows), 190
    drawing = []
    for index, row in enumerate(rows):
        x, height = 8 + index * width, 150 * row["tokens_per_sec_per_device"] / most
        middle, kind = x + width / 2, "matmul" if row["fits"] else "missing"
        bar = min(width * 0.6, 120)
        title = (
            f"{row['num_devices']:,} GPUs: {row['step_time_s']:.4g} s per step, MFU {row['mfu']:.1%},"
            f" {row['exposed_fraction']:.1%} waiting, {row['days']:,.1f} days"
        )
        fits = "" if row["fits"] else ", does not fit"
        drawing += [
            f'<rect class="{kind}" x="{middle - bar / 2:.1f}" y="{base - height:.1f}" width="{bar:.1f}"'
            f' height="{height:.1f}"><title>{title}</title></rect>',
            f'<text class="mid value" x="{middle:.1f}" y="{base - height - 7:.1f}">'
            f"{row['tokens_per_sec_per_device']:,.0f}</text>",
            f'<text class="mid" x="{middle:.1f}" y="{base + 17}">{html.escape(row["value"])}</text>',
            f'<text class="mid" x="{middle:.1f}" y="{base + 34}">efficiency {row["efficiency"]:.3f}{fits}</text>',
        ]
    return (
        f"<h2>Tokens per second and GPU, by {html.escape(sweep['key'])}</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {base + 40}" role="img" aria-label="sweep">{"".join(drawing)}</svg>'
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.3g} µs"
