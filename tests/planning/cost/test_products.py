"""Products by their shapes, against XLA's own table of an H100: xla/service/gpu/model/matmul_interpolator_data.h."""

import dataclasses
import statistics

import pytest

from llamajax.estimates.calibration import Constants
from llamajax.estimates.gpus import find_gpu
from llamajax.estimates.machine import Machine
from llamajax.planning.cost.kernels import Dot, dot_seconds

# Batch, rows, columns, contracted, TFLOP/s: bfloat16, short runs at the full clock.
TABLE = """
1 1024 2048 256 139.5   2 256 2048 2048 332.2   1 256 2048 256 41.8     4 512 256 256 42.4      1 4096 512 512 238.8
4 4096 256 2048 588.7   1 512 256 512 21.8      2 2048 256 512 139.2    2 1024 2048 1024 493.4  1 256 2048 4096 285.9
2 512 2048 2048 525.3   4 1024 2048 2048 712.7  1 4096 1024 512 343.7   1 2048 2048 2048 632.0  4 256 256 256 22.6
2 256 256 1024 37.0     1 256 512 4096 91.7     1 256 1024 256 22.7     1 4096 4096 256 392.2   2 256 1024 2048 216.1
2 2048 4096 1024 678.7  2 4096 512 256 211.0    2 4096 4096 2048 763.0  4 512 2048 1024 487.2   4 1024 512 2048 514.2
1 2048 512 2048 347.7   2 512 512 2048 216.5    4 4096 512 1024 589.0   2 1024 256 256 43.7     1 4096 4096 4096 783.3
1 512 4096 1024 373.3   2 256 512 2048 119.6    2 2048 256 4096 378.6   1 256 1024 4096 172.3   1 4096 2048 512 447.0
1 2048 256 1024 135.8   2 512 1024 2048 349.5   4 1024 1024 2048 626.1  4 4096 1024 1024 673.8  4 1024 256 1024 218.2
4 4096 4096 512 619.9   1 2048 1024 2048 523.3  4 256 2048 1024 358.9   2 4096 1024 4096 750.6  2 1024 256 4096 306.4
1 4096 256 2048 304.7   1 1024 1024 2048 350.0  4 4096 512 512 441.5    2 4096 512 4096 729.7   2 1024 4096 1024 596.5
1 256 4096 2048 324.6   4 2048 2048 2048 725.7  2 4096 2048 4096 783.2  4 4096 1024 512 542.0   4 4096 4096 256 503.9
4 2048 512 2048 621.4   1 512 2048 1024 232.6   1 4096 512 1024 370.8   4 512 4096 1024 592.2   1 1024 2048 2048 524.3
2 2048 2048 1024 600.2  4 4096 4096 4096 793.1  4 2048 1024 2048 710.6  1 4096 1024 1024 488.1  1 4096 4096 512 543.1
4 4096 512 4096 728.6   2 2048 2048 2048 717.7  1 512 2048 2048 342.4   4 4096 1024 4096 777.6  1 256 4096 512 138.1
2 4096 4096 4096 807.7  2 4096 2048 512 546.4   1 512 1024 2048 216.5   1 256 256 2048 31.1     1 2048 4096 1024 594.2
4 4096 2048 4096 808.7  4 1024 4096 1024 674.9  1 4096 4096 2048 738.7  1 512 512 2048 114.7    1 4096 512 4096 650.0
1 1024 4096 1024 490.3  4 512 2048 2048 629.4   1 4096 1024 4096 738.5  1 256 4096 4096 412.0   4 256 2048 2048 478.5
1 4096 2048 256 304.0   4 512 1024 2048 518.2
"""
AT_FULL_CLOCK = 0.84
"""Share of the peak that these short runs reach; training sustains `matmul_efficiency`."""


def measured() -> dict[Dot, float]:
    numbers = TABLE.split()
    rows = [numbers[at : at + 5] for at in range(0, len(numbers), 5)]
    return {Dot(int(b), int(m), int(n), int(k), "bf16"): float(rate) * 1e12 for b, m, n, k, rate in rows}


def machine(**constants: float) -> Machine:
    gpu = find_gpu("NVIDIA H100 80GB HBM3")
    assert gpu is not None
    return Machine(gpu=gpu, measured=Constants(matmul_efficiency=AT_FULL_CLOCK, **constants))


def errors(on: Machine) -> list[float]:
    """Relative errors of the seconds."""
    start, rate = on.calibration.kernel_s + on.calibration.matmul_start_s, on.gpu.memory_bandwidth * 0.85
    result = []
    for dot, flops in measured().items():
        matrices = dot.rows * dot.contracted + dot.contracted * dot.columns + dot.rows * dot.columns
        told = start + max(dot_seconds(dot, on), 2 * dot.batch * matrices / rate)
        result.append(told * flops / dot.flops - 1)
    return result


def test_small_and_thin_products_are_as_slow_as_measured():
    found = errors(machine())
    assert len(found) == 87
    assert abs(statistics.median(found)) < 0.02
    assert statistics.median(map(abs, found)) < 0.04
    assert statistics.quantiles(map(abs, found), n=10)[-1] < 0.2


def test_without_the_start_of_products_small_ones_are_far_too_fast():
    assert statistics.median(errors(machine(matmul_start_s=0.0))) < -0.1


def test_float8_reaches_less_of_its_peak():
    dot = Dot(1, 8192, 8192, 8192, "bf16")
    float8 = dataclasses.replace(dot, dtype="f8e4m3fn")
    faster = dot_seconds(dot, machine()) / dot_seconds(float8, machine())
    assert faster == pytest.approx(2 * (1403 / 1979) / (795 / 989.5), rel=0.01)
