"""Groups of layers, each a program of its own, for a run whose saved values wait on a disk (`offload.tiers.nvme_dir`): which
of them write theirs, and what remains in memory; all by formulas."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llamajax.config.run import Config
from llamajax.estimates.device_memory import host_bytes, saved_bytes, saved_host_bytes
from llamajax.estimates.nvme import first_kept, planned_disk
from llamajax.step.offload_form import layer_costs

GROUP_BYTES = 64 << 20
"""Least bytes that a device writes for a group, unless there are too few layers: ten milliseconds of a fast disk, beside
which the start of a program takes no time."""
IN_FLIGHT = 2
"""Groups with unwritten values when the next one's forward pass is dispatched: one is written while the other computes."""


@dataclass(frozen=True)
class Group:
    """Layers of one program."""

    start: int
    """Index of the first one."""
    count: int
    is_away: bool
    """Whether their values wait on the disk."""


def uses_files(config: Config) -> bool:
    """Returns whether the step of a resolved run is a `GroupedStep`."""
    return config.offload.tiers.nvme_dir is not None and bool(config.offload.names) and config.model.num_layers > 1


def groups_of(config: Config, mesh: Mapping[str, int], size: int | None = None) -> list[Group]:
    """Returns the groups of a resolved run's layers.

    Args:
        config: the run.
        mesh: sizes of the mesh axes.
        size: layers of a group; None: the fewest with `GROUP_BYTES` on a device, at most half of all.
    """
    L, layer_bytes = config.model.num_layers, _layer_bytes(config, mesh)
    size = size or max(1, min(math.ceil(GROUP_BYTES / max(1, layer_bytes)), L // 2))
    starts, kept = range(0, L, size), L
    disk = None if config.hardware.gpu == "none" else planned_disk(config)
    if disk is not None and math.isfinite(disk.bandwidth):
        kept = first_kept([layer_bytes] * L, [layer_costs(config, mesh).forward_s] * L, disk.bandwidth)
    last = starts[-1]
    return [Group(start, min(size, L - start), is_away=start < last and start + size <= kept) for start in starts]


def written_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes that a step writes for a device."""
    return config.train.grad_accum_steps * file_bytes(config, mesh)


def file_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the size of a device's file: what a micro-batch writes."""
    return sum(group.count for group in groups_of(config, mesh) if group.is_away) * _layer_bytes(config, mesh)


def bytes_in_flight(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of saved values in host memory for a device."""
    away = sorted((group.count for group in groups_of(config, mesh) if group.is_away), reverse=True)
    return sum(away[: IN_FLIGHT + 1]) * _layer_bytes(config, mesh)


def further_card_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of a device that the groups take beyond the form as one program, which keeps the last layer's values
    on the card."""
    if not uses_files(config):
        return 0
    kept = sum(group.count for group in groups_of(config, mesh) if not group.is_away)
    return (kept - 1) * _layer_bytes(config, mesh)


def needed_host_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of host memory that one device's data take: `host_bytes`, or less where values wait on a disk."""
    of_one_program = host_bytes(config, mesh)
    if not uses_files(config):
        return of_one_program
    return of_one_program - saved_host_bytes(config, mesh) + bytes_in_flight(config, mesh)


def _layer_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    return sum(saved_bytes(config, mesh)[1].values())
