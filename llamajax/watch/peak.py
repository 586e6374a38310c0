"""Determines the peak FLOP/s of the devices, the basis of model FLOPs utilization (MFU)."""

import functools
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from llamajax.estimates.gpus import find_gpu


@dataclass(frozen=True, kw_only=True)
class PeakFlops:
    """Peak that model FLOPs utilization (MFU) is relative to."""

    flops_per_sec: float
    """Peak FLOP/s of one device."""
    source: str
    """Source of the figure, for people."""

    def __str__(self) -> str:
        tera = self.flops_per_sec >= 1e12
        rate = f"{self.flops_per_sec / 1e12:,.1f} TFLOP/s" if tera else f"{self.flops_per_sec / 1e9:,.1f} GFLOP/s"
        return f"{rate} per device ({self.source})"


def peak_flops(dtype: jax.typing.DTypeLike) -> PeakFlops:
    """Returns the peak of this process's devices: the data sheet's bfloat16 figure, or else a timed matmul of `dtype`."""
    device = jax.local_devices()[0]
    gpu = find_gpu(device.device_kind)
    if gpu is not None:
        return PeakFlops(flops_per_sec=gpu.peak_flops, source=f"{gpu.name} data sheet, bfloat16")
    # A single emulated CPU device uses all cores; eight at once share them, so each gets its part of the machine.
    sharers = jax.local_device_count() if device.platform == "cpu" else 1
    source = f"measured matmul peak, {jnp.dtype(dtype).name}"
    if sharers > 1:
        source += f", {sharers} emulated devices share the machine"
    return PeakFlops(flops_per_sec=measure_matmul_flops(dtype) / sharers, source=source)


@functools.cache
def measure_matmul_flops(dtype: jax.typing.DTypeLike, *, min_seconds: float = 0.01) -> float:
    """Returns the FLOP/s of the best of five square matmuls on one local device, large enough to take `min_seconds` each."""
    device = jax.local_devices()[0]
    # A mesh of this device alone: the process's mesh spans all devices and rejects arrays on only one of them.
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
