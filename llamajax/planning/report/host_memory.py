"""What a plan says about host memory: what waits there, why, and what the copies cost."""

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from llamajax.config.offload import BY_TOKEN
from llamajax.config.run import Config
from llamajax.estimates.formulas import mesh_sizes
from llamajax.estimates.gpus import planned_gpu
from llamajax.estimates.machine import planned_machine
from llamajax.estimates.nvme import needed_bandwidth, planned_disk, yearly_bytes
from llamajax.planning.plan import Schedule
from llamajax.step.layer_groups import file_bytes, groups_of, uses_files, written_bytes
from llamajax.step.resolve import ResolvedRun, offload_choice
from llamajax.units import format_bytes

GIB = 2**30


def host_figures(config: Config, schedule: Schedule) -> dict[str, Any] | None:
    """Returns the figures of host memory; None: nothing waits there, and nothing was to choose.

    Args:
        config: the run, with `offload` as its user wrote it.
        schedule: its step.
    """
    run, machine, memory = schedule.step.run, planned_machine(config), schedule.memory
    budget = None if run.gpu is None else run.memory_fraction * run.gpu.memory_bytes
    choice = offload_choice(config, mesh_sizes(config), budget)
    if not memory.host_bytes and not choice.candidates:
        return None
    room = planned_gpu(config.hardware).host_memory
    layers = run.config.model.num_layers
    return {
        "bytes": memory.host_bytes,
        "bytes_per_node": memory.host_bytes * config.hardware.gpus_per_node,
        "node_memory_bytes": room,
        "bandwidth": machine.host_link,
        "gpus_per_link": config.hardware.gpus_per_host_link,
        "copies": {lane: float(size) for lane, size in schedule.timeline.host_copies.items()},
        "exposed_copy_s": schedule.timeline.exposed_host_copy_s,
        "choices": [
            {
                "state": own.share,
                "values": list(own.placement.names),
                "fraction": own.placement.fraction if set(own.placement.names) & set(BY_TOKEN) else None,
                "card_bytes": int(own.placement.card_bytes),
                "host_bytes": int(own.placement.host_bytes) + own.state_bytes,
                "copy_s": own.placement.copy_s,
                "layers_s": own.placement.layers_s / layers,
                "fits": own.fits,
                "is_chosen": choice.chosen is not None and own.placement == choice.chosen.placement,
            }
            for own in choice.candidates
        ],
        "forward_s": None if choice.chosen is None else choice.chosen.costs.forward_s,
        "copy_bandwidth": None if choice.chosen is None else choice.chosen.limits.bandwidth,
        "card_room_bytes": None if choice.chosen is None else int(choice.chosen.limits.card_bytes),
        "host_room_bytes": None if math.isinf(memory.host_room_bytes) else int(memory.host_room_bytes),
        "disk": _disk_figures(run),
    }


def _disk_figures(run: ResolvedRun) -> dict[str, Any] | None:
    disk = planned_disk(run.config)
    if disk is None or not uses_files(run.config):
        return None
    return {
        "bytes": file_bytes(run.config, run.mesh),
        "written_bytes": written_bytes(run.config, run.mesh),
        "layers": sum(group.count for group in groups_of(run.config, run.mesh) if group.is_away),
        "bandwidth": None if math.isinf(disk.bandwidth) else disk.bandwidth,
    }


def summary(told: Mapping[str, Any], step_time_s: float, gpus_per_node: int) -> str:
    """Returns the memory and the copies in one line."""
    memory = told["node_memory_bytes"]
    of = f" of {format_bytes(memory)}" if memory is not None else ""
    shared = f", shared by {told['gpus_per_link']} GPUs" if told["gpus_per_link"] > 1 else ""
    to, back = (told["copies"].get(lane, 0.0) for lane in ("to_host", "from_host"))
    busy = max(to, back) / told["bandwidth"]
    return (
        f"{format_bytes(told['bytes'])} per GPU, {format_bytes(told['bytes_per_node'])}{of} per node of {gpus_per_node};"
        f" a GPU copies {format_bytes(int(to))} there and {format_bytes(int(back))} back per step, at"
        f" {told['bandwidth'] / 1e9:.3g} GB/s each way{shared} for {busy:.3g} of {step_time_s:.4g} s, and waits for"
        f" {told['exposed_copy_s']:.3g} s"
    )


def lack(host_bytes: float, room_bytes: float | None) -> str:
    """Returns how much more of its host's memory a device needs than it may use; empty: it may use enough."""
    if room_bytes is None or host_bytes <= room_bytes:
        return ""
    return f"{format_bytes(int(host_bytes))} of host memory per GPU, where {format_bytes(int(room_bytes))} may be used; "


def disk_line(disk: Mapping[str, Any], step_time_s: float, gpus_per_node: int) -> str:
    """Returns what a step with `offload.tiers.nvme_dir` asks of the disks in one line."""
    written = disk["written_bytes"]
    rate, a_year = needed_bandwidth(written, step_time_s), yearly_bytes(written, step_time_s)
    promised = disk["bandwidth"]
    known = "" if promised is None else f" (the disks write {promised / 1e9:.3g})"
    return (
        f"files of {format_bytes(disk['bytes'])} per GPU, {format_bytes(disk['bytes'] * gpus_per_node)} per node, hold the"
        f" values of the first {disk['layers']} layers; a GPU writes {format_bytes(written)} per step, hidden at"
        f" {rate / 1e9:.3g} GB/s or more{known}, and {a_year / 1e15:.3g} PB in a year, which the disks must endure"
        " (SSDTrain, arXiv:2408.10013)"
    )


def table(told: Mapping[str, Any], new_table: Any) -> Table:
    """Returns the choices that were compared, by formulas."""
    there = "on the disk" if told["disk"] else "on the host"
    columns = "values", "tokens", "on the card", there, "copies", "a layer", ""
    title = f"what waits {'on the disk' if told['disk'] else 'in host memory'}, by formulas"
    found = new_table(title, *columns, numbers=(2, 3, 4, 5, 6))
    for own in told["choices"]:
        state = f"{own['state']:.0%} of weights and moments" if own["state"] else ""
        verdict = "chosen" if own["is_chosen"] else "" if own["fits"] else "does not fit"
        found.add_row(
            state, ", ".join(own["values"]) or "none", "" if own["fraction"] is None else f"{own['fraction']:.1%}",
            f"{own['card_bytes'] / GIB:.1f} GiB", f"{own['host_bytes'] / GIB:.1f} GiB", f"{1e3 * own['copy_s']:.3g} ms",
            f"{1e3 * own['layers_s']:.4g} ms", verdict,
        )  # fmt: skip
    return found


def closed_form(told: Mapping[str, Any]) -> str:
    """Returns the rule for the share of tokens in one line."""
    room = None if told["disk"] else told["host_room_bytes"]
    of_host = "" if room is None else f", with {format_bytes(room)} of host memory per GPU"
    return (
        "the share of tokens that hides is min(B T - W, M / (n - s) - W) / V (MEMO, arXiv:2407.12117), with B ="
        f" {told['copy_bandwidth'] / 1e9:.3g} GB/s, T = {1e3 * told['forward_s']:.3g} ms, the forward pass of a"
        f" layer{of_host}; W and V are the bytes of values that are saved whole, and of those saved by tokens"
    )
