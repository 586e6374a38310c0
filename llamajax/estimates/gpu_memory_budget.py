"""The memory that a process takes on a GPU besides XLA's arrays, and the share left for them: one rule for plans and
training."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from llamajax.config.run import Config
from llamajax.errors import EnvironmentMismatchError
from llamajax.estimates.gpus import planned_gpu

MEMORY_FRACTION = 0.92
"""Largest share of a GPU's memory that jax takes for arrays, unless the environment says otherwise (jax's own default is
0.75)."""
VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"

CONTEXT_BYTES = 512 * 2**20
LIBRARY_BYTES = 512 * 2**20
NCCL_CHANNELS = 24
NCCL_CHANNEL_BYTES = 524_288 + 4_915_200 + 4_194_304


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """Memory of the GPU that a process takes besides XLA's arrays; stated here, because no compiler reports it."""

    num_communicators: int
    """Number of groups of devices; each has its own NCCL communicator."""

    @property
    def nccl_bytes(self) -> int:
        """Bytes of NCCL's buffers. Each communicator has 24 channels, as NCCL opens with NVSwitch; each channel has a buffer
        to send from and one to receive into; each buffer has room for the protocols LL, LL128 and Simple: 0.5 + 4.7 + 4 MiB
        (NCCL's defaults)."""
        return self.num_communicators * NCCL_CHANNELS * 2 * NCCL_CHANNEL_BYTES

    @property
    def total_bytes(self) -> int:
        return CONTEXT_BYTES + LIBRARY_BYTES + self.nccl_bytes

    def __str__(self) -> str:
        mebi = 2**20
        return (
            f"{self.total_bytes / mebi:,.0f} MiB besides XLA's arrays: CUDA context {CONTEXT_BYTES / mebi:.0f}, kernels,"
            f" cuBLAS and cuDNN {LIBRARY_BYTES / mebi:.0f}, NCCL {self.nccl_bytes / mebi:,.0f}"
            f" ({self.num_communicators} communicators x {NCCL_CHANNELS} channels x 2 x {NCCL_CHANNEL_BYTES / mebi:.1f})"
        )


def allowance(axes: Mapping[str, int]) -> Allowance:
    """Returns the allowance for a mesh of these sizes: a communicator for every set of axes that collectives can use, which
    is the most that a program opens. The ones that it needs are known only after compilation, and jax takes its memory
    before."""
    return Allowance(num_communicators=2 ** sum(size > 1 for size in axes.values()) - 1)


def room(capacity_bytes: int, beside: Allowance) -> float:
    """Returns the share of a card of `capacity_bytes` that is left for arrays, in thousandths rounded down."""
    return math.floor(1000 * (1 - beside.total_bytes / capacity_bytes)) / 1000


def told_fraction() -> float | None:
    """Returns the share of a GPU's memory that the environment allows jax to take for arrays, which `connect` sets; None: it
    is unset.

    Raises:
        EnvironmentMismatchError: its value is no number.
    """
    text = os.environ.get(VARIABLE)
    try:
        return float(text) if text else None
    except ValueError as error:
        raise EnvironmentMismatchError(f"{VARIABLE}={text!r} must be a share of the GPU's memory, such as 0.9") from error


def memory_fraction(config: Config) -> float:
    """Returns the share of the memory of the GPUs in `config.hardware` that training takes for arrays.

    This is the value of XLA_PYTHON_CLIENT_MEM_FRACTION in the environment; without it `MEMORY_FRACTION`, or less where NCCL
    needs more.

    Raises:
        EnvironmentMismatchError: the value in the environment is no number.
    """
    if (told := told_fraction()) is not None:
        return told
    if config.hardware.gpu == "none" or config.mesh.num_cpu_devices is not None:
        return MEMORY_FRACTION
    beside = allowance(config.mesh.axis_sizes(config.hardware.num_devices))
    return min(MEMORY_FRACTION, room(planned_gpu(config.hardware).memory_bytes, beside))
