"""Computes the figures of a case from its runs: the ceiling, speeds and shares of the peak; and formats their table."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from llamajax.estimates.gpus import find_gpu
from llamajax.units import format_bytes
from scripts.bench.case import PASSES, TORCH_ROWS, Case, Choice

Run = Mapping[str, Any]
"""Answer of a row's process, with `row`, `round`, `sm_mhz` and `watts`; or `error`, the reason for no answer."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Least time of a step's products and attention on this device, each measured alone at its best."""

    gemm_s: float
    attention_s: float
    gemm_flops: float
    """Speed of the best product, in FLOP/s."""

    @property
    def step_s(self) -> float:
        return self.gemm_s + self.attention_s


def ceiling(case: Case, parts: Sequence[Run]) -> Ceiling | None:
    """Returns the ceiling from the faster of torch and jax in each part; None if neither could measure."""
    products = [part["gemms"] for part in parts if "gemms" in part]
    kernels = [seconds for part in parts for seconds in part.get("attention", {}).values()]
    if not products or not kernels:
        return None
    gemm_s, rates = 0.0, []
    for name, (width, out, layers) in case.gemms().items():
        for which in PASSES:
            per_token = min(own[f"{name}, {which}"] for own in products)
            gemm_s += layers * case.tokens * per_token
            rates.append(2 * width * out / per_token)
    attention_s = case.network.num_layers * case.rows * min(kernels)
    return Ceiling(gemm_s=gemm_s, attention_s=attention_s, gemm_flops=max(rates))


def peak_flops(device: str, best: Ceiling | None) -> tuple[float | None, str]:
    """Returns the peak FLOP/s for MFU and its source: the data sheet, or else the fastest measured product."""
    if (gpu := find_gpu(device)) is not None:
        return gpu.peak_flops, f"{gpu.name} data sheet, dense bfloat16"
    return (None, "not measured") if best is None else (best.gemm_flops, "the fastest product measured")


def figures(case: Case, best: Ceiling | None, peak: float | None, runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the figures of one row from all of its rounds; empty without rounds, and without times at toy size.

    Returns:
        `step_s` and `tokens_per_s` of the median window; `mfu`, counting what documents see, and `mfu_full`, counting the
        whole square of attention; `of_ceiling`, a share; `spread`, the distance of the windows' quartiles, and
        `rounds_apart`, the distance of the slowest round from the fastest, as shares; `sm_mhz` and `watts`, or None;
        `compile_s` of the first round; `peak_bytes` of the last round, which tries no other choice before; `choice`;
        `attention`, by the row's own name, and its `kernels`.
    """
    good = [run for run in runs if "step_s" in run]
    if not good:
        return {}
    choice = str(Choice(**good[0]["choice"]))
    kernels = good[0]["attention"]["forward"] + good[0]["attention"]["backward"]
    found = {"choice": choice, "attention": good[0]["note"], "kernels": kernels}
    found |= {"compile_s": good[0]["compile_s"], "peak_bytes": good[-1]["peak_bytes"]}
    if case.is_toy:
        return found
    windows = [seconds for run in good for seconds in run["step_s"]]
    median, rounds = statistics.median(windows), [statistics.median(run["step_s"]) for run in good]
    first, _, third = statistics.quantiles(windows, n=4, method="inclusive")
    found |= _speed(case, median, best, peak)
    found |= {"spread": (third - first) / median, "rounds_apart": max(rounds) / min(rounds) - 1}
    for name in ("sm_mhz", "watts"):
        known = [run[name] for run in good if run[name] is not None]
        found[name] = statistics.median(known) if known else None
    return found


def ceiling_figures(case: Case, best: Ceiling, peak: float | None) -> dict[str, Any]:
    """Returns the same figures for a step of only products and attention, with `gemm_s` and `attention_s`."""
    return {} if case.is_toy else _speed(case, best.step_s, best, peak) | dataclasses.asdict(best)


def _speed(case: Case, step_s: float, best: Ceiling | None, peak: float | None) -> dict[str, Any]:
    return {
        "step_s": step_s,
        "tokens_per_s": case.tokens / step_s,
        "mfu": None if peak is None else case.flops() / step_s / peak,
        "mfu_full": None if peak is None else case.flops(full_attention=True) / step_s / peak,
        "of_ceiling": None if best is None else best.step_s / step_s,
    }


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "tokens/s": ("tokens_per_s", "{:,.0f}".format),
    "x torch": ("x_torch", "{:.3f}".format),
    "s/step": ("step_s", "{:.4f}".format),
    "spread": ("spread", "{:.1%}".format),
    "apart": ("rounds_apart", "{:.1%}".format),
    "MFU": ("mfu", "{:.1%}".format),
    "full": ("mfu_full", "{:.1%}".format),
    "of ceiling": ("of_ceiling", "{:.1%}".format),
    "peak": ("peak_bytes", format_bytes),
    "MHz": ("sm_mhz", "{:,.0f}".format),
    "W": ("watts", "{:,.0f}".format),
    "compile s": ("compile_s", "{:.0f}".format),
    "choice": ("choice", str),
    "attention": ("attention", str),
    "": ("refused", lambda reasons: "REFUSED" if reasons else ""),
}


def table(case: Case, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Formats the rows' `figures` and `refused` as a table; `-` marks figures that were not measured."""
    trusted = [row for name, row in rows.items() if name in TORCH_ROWS and "step_s" in row and not row["refused"]]
    theirs = max((row["tokens_per_s"] for row in trusted), default=None)
    shown = Table("row", title=str(case), title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in _COLUMNS:
        shown.add_column(name, justify="left" if name in ("choice", "attention", "") else "right")
    for name, row in rows.items():
        told = {"x_torch": row["tokens_per_s"] / theirs if theirs and "step_s" in row else None} | dict(row)
        cells = (form(told[key]) if told.get(key) is not None else "-" for key, form in _COLUMNS.values())
        shown.add_row(name, *cells)
    return shown
