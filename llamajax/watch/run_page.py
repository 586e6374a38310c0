"""Builds a self-contained HTML page about a run.

Reads the records of the run (`run_log`), which may still be training. The page needs no network, and no script to be read.
"""

import html
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from llamajax.errors import ConfigError
from llamajax.units import format_count, format_duration
from llamajax.watch import run_log
from llamajax.watch.chart import WIDTH, Line, line_chart
from llamajax.watch.goodput import PARTS, Goodput
from llamajax.watch.page import Card, build_page, table
from llamajax.watch.run_log import RunLog, RunSummary

_NEWEST_STARTS = 50
_MOST_HOSTS = 64
_OF_HOSTS = {
    "step_time": "step", "data": "idle for a batch", "host": "idle between steps", "device": "devices, fixed program",
    "save": "stall of a save",
}  # fmt: skip

_STYLE = Path(__file__).with_name("run_page.css").read_text(encoding="utf-8")
_SCRIPT = Path(__file__).with_name("run_page.js").read_text(encoding="utf-8").replace("WIDTH", str(WIDTH))


def write_report(run_dir: Path, output: Path | None = None, log: RunLog | None = None) -> Path:
    """Writes the page about the run in `run_dir` and returns its path, by default `report.html` in the run directory.

    Args:
        run_dir: directory of the run.
        output: the file to write.
        log: records of the run, if they have been read.

    Raises:
        ConfigError: there is no run with a finished step in `run_dir`, or `output` cannot be written.
    """
    log = log or run_log.read_run(run_dir)
    if log.warning is not None:
        print(log.warning, file=sys.stderr)
    output = output or run_dir / "report.html"
    try:
        output.write_text(report_page(run_dir, log), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}; name another file with --output") from error
    return output


def report_page(run_dir: Path, log: RunLog) -> str:
    """Returns the page about the run in `run_dir`, which wrote `log`."""
    path = run_dir / "config.yaml"
    config = path.read_text(encoding="utf-8") if path.is_file() else None
    return _page(run_dir.resolve().name, log, config, _hosts(run_dir))


def _page(name: str, log: RunLog, config: str | None, hosts: str) -> str:
    summary = run_log.summarize(log)
    newest = max(float(log.series["time"][1][-1]), *(event["time"] for event in log.events), 0.0)
    state = summary.stop_reason or "running or killed"
    steps = f"step {summary.step:,}" + (f" of {summary.num_steps:,}" if summary.num_steps else "")
    intro = f"{html.escape(state)} &middot; {steps} &middot; newest record {_utc(newest)}"
    body = f"""{_goodput(summary.goodput)}
<div class="charts">{_charts(log)}</div>
{_epochs(log, summary)}
{_experts(log)}
{hosts}
{_starts(log)}
{f"<h2>Configuration</h2><pre>{html.escape(config)}</pre>" if config is not None else ""}"""
    return build_page(name, heading=name, intro=intro, cards=_cards(summary), body=body, style=_STYLE, script=_SCRIPT)


def _cards(summary: RunSummary) -> list[Card]:
    def known(value: float | None, text: Callable[[float], str]) -> str:
        return "&ndash;" if value is None else text(value)

    in_steps = format_duration(summary.steps_time_s)
    restarts = f"{summary.restarts} restart{'' if summary.restarts == 1 else 's'}"
    per_device = known(summary.tokens_per_sec_per_device, format_count)
    loss, share = "{:.4f}".format, "{:.1%}".format
    rewards = []
    if summary.train_reward is not None:
        rewards = [Card("reward", loss(summary.train_reward), f"held-out: {known(summary.eval_reward, loss)}")]
    return [
        *rewards,
        Card(
            "train loss", known(summary.train_loss, loss), f"mean of the last {min(run_log.FINAL_STEPS, summary.step)} steps"
        ),
        Card("held-out loss", known(summary.eval_loss, loss), "newest evaluation"),
        Card("bits per byte", known(summary.eval_bits_per_byte, loss), "on held-out text"),
        Card("tokens", known(summary.tokens, format_count), f"in {summary.step:,} steps"),
        Card("parameters", known(summary.num_params, format_count), known(summary.num_params, "{:,}".format)),
        Card("tokens per second", known(summary.tokens_per_sec, format_count), f"{per_device} per device, median"),
        Card(
            "MFU", known(summary.mfu, share), f"{known(summary.mfu_full_attention, share)} counting full attention, median"
        ),
        Card("wall time", known(summary.wall_time_s, format_duration), f"{in_steps} in steps, {restarts}"),
    ]


