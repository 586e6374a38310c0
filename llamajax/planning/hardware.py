"""Figures of the GPUs that llamajax plans and measures against; other devices are timed instead."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model."""

    name: str
    device_kinds: tuple[str, ...]
    """`device_kind` strings that jax reports for it."""
    peak_flops: float
    """Dense bfloat16 tensor-core FLOP/s (two per multiply-add), without sparsity."""
    memory_bytes: int
    """Device memory in bytes, as the driver reports it."""
    memory_bandwidth: float
    """Bytes per second between the chip and its memory."""


# Peaks and bandwidths: NVIDIA's data sheets of the A100 (2021), H100 SXM (2022) and H200 SXM (2023). The last two
# print 1,979 TFLOP/s "with sparsity", which is 989.5 dense. Memory sizes and exact bandwidths: XLA's own
# descriptions of the same cards (GpuTargetConfigProto). PCIe and NVL cards of the same names have lower clocks and are
# not listed on purpose: their rate is measured.
GPUS = (
    Gpu(
        name="A100-40GB",
        device_kinds=("NVIDIA A100-SXM4-40GB",),
        peak_flops=312e12,
        memory_bytes=42_331_013_120,
        memory_bandwidth=1.5552e12,
    ),
    Gpu(
        name="A100-80GB",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        peak_flops=312e12,
        memory_bytes=85_100_068_864,
        memory_bandwidth=2.03904e12,
    ),
    Gpu(
        name="H100",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        peak_flops=989.5e12,
        memory_bytes=84_942_979_072,
        memory_bandwidth=3.35232e12,
    ),
    Gpu(
        name="H200",
        device_kinds=("NVIDIA H200",),
        peak_flops=989.5e12,
        memory_bytes=151_397_597_184,
        memory_bandwidth=4.8e12,
    ),
)


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
