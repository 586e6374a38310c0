"""Figures of the GPUs that llamajax plans for and measures against; the rate of other devices is measured."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from llamajax.config.machine import HardwareConfig
from llamajax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model."""

    name: str
    """Name; in lower case it is the value of `hardware.gpu`."""
    device_kinds: tuple[str, ...]
    """`device_kind` strings that jax reports for it."""
    family: str
    """Group of GPUs that sustain the same shares of their data sheets; `llamajax.estimates.machine` has the shares."""
    peak_flops: float
    """Dense bfloat16 tensor-core FLOP/s (two per multiply-add) that accumulate in float32, without sparsity."""
    memory_bytes: int
    """Device memory in bytes, as the driver reports it."""
    memory_bandwidth: float
    """Bytes per second between the chip and its memory."""
    link: Literal["NVLink", "PCIe", "PCIe without peer-to-peer"] = "NVLink"
    """Link between the GPUs of a node. Without peer-to-peer, data from one GPU to another passes through the host's
    memory."""
    gpu_bandwidth: float
    """Bytes per second, each way, between one GPU and the others of its node."""
    node_bandwidth: float | None
    """Bytes per second, each way, between a node of eight GPUs and the network; the ports come with the GPUs. None: such
    nodes have no usual network, and `HardwareConfig` must set it."""
    host_memory: int | None
    """Bytes of memory of the host of eight such GPUs; None: there is no usual host, and `HardwareConfig` must set it."""
    nvme_bandwidth: float | None
    """Bytes per second that the NVMe disks of the usual node write for each of its GPUs; None: there are no usual ones."""
    compute_capability: tuple[int, int]
    """CUDA compute capability."""
    cores: int
    """Streaming multiprocessors."""
    fp32_lanes: int
    """float32 units per core."""
    threads_per_core: int = 2048
    """Largest number of threads that one core holds at once."""
    clock_ghz: float
    """Boost clock."""
    l2_bytes: int
    """Bytes of the second-level cache."""
    shared_memory_per_core: int
    """Bytes of shared memory per core."""
    shared_memory_per_block: int
    """Bytes that one block may opt in to."""
    description: str
    """Name in XLA's description of the card."""


# Peaks and bandwidths: NVIDIA's data sheets of the A100 (2021), H100 SXM (2022) and H200 SXM (2023). The last two print
# 1,979 TFLOP/s "with sparsity", which is 989.5 dense; NVLink is printed for both ways together, 600 and 900 GB/s. Memory
# sizes, exact bandwidths and the chip's parameters for the compiler: XLA's own descriptions of the same cards
# (GpuTargetConfigProto). Networks: four ports of 200 Gb/s per A100 node, as Megatron-LLaMA's cluster of 512 had
# (github.com/alibaba/Megatron-LLaMA); eight of 400 Gb/s per H100 or H200 node, as in the DGX H100 and H200 (NVIDIA's data
# sheets). PCIe and NVL cards of the same names have lower clocks and are deliberately not listed: their rate is measured.
# Host memory and number of disks: NVIDIA's data sheets of the DGX A100 (320 GB and 640 GB), H100, H200 and B200. One disk of
# 3.84 TB per GPU, in the smaller A100 one per two. Samsung's data sheet of such a disk for PCIe 4 (PM1733): writes 3.8 GB/s.
_MIB, _GIB, _DISK = 2**20, 2**30, 3.8e9
_A100 = Gpu(
    name="A100-40GB",
    family="A100",
    device_kinds=("NVIDIA A100-SXM4-40GB",),
    peak_flops=312e12,
    memory_bytes=42_331_013_120,
    memory_bandwidth=1.5552e12,
    gpu_bandwidth=300e9,
    node_bandwidth=100e9,
    host_memory=1024 * _GIB,
    nvme_bandwidth=_DISK / 2,
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
    family="H100",
    device_kinds=("NVIDIA H100 80GB HBM3",),
    peak_flops=989.5e12,
    memory_bytes=84_942_979_072,
    memory_bandwidth=3.35232e12,
    gpu_bandwidth=450e9,
    node_bandwidth=400e9,
    host_memory=2048 * _GIB,
    nvme_bandwidth=_DISK,
    compute_capability=(9, 0),
    cores=132,
    fp32_lanes=128,
    clock_ghz=1.98,
    l2_bytes=52_428_800,
    shared_memory_per_core=233_472,
    shared_memory_per_block=232_448,
    description="NVIDIA H100 80GB HBM3",
)
# NVIDIA's data sheet of the HGX and DGX B200: 36 PFLOP/s of bfloat16 "with sparsity" for eight GPUs; of the GB200 NVL72: 360
# for 72; NVLink 1.8 TB/s for both ways together; 480 GB of host memory for each two GB200. All else: XLA's own descriptions
# of both. Network: one ConnectX-7 of 400 Gb/s per GPU, in DGX B200 and in GB200 NVL72.
_B200 = dataclasses.replace(
    _H100,
    name="B200",
    family="B200",
    device_kinds=("NVIDIA B200",),
    peak_flops=2250e12,
    memory_bytes=191_514_411_008,
    memory_bandwidth=7.67232e12,
    gpu_bandwidth=900e9,
    compute_capability=(10, 0),
    cores=148,
    clock_ghz=1.965,
    l2_bytes=132_644_864,
    description="NVIDIA B200",
)