def _goodput(split: Goodput | None) -> str:
    """Returns a bar that splits the wall time, and a table of the same; parts without any time are omitted."""
    if split is None or not split.wall_s:
        return ""
    parts = {part: seconds for part, seconds in split.seconds.items() if seconds}
    bar, rows = [], []
    for part, seconds in sorted(parts.items(), key=lambda item: (item[0] != "productive", -item[1])):
        share, color = seconds / split.wall_s, f"p{list(PARTS).index(part)}"
        bar.append(f'<i class="{color}" style="flex-grow: {share:.5f}" title="{part} {share:.1%}"></i>')
        cells = (f'<span class="key {color}">{part}</span>', f"{share:.1%}", format_duration(seconds), PARTS[part])
        rows.append(cells)
    return (
        f'<h2>Goodput {split.share:.1%} of {format_duration(split.wall_s)}</h2><div class="bar">{"".join(bar)}</div>'
        f"{table((), rows, 'parts')}"
    )


def _charts(log: RunLog) -> str:
    def percent(value: float) -> str:
        return f"{100 * value:.3g}%"

    number = "{:.4g}".format
    per_pair = "train/reward_margin" in log.series
    of_functions = {
        key.removeprefix("train/reward_of_"): key for key in sorted(log.series) if key.startswith("train/reward_of_")
    }
    plans = (
        ("Reward of completions", number, False, {"train": "train/reward", "held-out": "eval/reward"}),
        ("Reward by function", number, False, of_functions),
        (
            "Loss (per pair of answers)" if per_pair else "Loss (nats per token)",
            number,
            False,
            {"train": "train/loss", "held-out": "eval/loss"},
        ),
        ("Rewards", number, False, {side: f"train/reward_{side}" for side in ("chosen", "rejected", "margin")}),
        (
            "Pairs the right way round",
            percent,
            True,
            {"train": "train/reward_accuracy", "held-out": "eval/reward_accuracy"},
        ),
        ("Divergence from the reference (nats per token)", number, True, {"divergence": "train/divergence"}),
        ("Tokens of a completion", number, True, {"train": "train/completion_tokens", "held-out": "eval/completion_tokens"}),
        ("Completions without an end", percent, True, {"train": "train/truncated", "held-out": "eval/truncated"}),
        (
            "Load of an expert (over the mean)",
            number,
            True,
            {"largest": "train/expert_max_load", "smallest": "train/expert_min_load"},
        ),
        ("Evenness of the experts' loads (entropy)", percent, True, {"entropy": "train/expert_entropy"}),
        (
            "Tokens that lose an expert, or reach it late",
            percent,
            True,
            {"lost": "train/expert_dropped", "late": "train/expert_late"},
        ),
        ("Learning rate", number, True, {"learning rate": "train/learning_rate"}),
        ("Gradient norm, before clipping", number, True, {"gradient norm": "train/grad_norm"}),
        ("Tokens per second, all devices", format_count, True, {"tokens/s": "perf/tokens_per_sec"}),
        ("Time per step", "{:.3g} s".format, True, {"step": "perf/step_time_s", "waiting for data": "perf/data_wait_s"}),
        (
            "Model FLOPs utilization",
            percent,
            True,
            {"MFU": "perf/mfu", "counting full attention": "perf/mfu_full_attention"},
        ),
    )
    restarts = [event["step"] for event in log.events if event["event"] == "start"][1:]
    charts = []
    for title, text, from_zero, keys in plans:
        lines = [
            Line(
                name=name,
                steps=log.series[key][0],
                values=log.series[key][1],
                noisy=not key.startswith("eval/") and key != "train/learning_rate",
                dots=key.startswith("eval/"),
            )
            for name, key in keys.items()
            if key in log.series
        ]
        if lines:
            charts.append(line_chart(title, lines, text=text, from_zero=from_zero, restarts=restarts))
    return "\n".join(charts)


