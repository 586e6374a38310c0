"""A plan as text for people: the verdict first, then memory, time, communication and money."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from llamajax.config.run import UNKNOWN_TOKENS, Config
from llamajax.estimates.gpu_memory_budget import VARIABLE
from llamajax.estimates.gpus import planned_gpu
from llamajax.planning.plan import Plan, Schedule
from llamajax.planning.report import experts, host_memory
from llamajax.planning.scopes import MEMORY_KINDS
from llamajax.step import compile as compiler
from llamajax.units import format_bytes, format_count, format_duration
from llamajax.watch import console
from llamajax.watch.console import log

DISCLAIMER = "predicted, not measured; docs/plan_accuracy.md compares predictions with published runs"
_TENSORS, _COLLECTIVES = 8, 12
_CURVE_WIDTH = 40
"""Number of characters that represent the whole card."""
Figures = Mapping[str, Any]


def print_plan(plan: Plan, told: Figures) -> None:
    """Prints a plan; `told` are its `figures`."""
    log(f"verdict    {verdict(told)}")
    log(f"           {DISCLAIMER}")
    _print_run(plan.config, told)
    if told["calibration"]:
        _print_calibration(told["calibration"])
    count = told["num_compilations"]
    log(f"options    {compiler.told(told['options'], planned_gpu(plan.config.hardware).name)}")
    log(f"compile    {count} compilation{'s' if count > 1 else ''}, {told['compile_s']:.1f} s, jax {told['jax_version']}")
    if told["by_remat"]:
        _print_remats(plan.config, told)
    _print_memory(plan.chosen)
    _print_host(told)
    _print_time(told)
    _print_domains(plan.config, told)
    _print_collectives(told)
    if count > 1:
        _print_schedules(plan.config, told)
    _print_money(plan.config, told)
    if not told["fits"]:
        _print_suggestions(told)
    if told["sweep"]:
        _print_sweep(told)


def verdict(told: Figures) -> str:
    """Returns one line: whether it fits, how fast it is, how long it waits."""
    total = told["peak_bytes"] + told["allowance_bytes"]
    fits = ("fits: " if told["fits"] else "does not fit: ") + _lack_of_host_memory(told["host"])
    return (
        f"{fits}{format_bytes(total)} of {format_bytes(told['capacity_bytes'])} per GPU;"
        f" {told['step_time_s']:.3g} s/step, {told['tokens_per_sec_per_device']:,.0f} tokens/s/GPU, MFU {told['mfu']:.1%},"
        f" {told['exposed_fraction']:.1%} of the step waits for communication; {known_error(told)}"
    )


def _lack_of_host_memory(host: Figures | None) -> str:
    return host_memory.lack(host["bytes"], host["host_room_bytes"]) if host else ""


def known_error(told: Figures) -> str:
    """Says how the speeds of runs on such GPUs, published or measured, differed from predicted ones."""
    known, calibration = told["accuracy"], told["calibration"]
    if known is None and calibration is not None:
        return f"the error of plans with {calibration['file']} is unknown"
    if known is None:
        return "no published run shows the error of plans for such GPUs"
    several = {"published": "published runs on such GPUs", "measured": "runs measured with these constants"}[known["by"]]
    count = f"{known['runs']}" if known["within"] == known["runs"] else f"{known['within']} of {known['runs']}"
    return f"{count} {several} came out {_between(known['least'], known['most'])} than predicted"


def _between(least: float, most: float) -> str:
    """Describes two speeds relative to the predicted one, minus one, in words."""
    if least < 0 < most:
        return f"{most:.0%} faster to {-least:.0%} slower"
    low, high = sorted((abs(least), abs(most)))
    return f"{low:.0%} to {high:.0%} {'faster' if most > 0 else 'slower'}"


def print_estimate(config: Config, told: Figures) -> None:
    """Prints the figures from formulas, where XLA's compiler for GPUs is missing."""
    memory = told["memory_estimate"]
    total = memory["peak_bytes"] + memory["allowance_bytes"]
    likely = ("probably fits: " if memory["fits"] else "probably does not fit: ") + _lack_of_host_memory(memory["host"])
    log(
        f"verdict    {likely}about {format_bytes(total)} of {format_bytes(told['capacity_bytes'])} per GPU, by formulas;"
        " nothing was compiled"
    )
    _print_run(config, told)
    beside = format_bytes(memory["allowance_bytes"])
    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in memory["by_kind"].items() if size)
    log(f"memory     estimated, per GPU: {kinds}; beside XLA {beside}")
    log(f"FLOPs      {told['model_flops'] / told['num_devices']:.4g} per GPU and step, causal, without recomputation")
    log(f"network    {format_bytes(told['least_wire_bytes'])} per GPU and step at least, for this mesh")


