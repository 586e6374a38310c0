"""The limit of pinned host memory that jax may take, from what a run needs; set before jax starts its devices."""

import math
import os
import resource
from pathlib import Path

from llamajax.config.run import Config
from llamajax.errors import EnvironmentMismatchError
from llamajax.estimates.formulas import state_host_bytes
from llamajax.estimates.host_memory import SHARE
from llamajax.step.layer_groups import needed_host_bytes
from llamajax.step.resolve import resolve_planned
from llamajax.units import format_bytes

VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Limit of the pool, in GiB; jax's own default is 64."""
_DEFAULT_BYTES = 64 << 30
_FRAGMENTS = 1.1
"""Size of the pool beside that of its arrays: it loses some room between them."""


def prepare(config: Config) -> str | None:
    """Allows jax as much pinned memory as all GPUs of a node of `config.hardware` need, unless the environment names a
    limit, and returns a line about it; None: the run needs no more than jax takes anyway. Call it before jax starts.

    Raises:
        EnvironmentMismatchError: this machine has less memory than that.
    """
    hardware, offload = config.hardware, config.offload
    if (offload.activations, offload.optimizer) == ("none", "none") or config.mesh.num_cpu_devices is not None:
        return None
    total = memory_of_machine()
    if hardware.gpu == "none":
        # The need is unknown before jax tells the devices; the pool grows no further than arrays need.
        os.environ.setdefault(VARIABLE, str(int(SHARE * total) >> 30))
        return f"up to {os.environ[VARIABLE]} GiB, because hardware.gpu does not name the GPU"
    run = resolve_planned(config)
    needed = needed_host_bytes(run.config, run.mesh)
    if config.checkpoint.local_dir is not None:  # its saves begin with a copy of the state
        needed += state_host_bytes(run.config, run.mesh)
    needed *= hardware.gpus_per_node
    if needed > SHARE * total:
        raise EnvironmentMismatchError(
            f"offload: {format_bytes(needed)} of host memory for {hardware.gpus_per_node} GPUs are more than {SHARE:.0%} of"
            f" this machine's {format_bytes(total)}; set offload.tiers.host_bytes with auto, name fewer values, or use more"
            " nodes"
        )
    if _FRAGMENTS * needed > _DEFAULT_BYTES:
        os.environ.setdefault(VARIABLE, str(math.ceil(min(_FRAGMENTS * needed, SHARE * total) / (1 << 30))))
    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = f"{format_bytes(needed)} of this machine's {format_bytes(total)}, for {hardware.gpus_per_node} GPUs"
    if 0 <= lockable < needed:
        told += f"; ulimit -l is {format_bytes(lockable)}: if the driver refuses to pin more, set it to unlimited"
    return told


def memory_of_machine(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that this process may use: the machine's, or less in a container; `root` is the root of
    the file system."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory/memory.limit_in_bytes"]
    known = [path.read_text().strip() for path in limits if path.exists()]
    return min([total, *(int(text) for text in known if text.isdecimal())])