def _epochs(log: RunLog, summary: RunSummary) -> str:
    """Returns a table of the passes through each source, so far and in the whole run."""
    planned = next((event.get("epochs") for event in reversed(log.events) if event["event"] == "data"), None)
    in_all = planned if isinstance(planned, dict) else {}
    rows = []
    for source, passes in enumerate(summary.epochs):
        key = f"data.sources[{source}]"
        whole = f"{in_all[key]:,.2f}" if isinstance(in_all.get(key), int | float) else "&ndash;"
        rows.append([key, f"{passes:,.2f}", whole])
    if not rows:
        return ""
    return f"<h2>Sources</h2>{table(('source', 'epochs', 'in the whole run'), rows, 'sources')}"


def _experts(log: RunLog) -> str:
    """Returns a table of the experts' loads in each layer, at the newest step that has them; empty without experts."""
    columns = {
        "largest load": ("train/expert_max_load_by_layer/", "{:.2f}"),
        "smallest load": ("train/expert_min_load_by_layer/", "{:.2f}"),
        "entropy": ("train/expert_entropy_by_layer/", "{:.1%}"),
        "lost": ("train/expert_dropped_by_layer/", "{:.2%}"),
        "late": ("train/expert_late_by_layer/", "{:.2%}"),
    }
    rows = []
    while all(f"{key}{len(rows)}" in log.series for key, _ in columns.values()):
        rows.append(
            [str(len(rows)), *(text.format(log.series[f"{key}{len(rows)}"][1][-1]) for key, text in columns.values())]
        )
    if not rows:
        return ""
    step = log.series[f"{columns['entropy'][0]}0"][0][-1]
    return f"<h2>Experts by layer, step {step:,}</h2>{table(('layer with experts', *columns), rows, 'experts')}"


def _starts(log: RunLog) -> str:
    """Returns a table of every start of the run, with its devices, versions and end."""
    rows, previous_config = [], None
    for index, event in enumerate(log.events):
        if event["event"] != "start":
            continue
        later = next((e for e in log.events[index + 1 :] if e["event"] in ("start", "stop")), None)
        end = "killed" if later else "&ndash;"
        if later and later["event"] == "stop":
            end = f"step {later['step']:,}: {html.escape(str(later.get('reason')))}"
        config_hash = event.get("config_sha256")
        changed = previous_config not in (None, config_hash)
        previous_config = config_hash
        facts = (
            f"{event.get('devices', '?')} x {event.get('device_kind', '?')}",
            " x ".join(f"{axis} {size}" for axis, size in event.get("mesh", {}).items()) or "one device",
            f"llamajax {event.get('llamajax', '?')}, jax {event.get('jax', '?')}, Python {event.get('python', '?')}",
            f"{str(config_hash)[:8]}{' (changed)' if changed else ''}",
        )
        rows.append([_utc(event["time"]), f"{event['step']:,}", *(html.escape(fact) for fact in facts), end])
    if not rows:
        return ""
    note = f" (the newest {_NEWEST_STARTS} of {len(rows)})" if len(rows) > _NEWEST_STARTS else ""
    head = ("started", "from step", "devices", "mesh", "versions", "config", "ended")
    return f"<h2>Starts{note}</h2>{table(head, rows[-_NEWEST_STARTS:])}"


def _hosts(run_dir: Path) -> str:
    """Returns a table of each process's own times, slowest devices first; empty without a readable file."""
    try:
        rows = json.loads((run_dir / run_log.HOSTS_FILE).read_bytes())
        rows.sort(key=lambda row: -row.get("device_s", 0.0))
        cells = [
            [f"{row['process']:,}", html.escape(str(row["host"]))]
            + [f"{1e3 * row[f'{kind}_s']:,.1f} ms" if f"{kind}_s" in row else "&ndash;" for kind in _OF_HOSTS]
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    note = f" (the {_MOST_HOSTS} slowest of {len(rows)})" if len(rows) > _MOST_HOSTS else ""
    head = ("process", "host", *_OF_HOSTS.values())
    return f"<h2>Hosts, medians{note}</h2>{table(head, cells[:_MOST_HOSTS], 'hosts')}"


def _utc(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