def _print_run(config: Config, told: Figures) -> None:
    mesh = " x ".join(f"{axis} {size}" for axis, size in told["mesh"].items() if size > 1) or "of one device"
    gpu = planned_gpu(config.hardware)
    is_joined = told["nodes"] > 1 and gpu.node_bandwidth and not config.hardware.domains
    network = f", {gpu.node_bandwidth / 1e9:g} GB/s between nodes" if is_joined and gpu.node_bandwidth else ""
    nodes = f"{told['nodes']} node{'s' if told['nodes'] > 1 else ''}"
    active = f", {format_count(told['num_active_params'])} of them active" if told["experts"] else ""
    log(f"run        {told['run']}: {format_count(told['num_params'])} parameters ({told['num_params']:,}){active}")
    log(f"devices    {told['num_devices']} x {gpu.name} in {nodes}{network}; mesh {mesh}")
    log(f"batch      {config.batch_arithmetic(told['num_devices'])}")
    if told["experts"]:
        of = config.model.experts
        for name, line in zip(("experts", "tokens"), experts.lines(told["experts"], of.num_experts, of.top_k), strict=True):
            log(f"{name:10} {line}")
    for setting, form in told["forms"].items():
        log(f"{setting:10} {form}")
    if told["warning"] is not None:
        log(f"warning    {told['warning']}")
    for remark in told["remarks"]:
        log(f"remark     {remark}")
    held = f", {format_bytes(told['argument_bytes'])} as compiled with the batch" if told.get("argument_bytes") else ""
    log(
        f"state      at least {format_bytes(told['zero_minimum_bytes'])} per GPU{held};"
        f" a full checkpoint takes {format_bytes(told['checkpoint_bytes'])}"
    )


def _print_calibration(told: Figures) -> None:
    changes = ", ".join(
        f"{name} {of['measured']:.4g} (built in: {of['built_in']:.4g})" for name, of in told["constants"].items()
    )
    log(
        f"constants  {told['file']}, measured on {told['device']} on {told['date']}, jax {told['jax']}, commit"
        f" {told['commit'][:12]}: {changes or 'none differs from the built-in ones'}"
    )


def _print_remats(config: Config, told: Figures) -> None:
    """Prints memory against recomputation, as a curve on its side."""
    names = ("GiB", "on the host", "computed again", "step", "MFU", "", "")
    table = _table("what the backward pass keeps", *names, numbers=(1, 2, 3, 4, 5))
    capacity, on_card = told["capacity_bytes"], told["by_remat_on_card"]
    for remat, own in told["by_remat"].items():
        for name, figures in ((remat, own), (f"{remat}, on the card", on_card.get(remat))):
            if figures is None:
                continue
            bar = "#" * round(_CURVE_WIDTH * min(figures["peak_bytes"] / capacity, 1.0))
            verdict = "chosen" if name == config.model.remat else "" if figures["fits"] else "does not fit"
            table.add_row(
                name, f"{figures['peak_bytes'] / 2**30:.1f}",
                f"{figures['host_bytes'] / 2**30:.1f}" if figures["host_bytes"] else "", f"{figures['recomputed']:.1%}",
                f"{figures['step_time_s']:.4g} s", f"{figures['mfu']:.1%}", f"{bar:.<{_CURVE_WIDTH}}", verdict,
            )  # fmt: skip
    _print(table)


