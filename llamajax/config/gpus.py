"""Figures of the GPUs that llamajax plans and measures against; other devices are timed instead."""

import dataclasses
from dataclasses import dataclass

from llamajax.config.machine import HardwareConfig
from llamajax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model."""

    name: str
    """`hardware.gpu` calls it so, in small letters."""
    device_kinds: tuple[str, ...]
    """`device_kind` strings that jax reports for it."""
    peak_flops: float
    """Dense bfloat16 tensor-core FLOP/s (two per multiply-add), without sparsity."""
    memory_bytes: int
    """Device memory in bytes, as the driver reports it."""
    memory_bandwidth: float
    """Bytes per second between the chip and its memory."""
    gpu_bandwidth: float
    """Bytes per second, each way, between one GPU and the others of its node (NVLink)."""
    node_bandwidth: float
    """Bytes per second, each way, between a node of eight and the network; its ports come with the GPUs."""
    compute_capability: tuple[int, int]
    """CUDA's version of the architecture."""
    cores: int
    """Streaming multiprocessors."""
    fp32_lanes: int
    """float32 units per core."""
    clock_ghz: float
    """Boost clock."""
    l2_bytes: int
    """Second-level cache."""
    shared_memory_per_core: int
    """Bytes."""
    shared_memory_per_block: int
    """Bytes that one block may opt in to."""
    description: str
    """What XLA's description of the card calls it."""


# Peaks and bandwidths: NVIDIA's data sheets of the A100 (2021), H100 SXM (2022) and H200 SXM (2023). The last two
# print 1,979 TFLOP/s "with sparsity", which is 989.5 dense; NVLink is printed for both ways together, 600 and 900 GB/s.
# Memory sizes, exact bandwidths and what the compiler is told of the chip: XLA's own descriptions of the same cards
# (GpuTargetConfigProto). Networks: four ports of 200 Gb/s per A100 node, as Megatron-LLaMA's cluster of 512 had
# (github.com/alibaba/Megatron-LLaMA); eight of 400 Gb/s per H100 or H200 node, as in the DGX H100 and H200 (NVIDIA's
# data sheets). PCIe and NVL cards of the same names have lower clocks and are not listed on purpose: their rate is
# measured.
_A100 = Gpu(
    name="A100-40GB",
    device_kinds=("NVIDIA A100-SXM4-40GB",),
    peak_flops=312e12,
    memory_bytes=42_331_013_120,
    memory_bandwidth=1.5552e12,
    gpu_bandwidth=300e9,
    node_bandwidth=100e9,
    compute_capability=(8, 0),
    cores=108,
    fp32_lanes=64,
    clock_ghz=1.41,
    l2_bytes=41_943_040,
    shared_memory_per_core=167_936,
    shared_memory_per_block=166_912,
    description="NVIDIA A100-SXM4-40GB",
)
_H100 = Gpu(
    name="H100",
    device_kinds=("NVIDIA H100 80GB HBM3",),
    peak_flops=989.5e12,
    memory_bytes=84_942_979_072,
    memory_bandwidth=3.35232e12,
    gpu_bandwidth=450e9,
    node_bandwidth=400e9,
    compute_capability=(9, 0),
    cores=132,
    fp32_lanes=128,
    clock_ghz=1.98,
    l2_bytes=52_428_800,
    shared_memory_per_core=233_472,
    shared_memory_per_block=232_448,
    description="NVIDIA H100 80GB HBM3",
)
GPUS = (
    _A100,
    dataclasses.replace(
        _A100,
        name="A100-80GB",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        memory_bytes=85_100_068_864,
        memory_bandwidth=2.03904e12,
        description="NVIDIA A100-SXM4-80GB",
    ),
    _H100,
    dataclasses.replace(
        _H100,
        name="H200",
        device_kinds=("NVIDIA H200",),
        memory_bytes=151_397_597_184,
        memory_bandwidth=4.8e12,
        description="NVIDIA H200 141GB HBM3e",
    ),
)


def planned_gpu(config: HardwareConfig) -> Gpu:
    """The GPU to plan for, its bandwidths those of `config`'s nodes.

    Raises:
        ConfigError: `config` names no GPU.
    """
    gpu = next((gpu for gpu in GPUS if gpu.name.lower() == config.gpu), None)
    if gpu is None:
        names = ", ".join(gpu.name.lower() for gpu in GPUS)
        raise ConfigError(f"hardware.gpu: a plan needs to know the GPU; set it to one of {names}")
    return dataclasses.replace(
        gpu,
        gpu_bandwidth=config.gpu_bandwidth or gpu.gpu_bandwidth,
        node_bandwidth=config.node_bandwidth or gpu.node_bandwidth * config.gpus_per_node / 8,
    )


def find_gpu(device_kind: str) -> Gpu | None:
    """The GPU that jax calls `device_kind`; None if its figures are not known."""
    return next((gpu for gpu in GPUS if device_kind in gpu.device_kinds), None)
