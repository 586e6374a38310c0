"""Host memory: how much of it data of GPUs may take."""

import math

from llamajax.config.run import Config
from llamajax.estimates.gpus import planned_gpu

SHARE = 0.9
"""Share of a host's memory that may hold data of its GPUs; the rest is for the operating system, the data loader and
checkpoints that are being written."""


def host_room(config: Config) -> float:
    """Returns the bytes of host memory for one GPU of the planned cluster; infinite where its hosts are unknown."""
    hardware, told = config.hardware, config.offload.tiers.host_bytes
    memory = planned_gpu(hardware).host_memory
    room = math.inf if memory is None else SHARE * memory
    return min(room, math.inf if told is None else told) / hardware.gpus_per_node