def _print_memory(schedule: Schedule) -> None:
    memory = schedule.memory
    allowed, capacity, kept = memory.allowance.total_bytes, memory.capacity_bytes, memory.training_fraction
    left = capacity - memory.peak_bytes - allowed
    table = _table("memory per GPU at the fullest moment", "GiB", "of the card", "what it is", numbers=(1, 2))
    rows = [*memory.by_kind.items(), ("beside XLA", allowed), ("left" if left >= 0 else "missing", abs(left))]
    meanings: dict[str, str] = {**MEMORY_KINDS, "beside XLA": f"MiB: {str(memory.allowance).partition(': ')[2]}"}
    for kind, size in rows:
        if size:
            table.add_row(kind, f"{size / 2**30:.2f}", f"{size / capacity:.1%}", meanings.get(kind, ""))
    _print(table)
    tensors = _table("largest tensors at that moment", "GiB", "kind", "dtype", "shape", "of them", numbers=(1, 5))
    for t, count in memory.largest(_TENSORS):
        shape = " x ".join(map(str, t.buffer.shape))
        tensors.add_row(escape(t.name), f"{count * t.buffer.size / 2**30:.2f}", t.kind, t.buffer.dtype, shape, str(count))
    _print(tensors)
    log(f"share      training takes {kept:.1%} of the card for XLA's arrays, which need {memory.memory_fraction:.1%}")
    if not memory.fits and kept < memory.memory_fraction <= memory.room:
        log(f"set        {VARIABLE}={memory.memory_fraction:.3f} here and for training to make it fit")
    elif kept > memory.room:
        log(f"set        {VARIABLE}={memory.room:.3f} or less: memory besides XLA's arrays needs more than is left")


def _print_host(told: Figures) -> None:
    if (host := told["host"]) is None:
        return
    log(f"host       {host_memory.summary(host, told['step_time_s'], told['gpus_per_node'])}")
    if host["disk"]:
        log(f"disk       {host_memory.disk_line(host['disk'], told['step_time_s'], told['gpus_per_node'])}")
    if host["choices"]:
        _print(host_memory.table(host, _table))
        log(f"fraction   {host_memory.closed_form(host)}")


def _print_time(told: Figures) -> None:
    kinds = ", ".join(f"{kind} {seconds:.3g}" for kind, seconds in told["compute_by_kind"].items())
    copies = f" + {told['exposed_copy_s']:.3g} for copies" if told["exposed_copy_s"] else ""
    log(
        f"step       {told['step_time_s']:.4g} s = {told['compute_s']:.4g} computing ({kinds})"
        f" + {told['slowdown_s']:.3g} slowed by collectives + {told['exposed_comm_s']:.3g} waiting for them{copies}"
    )
    again = (
        f" and {told['rematerialized_flops'] / told['flops']:.1%} XLA's own recomputation"
        if told["rematerialized_flops"]
        else ""
    )
    log(
        f"speed      {told['tokens_per_sec_per_device']:,.0f} tokens/s/GPU; MFU {told['mfu']:.1%}, or"
        f" {told['mfu_full_attention']:.1%} counting full attention; HFU {told['hfu']:.1%}"
        f" (executed FLOPs are {told['flops_factor']:.3f} of the formula{again})"
    )
    _print_pipeline(told)
    elementwise = format_bytes(told["elementwise_bytes"])
    log(f"kernels    {told['num_kernels']:,}; kernels without matrix products read and write {elementwise}")
    links = ", ".join(
        f"{format_bytes(size)} {link.replace('_', '-')}" for link, size in told["wire_bytes_by_link"].items() if size
    )
    factor = told["wire_bytes_factor"]
    over = f", {factor:.3f} of the minimum for this mesh" if factor is not None else ""
    log(f"network    a GPU sends {format_bytes(told['wire_bytes'])} per step ({links or 'none'}){over}")
    unknown = told["not_understood"]
    names = f": {', '.join(f'{count} x {name}' for name, count in unknown.items())}" if unknown else ""
    log(f"guesses    {sum(unknown.values())} instructions with a guessed cost{names}")


