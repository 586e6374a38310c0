"""Saved values on a local NVMe disk (SSDTrain, arXiv:2408.10013): which layers keep theirs, and what the disk needs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from llamajax.config.run import Config
from llamajax.estimates.gpus import planned_gpu

SECONDS_PER_YEAR = 365.25 * 24 * 3600


class Disk(NamedTuple):
    """A GPU's share of the disks of its node."""

    bandwidth: float
    """Bytes per second to write; infinite where it is unknown."""
    room_bytes: float
    """Space for saved values; infinite where it is unknown."""


def planned_disk(config: Config) -> Disk | None:
    """Returns the disk on which saved values wait; None: they wait in host memory.

    Raises:
        ConfigError: see `planned_gpu`.
    """
    tiers, hardware = config.offload.tiers, config.hardware
    if tiers.nvme_dir is None:
        return None
    room = math.inf if tiers.nvme_bytes is None else tiers.nvme_bytes / hardware.gpus_per_node
    return Disk(planned_gpu(hardware).nvme_bandwidth or math.inf, room)


def first_kept(sizes: Sequence[float], forward_s: Sequence[float], bandwidth: float) -> int:
    """Returns the index of the first layer that keeps its values in memory, as all layers after it do; the number of layers
    if none does.

    A layer's values must be written before its backward pass, which is twice as long as the forward pass. The rule
    (arXiv:2408.10013, section 3) keeps layer n if (sum_{m<n} V_m + 2 V_n) / (3 T - 2 sum_{m<n} T_m) is above the bandwidth,
    where T is the time of the whole forward pass.

    Args:
        sizes: bytes V of each layer's values, in forward order.
        forward_s: seconds T of each layer's forward pass.
        bandwidth: bytes per second that the disk writes.
    """
    before, passed, total = 0.0, 0.0, sum(forward_s)
    for layer, (size, seconds) in enumerate(zip(sizes, forward_s, strict=True)):
        if before + 2 * size > bandwidth * (3 * total - 2 * passed):
            return layer
        before, passed = before + size, passed + seconds
    return len(sizes)


def needed_bandwidth(bytes_per_step: float, step_s: float) -> float:
    """Returns the bytes per second to write that hide behind a step: all of them within half of it (arXiv:2408.10013,
    section 2)."""
    return bytes_per_step / (step_s / 2)


def life_s(endurance_bytes: float, bytes_per_step: float, step_s: float) -> float:
    """Returns the seconds until a disk has written what it is rated for (arXiv:2408.10013, section 2)."""
    return endurance_bytes * step_s / bytes_per_step


def yearly_bytes(bytes_per_step: float, step_s: float) -> float:
    """Returns the endurance that a year of such steps takes: `life_s` of it is a year."""
    return bytes_per_step * SECONDS_PER_YEAR / step_s
