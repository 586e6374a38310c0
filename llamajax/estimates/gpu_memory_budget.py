"""What a process takes of a GPU beside XLA's arrays, and the share that is left: one rule for plans and for training."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from llamajax.config.run import Config
from llamajax.errors import EnvironmentMismatchError
from llamajax.estimates.gpus import planned_gpu

MEMORY_FRACTION = 0.92
"""Of a GPU's memory, the most that jax takes for arrays unless the environment says otherwise (its own default is 0.75)."""
VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"

CONTEXT_BYTES = 512 * 2**20
LIBRARY_BYTES = 512 * 2**20
NCCL_CHANNELS = 24
NCCL_CHANNEL_BYTES = 524_288 + 4_915_200 + 4_194_304


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What a process takes of the card beside XLA's arrays: stated, because no compiler knows it."""

    num_communicators: int
    """Groups of devices, each with its own NCCL communicator."""

    @property
    def nccl_bytes(self) -> int:
        """Each communicator has 24 channels, as NCCL opens with NVSwitch; each channel a buffer to send from and one to
        receive into; each of these room for the protocols LL, LL128 and Simple: 0.5 + 4.7 + 4 MiB (NCCL's defaults)."""
        return self.num_communicators * NCCL_CHANNELS * 2 * NCCL_CHANNEL_BYTES

    @property
    def total_bytes(self) -> int:
        return CONTEXT_BYTES + LIBRARY_BYTES + self.nccl_bytes

    def __str__(self) -> str:
        mebi = 2**20
        return (
            f"{self.total_bytes / mebi:,.0f} MiB beside XLA's arrays: CUDA context {CONTEXT_BYTES / mebi:.0f}, kernels,"
            f" cuBLAS and cuDNN {LIBRARY_BYTES / mebi:.0f}, NCCL {self.nccl_bytes / mebi:,.0f}"
            f" ({self.num_communicators} communicators x {NCCL_CHANNELS} channels x 2 x {NCCL_CHANNEL_BYTES / mebi:.1f})"
        )


def allowance(axes: Mapping[str, int]) -> Allowance:
    """For a mesh of these sizes: a communicator for every set of axes that collectives can run along, which is the most
    that a program opens; which of them it needs is only known once it is compiled, and jax takes its memory before."""
    return Allowance(num_communicators=2 ** sum(size > 1 for size in axes.values()) - 1)


def room(capacity_bytes: int, beside: Allowance) -> float:
    """The share of a card of `capacity_bytes` that is left for arrays, in thousandths rounded down."""
    return math.floor(1000 * (1 - beside.total_bytes / capacity_bytes)) / 1000


def told_fraction() -> float | None:
    """The share of a GPU's memory that the environment lets jax take for arrays, as `connect` does; None: it says nothing.

    Raises:
        EnvironmentMismatchError: it says what is no number.
    """
    text = os.environ.get(VARIABLE)
    try:
        return float(text) if text else None
    except ValueError as error:
        raise EnvironmentMismatchError(f"{VARIABLE}={text!r} must be a share of the GPU's memory, such as 0.9") from error


def memory_fraction(config: Config) -> float:
    """Of the memory of the GPUs in `config.hardware`, what training takes for arrays.

    What the environment says in XLA_PYTHON_CLIENT_MEM_FRACTION; else `MEMORY_FRACTION`, or less where NCCL needs more.

    Raises:
        EnvironmentMismatchError: what the environment says is no number.
    """
    if (told := told_fraction()) is not None:
        return told
    if config.hardware.gpu == "none" or config.mesh.num_cpu_devices is not None:
        return MEMORY_FRACTION
    beside = allowance(config.mesh.axis_sizes(config.hardware.num_devices))
    return min(MEMORY_FRACTION, room(planned_gpu(config.hardware).memory_bytes, beside))