def _print_pipeline(told: Figures) -> None:
    if (pipeline := told["pipeline"]) is None:
        return
    seconds = pipeline["tick_s"] or {}
    what = {"fill": "fill the pipeline", "both": "run both passes", "drain": "drain it"}
    ticks = ", ".join(
        f"{count} {what[name]}{f' ({1e3 * seconds[name]:.3g} ms each)' if seconds else ''}"
        for name, count in pipeline["ticks"].items()
    )
    log(f"ticks      {ticks}; each sends {format_bytes(pipeline['bytes_per_tick'])} on and as much back")
    idle = told["idle_flops"] / (told["flops"] + told["idle_flops"])
    log(
        f"stage      {pipeline['layers']} layers, values of {pipeline['slots']} micro-batches; waits for"
        f" {pipeline['bubble']:.1%} of the time in which it works, and computes {idle:.1%} of its FLOPs then, which count"
        " neither in MFU nor in HFU"
    )


def _print_domains(config: Config, told: Figures) -> None:
    """Prints the speed that every domain's network sustains."""
    if not config.hardware.domains:
        return
    assert config.hardware.domain_bandwidth is not None
    table = _table(
        "domain", "network", "nodes", "GB/s per node", "step everywhere", "layers of its stages", numbers=(2, 3, 4)
    )
    for own in told["domains"]:
        bandwidth, layers = f"{own['node_bandwidth'] / 1e9:g}", ", ".join(map(str, own["layers"]))
        table.add_row(own["name"], own["network"], str(own["nodes"]), bandwidth, f"{own['step_time_s']:.4g} s", layers)
    _print(table)
    log(
        f"domains    {config.hardware.domain_bandwidth / 1e9:g} GB/s per node between them; a step everywhere has the"
        " domain's network in all domains, and layers are in proportion to its speed"
    )


def _print_collectives(told: Figures) -> None:
    groups: dict[tuple[Any, ...], list[Figures]] = {}
    for use in told["collectives"]:
        key = tuple(use[name] for name in ("kind", "axis", "link", "bytes", "is_sync", "in_loop"))
        groups.setdefault(key, []).append(use)
    if not groups:
        return
    table = _table(
        "collective", "axis", "link", "bytes", "count", "time", "hidden", "exposed", "hides behind", numbers=(3, 4, 5, 6, 7)
    )
    ordered = sorted(groups.items(), key=lambda group: -_sum(group[1], "seconds"))
    for (kind, axis, link, size, is_sync, in_loop), uses in ordered[:_COLLECTIVES]:
        beside = ("nothing, in every layer" if in_loop else "nothing") if is_sync else "compute"
        table.add_row(
            kind, axis, link.replace("_", "-"), format_bytes(size), f"{_sum(uses, 'count'):,}", *_times(uses), beside
        )
    if rest := [use for _, uses in ordered[_COLLECTIVES:] for use in uses]:
        table.add_row("others", "", "", "", f"{_sum(rest, 'count'):,}", *_times(rest), "")
    _print(table)
    number = told["sync_collectives_in_loops"]
    if number:
        alone = _sum([use for use in told["collectives"] if use["is_sync"] and use["in_loop"]], "exposed_s")
        log(
            f"sync       {number} collective{'s' if number > 1 else ''} in loops hide behind nothing: the GPU waits"
            f" for their whole duration in every iteration, {alone:.3g} s per step"
        )
    else:
        log("sync       every collective in a loop has compute to hide behind")


def _times(uses: list[Figures]) -> list[str]:
    return [f"{_sum(uses, name):.3g} s" for name in ("seconds", "hidden_s", "exposed_s")]


def _sum(uses: Iterable[Figures], name: str) -> Any:
    return sum(use[name] for use in uses)


