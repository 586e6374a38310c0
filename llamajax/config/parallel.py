"""Devices and processes: the mesh, and several processes in one run."""

import dataclasses
import math
from dataclasses import dataclass

from llamajax.config.rules import require
from llamajax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices lie along each mesh axis; `-1` on one axis takes the rest."""

    data: int = 1
    """Data-parallel replicas of the whole (sharded) state."""
    fsdp: int = -1
    """Shards of parameters, gradients and optimizer state (ZeRO); also splits the batch."""
    sequence: int = 1
    """Shards of the sequence (context parallelism)."""
    tensor: int = 1
    """Shards of heads, MLP and vocabulary (tensor parallelism)."""
    num_cpu_devices: int | None = None
    """Emulate this many devices per process on the CPU; unset: use the accelerators that jax finds."""

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        num_cpu_devices = sizes.pop("num_cpu_devices")
        automatic = [axis for axis, size in sizes.items() if size == -1]
        chosen = [axis for axis in automatic if axis != "fsdp"]  # which is -1 by default, so not the line to point at
        require(
            *(
                (size == -1 or size > 0, f"{axis}: {size} must be positive, or -1 for the rest")
                for axis, size in sizes.items()
            ),
            (
                len(automatic) <= 1,
                f"{''.join(chosen[:1])}: {' and '.join(automatic)} are both -1; only one axis can take the rest",
            ),
            (
                num_cpu_devices is None or num_cpu_devices > 0,
                f"num_cpu_devices: {num_cpu_devices} must be positive or unset",
            ),
        )

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
class DistributedConfig:
    """Several processes (hosts) in one run, joined by jax.distributed."""

    enabled: bool = False
    """Join the other processes; under Slurm and Open MPI the addresses below are found by themselves."""
    coordinator_address: str | None = None
    """`host:port` of process 0; unset: found from the launcher's environment."""
    num_processes: int | None = None
    """Processes in the run; unset: LLAMAJAX_NUM_PROCESSES, else found from the launcher's environment."""
    process_id: int | None = None
    """Rank of this process; unset: LLAMAJAX_PROCESS_ID, else found from the launcher's environment."""
    heartbeat_timeout_s: int = 30
    """Seconds without a sign of life after which a process counts as lost."""
    initialization_timeout_s: int = 300
    """Seconds to wait for all processes at the start."""

    def __post_init__(self) -> None:
        require(
            (self.heartbeat_timeout_s > 0, f"heartbeat_timeout_s: {self.heartbeat_timeout_s} must be positive"),
            (
                self.initialization_timeout_s > 0,
                f"initialization_timeout_s: {self.initialization_timeout_s} must be positive",
            ),
            (
                self.num_processes is None or self.num_processes > 0,
                f"num_processes: {self.num_processes} must be positive or unset",
            ),
            (
                self.process_id is None or self.process_id >= 0,
                f"process_id: {self.process_id} must not be negative",
            ),
            (
                self.process_id is None or self.num_processes is None or self.process_id < self.num_processes,
                f"process_id: {self.process_id} must be below num_processes={self.num_processes}",
            ),
            *(
                (
                    self.enabled or getattr(self, name) is None,
                    f"{name}: has no effect unless enabled is true; set it, or remove this",
                )
                for name in ("coordinator_address", "num_processes", "process_id")
            ),
        )
