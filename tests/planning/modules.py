"""A machine with round figures, and HLO modules written by hand, for tests of the cost model."""

import dataclasses

from llamajax.estimates.gpus import find_gpu
from llamajax.estimates.machine import Machine
from llamajax.planning.xla.hlo import Module
from llamajax.planning.xla.parse import parse

_H100 = find_gpu("NVIDIA H100 80GB HBM3")
assert _H100 is not None
MACHINE = Machine(
    gpu=dataclasses.replace(
        _H100, peak_flops=1e15, memory_bandwidth=1e12, gpu_bandwidth=100e9, node_bandwidth=40e9, cores=100
    ),
    gpus_per_node=4,
)
"""Two nodes are enough for eight devices; a GPU has 100 GB/s inside its node and 10 GB/s out of it."""
SHARE = MACHINE.calibration


def memory_s(num_bytes: float) -> float:
    """Seconds of a kernel that moves so many bytes."""
    return SHARE.kernel_s + num_bytes / (1e12 * SHARE.memory_efficiency)


def module(entry: str, computations: str = "", *, num_devices: int = 8) -> Module:
    """The module with these lines as its ENTRY, the last of them its result, and these computations.

    A computation is written `name: line; line ...`, its last line the result, one computation per paragraph.
    """
    text = f"HloModule m, is_scheduled=true, num_partitions={num_devices}\n\n"
    for paragraph in computations.strip().split("\n\n"):
        if paragraph:
            name, lines = paragraph.split(":\n", 1)
            text += _computation(f"%{name.strip()}", lines)
    return parse(text + _computation("ENTRY %main", entry))


def _computation(name: str, text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines()]
    lines[-1] = f"ROOT {lines[-1]}"
    return f"{name} () -> f32[] {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n\n"