def _print_schedules(config: Config, told: Figures) -> None:
    names = ("step", "exposed", "of the step", "sync in loops", "peak", "")
    table = _table("scheduled by", *names, numbers=(1, 2, 3, 4, 5))
    rows = [
        ({"xla.latency_profile": None}, told["without_profile"]),
        ({"xla.latency_profile": config.xla.latency_profile}, told["with_profile"]),
    ]
    for changes, own in [*rows, *((other["changes"], other) for other in told["alternatives"])]:
        if own:
            by = changes["xla.latency_profile"]
            name = {None: "XLA's built-in estimates", "auto": "the cost model's latencies"}.get(by, f"the latencies in {by}")
            if "parallel.stack" in changes:
                name += f", layers by {changes['parallel.stack']}"
            in_training = by == told["latency_profile"] and "parallel.stack" not in changes
            table.add_row(
                escape(name), f"{own['step_time_s']:.4g} s", f"{own['exposed_comm_s']:.3g} s",
                f"{own['exposed_fraction']:.1%}", str(own["sync_collectives_in_loops"]), format_bytes(own["peak_bytes"]),
                "training's" if in_training else "",
            )  # fmt: skip
    _print(table)
    if told["best_changes"]:
        changes = ", ".join(f"{key}: {json.dumps(value)}" for key, value in told["best_changes"].items())
        log(f"set        {changes.replace(chr(34), '')}: the best of these")


def _print_money(config: Config, told: Figures) -> None:
    text = f"{format_count(told['token_budget'])} tokens take {told['days']:,.1f} days on these {told['num_devices']} GPUs"
    if told["price"] is None:
        text += "; hardware.price_per_gpu_hour is not set, so no prices"
    else:
        text += f" and cost {told['price']:,.0f}, which is {told['price_per_billion_tokens']:,.2f} per billion tokens"
    log(f"money      {text}")
    if config.train.num_epochs is not None and told["token_budget"] == UNKNOWN_TOKENS:
        log(
            f"length     the data decide how many steps train.num_epochs={config.train.num_epochs:g} takes; set"
            " hardware.token_budget for time and price of the run"
        )


def print_ramp(config: Config, told: Figures) -> None:
    """Prints a line about `train.global_batch_ramp` of the run `config`, if it has one."""
    if (ramp := told["ramp"]) is not None:
        waits = ", and stages wait for each other in each" if told["pipeline"] is not None else ""
        log(
            f"ramp       {config.ramp_arithmetic()}, which take {format_duration(24 * 3600 * ramp['days'])} if a step takes"
            f" time in proportion to its micro-batches{waits}; with it, all tokens take {ramp['budget_days']:,.1f} days"
        )


def _print_suggestions(told: Figures) -> None:
    if not told["suggestions"]:
        less = ", less in offload or more in hardware.host_memory" if _lack_of_host_memory(told["host"]) else ""
        log(f"instead    no change that was tried fits; use more nodes, a larger GPU or a smaller model{less}")
        return
    table = _table("what fits instead, compiled", "peak", "step", "time", "GPU hours", "FLOPs", numbers=(1, 2, 3, 4, 5))
    for row in told["suggestions"]:
        changes = ", ".join(f"{key}: {value}" for key, value in row["changes"].items())
        table.add_row(
            changes, format_bytes(row["peak_bytes"]), f"{row['step_time_s']:.4g} s", f"x {row['step_time_ratio']:.3f}",
            f"x {row['gpu_time_ratio']:.3f}", f"x {row['flops_ratio']:.3f}",
        )  # fmt: skip
    _print(table)


def _print_sweep(told: Figures) -> None:
    sweep = told["sweep"]
    names = ("GPUs", "fits", "step", "tokens/s/GPU", "efficiency", "MFU", "exposed", "days", "per billion tokens")
    table = _table(sweep["key"], *names, numbers=(1, 3, 4, 5, 6, 7, 8, 9))
    for row in sweep["rows"]:
        price = row["price_per_billion_tokens"]
        table.add_row(
            row["value"], f"{row['num_devices']:,}", "yes" if row["fits"] else "no", f"{row['step_time_s']:.4g} s",
            f"{row['tokens_per_sec_per_device']:,.0f}", f"{row['efficiency']:.3f}", f"{row['mfu']:.1%}",
            f"{row['exposed_fraction']:.1%}", f"{row['days']:,.1f}", "-" if price is None else f"{price:,.2f}",
        )  # fmt: skip
    _print(table)
    if sweep["key"] in ("hardware.nodes", "hardware.gpus_per_node"):
        log("sweep      mesh.fsdp and train.global_batch_size grow with the devices: weak scaling")


def _table(*columns: str, numbers: tuple[int, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index in numbers else "left", overflow="fold")
    return table


def _print(table: Table) -> None:
    log("")
    console.print_table(table)
    log("")
