"""Devices and processes: the mesh, and several processes in one run."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llamajax.config.rules import Bound, NonNegativeInt, PositiveInt, PositiveIntOrUnset, Section
from llamajax.errors import ConfigError

AxisSize = Annotated[int, Bound(lambda value: value == -1 or value > 0, "must be positive, or -1 for the rest")]


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """How many devices lie along each mesh axis; `-1` on one axis takes the rest."""

    data: AxisSize = 1
    """Data-parallel replicas of the whole (sharded) state."""
    fsdp: AxisSize = -1
    """Shards of parameters, gradients and optimizer state (ZeRO); also splits the batch."""
    sequence: AxisSize = 1
    """Shards of the sequence (context parallelism)."""
    tensor: AxisSize = 1
    """Shards of heads, MLP and vocabulary (tensor parallelism)."""
    num_cpu_devices: PositiveIntOrUnset = None
    """Emulate this many devices per process on the CPU; unset: use the accelerators that jax finds."""

    def broken_rules(self) -> Iterator[str]:
        automatic = [axis for axis, size in dataclasses.asdict(self).items() if size == -1 and axis != "num_cpu_devices"]
        if len(automatic) > 1:
            chosen = next(
                axis for axis in automatic if axis != "fsdp"
            )  # which is -1 by default, so not the line to point at
            yield f"{chosen}: {' and '.join(automatic)} are both -1; only one axis can take the rest"

    def axis_sizes(self, num_devices: int) -> dict[str, int]:
        """The size of every configured axis on `num_devices` devices, the automatic one resolved.

        Raises:
            ConfigError: the sizes do not multiply to `num_devices`.
        """
        sizes = {"data": self.data, "fsdp": self.fsdp, "sequence": self.sequence, "tensor": self.tensor}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if -1 in sizes.values():
            if num_devices % fixed:
                raise ConfigError(f"mesh: {self._product()} = {fixed} does not divide the {num_devices} devices")
            return {axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()}
        if fixed != num_devices:
            raise ConfigError(
                f"mesh: {self._product()} = {fixed}, but there are {num_devices} devices; set one axis to -1 for the rest"
            )
        return sizes

    def _product(self) -> str:
        sizes = {"data": self.data, "fsdp": self.fsdp, "sequence": self.sequence, "tensor": self.tensor}
        return " x ".join(f"{axis}({size})" for axis, size in sizes.items() if size != -1)


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Section):
    """Several processes (hosts) in one run, joined by jax.distributed."""

    enabled: bool = False
    """Join the other processes; under Slurm and Open MPI the addresses below are found by themselves."""
    coordinator_address: str | None = None
    """`host:port` of process 0; unset: found from the launcher's environment."""
    num_processes: PositiveIntOrUnset = None
    """Processes in the run; unset: LLAMAJAX_NUM_PROCESSES, else found from the launcher's environment."""
    process_id: NonNegativeInt | None = None
    """Rank of this process; unset: LLAMAJAX_PROCESS_ID, else found from the launcher's environment."""
    heartbeat_timeout_s: PositiveInt = 30
    """Seconds without a sign of life after which a process counts as lost."""
    initialization_timeout_s: PositiveInt = 300
    """Seconds to wait for all processes at the start."""

    def broken_rules(self) -> Iterator[str]:
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            yield f"process_id: {self.process_id} must be below num_processes={self.num_processes}"
        for name in ("coordinator_address", "num_processes", "process_id"):
            if not self.enabled and getattr(self, name) is not None:
                yield f"{name}: has no effect unless enabled is true; set it, or remove this"
