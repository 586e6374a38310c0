"""Figures of the GPUs that llamajax plans and measures against; other devices are timed instead."""

import dataclasses
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from llamajax.config import HardwareConfig
from llamajax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model."""

    name: str
    config_name: str
    """What `hardware.gpu` calls it."""
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
GPUS = (
    Gpu(
        name="A100-40GB",
        config_name="a100-40gb",
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
    ),
    Gpu(
        name="A100-80GB",
        config_name="a100-80gb",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        peak_flops=312e12,
        memory_bytes=85_100_068_864,
        memory_bandwidth=2.03904e12,
        gpu_bandwidth=300e9,
        node_bandwidth=100e9,
        compute_capability=(8, 0),
        cores=108,
        fp32_lanes=64,
        clock_ghz=1.41,
        l2_bytes=41_943_040,
        shared_memory_per_core=167_936,
        shared_memory_per_block=166_912,
        description="NVIDIA A100-SXM4-80GB",
    ),
    Gpu(
        name="H100",
        config_name="h100",
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
    ),
    Gpu(
        name="H200",
        config_name="h200",
        device_kinds=("NVIDIA H200",),
        peak_flops=989.5e12,
        memory_bytes=151_397_597_184,
        memory_bandwidth=4.8e12,
        gpu_bandwidth=450e9,
        node_bandwidth=400e9,
        compute_capability=(9, 0),
        cores=132,
        fp32_lanes=128,
        clock_ghz=1.98,
        l2_bytes=52_428_800,
        shared_memory_per_core=233_472,
        shared_memory_per_block=232_448,
        description="NVIDIA H200 141GB HBM3e",
    ),
)


def planned_gpu(config: HardwareConfig) -> Gpu:
    """The GPU to plan for, its bandwidths those of `config`'s nodes.

    Raises:
        ConfigError: `config` names no GPU.
    """
    gpu = next((gpu for gpu in GPUS if gpu.config_name == config.gpu), None)
    if gpu is None:
        names = ", ".join(gpu.config_name for gpu in GPUS)
        raise ConfigError(f"hardware.gpu: a plan needs to know the GPU; set it to one of {names}")
    return dataclasses.replace(
        gpu,
        gpu_bandwidth=config.gpu_bandwidth or gpu.gpu_bandwidth,
        node_bandwidth=config.node_bandwidth or gpu.node_bandwidth * config.gpus_per_node / 8,
    )


def target_config(gpu: Gpu) -> str:
    """What XLA must know to compile for `gpu` without having one: a `stream_executor.GpuTargetConfigProto` as text."""
    major, minor = gpu.compute_capability
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fp32_lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.memory_bandwidth)}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.description}"
"""


def find_gpu(device_kind: str) -> Gpu | None:
    """The GPU that jax calls `device_kind`; None if its figures are not known."""
    return next((gpu for gpu in GPUS if device_kind in gpu.device_kinds), None)


@dataclass(frozen=True, kw_only=True)
class PeakFlops:
    """What model FLOPs utilization (MFU) is a share of."""

    flops_per_sec: float
    """FLOP/s of one device."""
    source: str
    """Where the figure is from, for people."""

    def __str__(self) -> str:
        tera = self.flops_per_sec >= 1e12
        rate = f"{self.flops_per_sec / 1e12:,.1f} TFLOP/s" if tera else f"{self.flops_per_sec / 1e9:,.1f} GFLOP/s"
        return f"{rate} per device ({self.source})"


def peak_flops(dtype: jax.typing.DTypeLike) -> PeakFlops:
    """The peak of this process's devices: the data sheet's bfloat16 figure, or else a timed matmul of `dtype`."""
    device = jax.local_devices()[0]
    gpu = find_gpu(device.device_kind)
    if gpu is not None:
        return PeakFlops(flops_per_sec=gpu.peak_flops, source=f"{gpu.name} data sheet, bfloat16")
    # One emulated CPU device alone uses all cores, eight at once share them: each gets its part of the machine.
    sharers = jax.local_device_count() if device.platform == "cpu" else 1
    source = f"measured matmul peak, {jnp.dtype(dtype).name}"
    if sharers > 1:
        source += f", {sharers} emulated devices share the machine"
    return PeakFlops(flops_per_sec=measure_matmul_flops(dtype) / sharers, source=source)


def measure_matmul_flops(dtype: jax.typing.DTypeLike, *, min_seconds: float = 0.01) -> float:
    """FLOP/s of the best of five square matmuls on one local device, large enough to take `min_seconds` each."""
    device = jax.local_devices()[0]
    # A mesh of this device alone: the process's mesh spans all devices and refuses arrays that live on one.
    with jax.set_mesh(jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,), devices=[device])):
        size = 512
        while True:
            matrix = jax.device_put(np.ones((size, size), dtype), device)
            matmul = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
            matmul(matrix, matrix).block_until_ready()
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                matmul(matrix, matrix).block_until_ready()
                seconds.append(time.perf_counter() - start)
            if min(seconds) >= min_seconds:
                return 2 * size**3 / min(seconds)
            size *= 2
