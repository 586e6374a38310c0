"""Plans one model in every parallel form on one cluster, and draws docs/forms.svg from the figures in docs/forms.json.

    python scripts/forms.py [--draw] [FORM ...]

Compiles Llama-3.1 8B for 64 H100 in each form, or in the named forms (extra `plan`), which takes some ten minutes on two
cores, and stores the figures. `--draw` only draws the stored figures.
"""

import html
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES, PICTURE = ROOT / "docs" / "forms.json", ROOT / "docs" / "forms.svg"
BASE = {
    "hardware.gpu": "h100", "hardware.nodes": 8, "train.global_batch_size": 256, "train.grad_accum_steps": 2,
    "model.remat": "save_attention",
}  # fmt: skip
WIDTH, ROW, TOP, BAR = 1240, 34, 88, 900
COLUMNS = {
    "form": 14, "each device has its part of": 240, "wins": 450, "sent": 690, "peak": 790,
    "step: computing, slowed by collectives, waiting": BAR,
}  # fmt: skip
PALE, RED = "#666666", "#d62728"


@dataclass(frozen=True)
class Form:
    """Parallel form, in words, and its settings."""

    name: str
    splits: str
    """Arrays that are sharded over the devices."""
    wins: str
    """Situation in which to choose this form."""
    changes: dict[str, Any]


_STATE, _MATMULS = "weights, gradients, moments", "the same, matmuls, tokens"
_IN_NODES, _TENSOR = {"mesh.data": 8, "mesh.fsdp": 8}, {"mesh.fsdp": 8, "mesh.tensor": 8}
_SEQUENCE = {"mesh.fsdp": 8, "mesh.sequence": 8}
_PIPELINE = {"mesh.pipeline": 8, "mesh.fsdp": 8, "parallel.zero": 1, "train.grad_accum_steps": 32}
FORMS = (
    Form("ZeRO-3", _STATE, "almost always", {"mesh.fsdp": 64}),
    Form("ZeRO-3, plain loop", _STATE, "where memory is short", {"mesh.fsdp": 64, "parallel.stack": "scan"}),
    Form("ZeRO-2", "stored weights, moments, gradients", "with many micro-batches", {"mesh.fsdp": 64, "parallel.zero": 2}),
    Form("ZeRO-1", "stored weights, moments", "small models, slow networks", {"mesh.fsdp": 64, "parallel.zero": 1}),
    Form("ZeRO-3 in nodes, copies across", _STATE, "where a node holds the state", _IN_NODES),
    Form("ZeRO-3 in nodes, ZeRO-1 across", _STATE, "slow networks between nodes", _IN_NODES | {"parallel.zero_data": 1}),
    Form("tensor, collectives", _MATMULS, "below a row per device", _TENSOR | {"parallel.tensor": "collective"}),
    Form("tensor, ring", _MATMULS, "the same, with long rows", _TENSOR | {"parallel.tensor": "ring"}),
    Form("sequence, gathered", "the same, rows", "few devices to a row", _SEQUENCE | {"parallel.sequence": "gather"}),
    Form("sequence, ring", "the same, rows", "the longest rows", _SEQUENCE | {"parallel.sequence": "ring"}),
    Form("sequence, Ulysses", "the same, rows", "long rows, fused attention", _SEQUENCE | {"parallel.sequence": "ulysses"}),
    Form("pipeline, 1F1B", "layers; the state in a stage", "huge models, slow networks", _PIPELINE),
)


def planned(form: Form) -> dict[str, float]:
    """Plans the base configuration in a form. Returns seconds of a step, and bytes of one GPU."""
    from llamajax.config.file import load_config
    from llamajax.planning.plan import make_plan

    config = load_config(str(ROOT / "configs" / "llama3_1_8b_8xh200.yaml")).changed(BASE | form.changes)
    chosen = make_plan(config, suggest=False).chosen
    timeline, memory = chosen.timeline, chosen.memory
    return {
        "step_time_s": timeline.step_time_s,
        "compute_s": timeline.compute_s,
        "slowdown_s": timeline.slowdown_s,
        "wait_s": timeline.exposed_comm_s + timeline.exposed_copy_s,
        "wire_bytes": sum(timeline.wire_bytes.values()),
        "peak_bytes": memory.peak_bytes,
        "budget_bytes": memory.budget_bytes,
    }


def drawn(figures: dict[str, dict[str, float]]) -> str:
    """Returns the picture as SVG: a row per form, with a bar as long as its step."""
    longest, height = max(told["step_time_s"] for told in figures.values()), TOP + ROW * len(FORMS) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14">',
        "<title>Llama-3.1 8B on 64 H100 in every parallel form, as planned</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(14, 30, "Llama-3.1 8B on 64 H100 in 8 nodes, 2 Mi tokens per step, in every form", size=18),
        *(_text(x, 66, head, colour=PALE) for head, x in COLUMNS.items()),
    ]
    for row, form in enumerate(FORMS):
        parts += _row(form, figures[form.name], TOP + ROW * row, (WIDTH - BAR - 150) / longest)
    told = "Predicted, not measured. Sent and peak: per GPU; a peak in red is more than the card has."
    return "\n".join([*parts, _text(14, height - 12, told, colour=PALE), "</svg>", ""])


def _row(form: Form, told: dict[str, float], y: int, per_second: float) -> Iterator[str]:
    fits = told["peak_bytes"] <= told["budget_bytes"]
    ink = "#000000" if fits else RED
    sent, peak = (f"{told[key] / 2**30:,.0f} GiB" for key in ("wire_bytes", "peak_bytes"))
    cells = zip(COLUMNS.values(), (form.name, form.splits, form.wins, sent, peak), strict=False)
    yield f'<line x1="14" x2="{WIDTH - 14}" y1="{y - 10}" y2="{y - 10}" stroke="#dddddd"/>'
    yield from (_text(x, y + 14, text, colour=ink if text == peak else "#000000") for x, text in cells)
    x = float(BAR)
    for colour, key in (("#4c78a8", "compute_s"), ("#9ecae9", "slowdown_s"), (RED, "wait_s")):
        yield f'<rect x="{x:.1f}" y="{y}" width="{per_second * told[key]:.1f}" height="18" fill="{colour}"/>'
        x += per_second * told[key]
    step = f"{told['step_time_s']:.2f} s, {told['wait_s'] / told['step_time_s']:.1%} waits"
    yield _text(x + 8, y + 14, step if fits else "does not fit", colour=ink)


def _text(x: float, y: float, text: str, *, size: int = 14, colour: str = "#000000") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="{colour}">{html.escape(text)}</text>'


def main(arguments: list[str]) -> None:
    """Plans, unless `--draw` is given, and draws."""
    if arguments != ["--draw"]:
        from llamajax.planning.xla.compile import prepare_environment

        prepare_environment()
        figures, forms = json.loads(FIGURES.read_text()), [form for form in FORMS if form.name in arguments] or FORMS
        for number, form in enumerate(forms, 1):
            figures[form.name] = planned(form)
            print(f"{number} of {len(forms)}  {form.name}: {figures[form.name]['step_time_s']:.2f} s", flush=True)
        FIGURES.write_text(json.dumps({form.name: figures[form.name] for form in FORMS}, indent=1) + "\n")
    PICTURE.write_text(drawn(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