# Cards in PCIe slots. Cores, clocks, caches, bandwidths and peaks: NVIDIA's white papers on GA102 (RTX 3090), Ada (RTX 4090,
# L4, and, with the L40's chip, the L40S) and RTX Blackwell (RTX 5090), the data sheets of A10G, L4 and L40S, and the product
# page of the RTX 3060 (28 x 128 lanes, 1.78 GHz, 192 bits at 15 Gb/s). These also print peaks "with sparsity", and GeForce's
# peaks are for sums in float16. With sums in float32, which training needs, GeForce and A10G reach half of that: 256
# multiply-adds per core and cycle, which gives the RTX 3060's peak, 2 x 256 x 28 x 1.777 GHz. Limits of a core (shared
# memory, threads): CUDA's programming guide, compute capabilities 8.6, 8.9 and 12.0; XLA's descriptions of the RTX A6000 and
# RTX PRO 6000 agree, except that a core of the latter has 131,072 bytes, of which 12.0 may share less. Memory: the value
# that torch reports (`total_memory`), which depends on the driver least among several figures. PCIe 4 and 5 with 16 lanes:
# 16 and 32 GT/s, minus the line code.
_PCIE_4, _PCIE_5 = 31.5e9, 63e9
_RTX_3090 = Gpu(
    name="RTX-3090",
    family="RTX-4090",
    device_kinds=("NVIDIA GeForce RTX 3090",),
    peak_flops=71.2e12,
    memory_bytes=24_259 * _MIB,
    memory_bandwidth=936.2e9,
    link="PCIe without peer-to-peer",
    gpu_bandwidth=_PCIE_4,
    node_bandwidth=None,
    host_memory=None,
    nvme_bandwidth=None,
    compute_capability=(8, 6),
    cores=82,
    fp32_lanes=128,
    threads_per_core=1536,
    clock_ghz=1.695,
    l2_bytes=6 * _MIB,
    shared_memory_per_core=102_400,
    shared_memory_per_block=101_376,
    description="NVIDIA GeForce RTX 3090",
)
_RTX_4090 = dataclasses.replace(
    _RTX_3090,
    name="RTX-4090",
    device_kinds=("NVIDIA GeForce RTX 4090",),
    peak_flops=165.2e12,
    memory_bytes=24_080 * _MIB,
    memory_bandwidth=1.008e12,
    compute_capability=(8, 9),
    cores=128,
    clock_ghz=2.52,
    l2_bytes=72 * _MIB,
    description="NVIDIA GeForce RTX 4090",
)
# Rented instances with eight of these cards, g5.48xlarge, g6.48xlarge and g6e.48xlarge: networks of 100, 100 and 400 Gb/s,
# hosts of 768, 768 and 1,536 GiB (Amazon's pages about the instance types).
_L40S = dataclasses.replace(
    _RTX_4090,
    name="L40S",
    family="L40S",
    device_kinds=("NVIDIA L40S",),
    peak_flops=362.05e12,
    memory_bytes=45_372 * _MIB,
    memory_bandwidth=864e9,
    link="PCIe",
    node_bandwidth=50e9,
    host_memory=1536 * _GIB,
    cores=142,
    l2_bytes=96 * _MIB,
    description="NVIDIA L40S",
)
GPUS = (
    _A100,
    dataclasses.replace(
        _A100,
        name="A100-80GB",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        memory_bytes=85_100_068_864,
        memory_bandwidth=2.03904e12,
        host_memory=2048 * _GIB,
        nvme_bandwidth=_DISK,
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
    _B200,
    dataclasses.replace(
        _B200,
        name="GB200",
        device_kinds=("NVIDIA GB200",),
        peak_flops=2500e12,
        memory_bytes=197_897_748_480,
        memory_bandwidth=7.928064e12,
        host_memory=4 * 480 * 10**9,
        nvme_bandwidth=None,
        cores=152,
        clock_ghz=2.062,
        l2_bytes=135_528_448,
        description="NVIDIA GB200",
    ),
    dataclasses.replace(
        _RTX_3090,
        name="RTX-3060-12GB",
        device_kinds=("NVIDIA GeForce RTX 3060",),
        peak_flops=25.5e12,
        memory_bytes=11_931 * _MIB,
        memory_bandwidth=360e9,
        cores=28,
        clock_ghz=1.777,
        l2_bytes=3 * _MIB,
        description="NVIDIA GeForce RTX 3060",
    ),
    _RTX_3090,
    _RTX_4090,
    dataclasses.replace(
        _RTX_4090,
        name="RTX-5090",
        family="RTX-5090",
        device_kinds=("NVIDIA GeForce RTX 5090",),
        peak_flops=209.5e12,
        memory_bytes=32_089 * _MIB,
        memory_bandwidth=1.792e12,
        gpu_bandwidth=_PCIE_5,
        compute_capability=(12, 0),
        cores=170,
        clock_ghz=2.407,
        l2_bytes=96 * _MIB,
        description="NVIDIA GeForce RTX 5090",
    ),
    dataclasses.replace(
        _RTX_3090,
        name="A10G",
        device_kinds=("NVIDIA A10G",),
        peak_flops=70e12,
        memory_bytes=22_502 * _MIB,
        memory_bandwidth=600e9,
        link="PCIe",
        node_bandwidth=12.5e9,
        host_memory=768 * _GIB,
        cores=80,
        clock_ghz=1.71,
        description="NVIDIA A10G",
    ),
    dataclasses.replace(
        _L40S,
        name="L4",
        device_kinds=("NVIDIA L4",),
        peak_flops=121e12,
        memory_bytes=22_478 * _MIB,
        memory_bandwidth=300e9,
        node_bandwidth=12.5e9,
        host_memory=768 * _GIB,
        cores=58,
        clock_ghz=2.04,
        l2_bytes=48 * _MIB,
        description="NVIDIA L4",
    ),
    _L40S,
)


def planned_gpu(config: HardwareConfig) -> Gpu:
    """Returns the GPU to plan for, with the bandwidths and the host memory of `config`'s nodes.

    Raises:
        ConfigError: `config` names no GPU.
    """
    gpu = next((gpu for gpu in GPUS if gpu.name.lower() == config.gpu), None)
    if gpu is None:
        names = ", ".join(gpu.name.lower() for gpu in GPUS)
        raise ConfigError(f"hardware.gpu: a plan needs a GPU; set it to one of {names}")
    usual = None if gpu.node_bandwidth is None else gpu.node_bandwidth * config.gpus_per_node / 8
    usual_memory = None if gpu.host_memory is None else gpu.host_memory * config.gpus_per_node // 8
    return dataclasses.replace(
        gpu,
        gpu_bandwidth=config.gpu_bandwidth or gpu.gpu_bandwidth,
        node_bandwidth=config.node_bandwidth or usual,
        host_memory=usual_memory if config.host_memory is None else int(config.host_memory),
        nvme_bandwidth=config.nvme_bandwidth or gpu.nvme_bandwidth,
    )


def find_gpu(device_kind: str) -> Gpu | None:
    """Returns the GPU with the jax name `device_kind`; None if its figures are unknown."""
    return next((gpu for gpu in GPUS if device_kind in gpu.device_kinds), None)
