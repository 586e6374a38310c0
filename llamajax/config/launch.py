"""Settings of `python -m llamajax.launch`."""

from collections.abc import Iterator
from dataclasses import dataclass

from llamajax.config.rules import NonNegativeInt, PositiveFloat, PositiveIntOrUnset, Section


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Section):
    """Processes of one host, which start together, end together, and restart when that can help."""

    module: str = "llamajax.train"
    """Module that every process runs, as `python -m` does: `llamajax.train`, `llamajax.evaluate`, `llamajax.generate`, or
    your own program with the options of `llamajax.train`."""
    num_processes: PositiveIntOrUnset = None
    """Processes on this host, the same number on every host; they share its GPUs equally. Unset: one per GPU; one where no
    GPU exists or the CPU emulates devices (`mesh.num_cpu_devices`, for each process)."""
    interface: str | None = None
    """Network interface, such as eth0, on which process 0 listens for the others, and which NCCL uses unless
    NCCL_SOCKET_IFNAME names another. Unset: the interface with the coordinator's address; with one host, loopback, which
    other machines cannot reach."""
    max_restarts: NonNegativeInt = 3
    """Maximum number of restarts of a training run in a row without a new checkpoint in between; one more failure ends with
    exit code 93. The launcher restarts only where it can help: after exit codes 69, 74 and 75, and after signals that nobody
    sent to the launcher. 0: never; exit codes are passed on."""
    stopped_code: NonNegativeInt = 0
    """Exit code of a training run that a signal stopped, after a save, before its last step. A cluster that reads 0 as
    finished, as Kubernetes does, needs another code to restart the run: 75."""
    backoff_s: PositiveFloat = 1.0
    """Seconds before the first restart in a row; the delay doubles before each further one."""
    max_backoff_s: PositiveFloat = 60.0
    """Maximum number of seconds before a restart."""

    def broken_rules(self) -> Iterator[str]:
        if not all(part.isidentifier() for part in self.module.split(".")):
            yield f"module: {self.module!r} is not the name of a module; write it as for python -m, such as llamajax.train"
        if self.interface == "":
            yield "interface: must not be empty; name one, such as eth0, or remove it"
        if self.max_backoff_s < self.backoff_s:
            yield f"max_backoff_s: {self.max_backoff_s} must not be below backoff_s={self.backoff_s}; raise it"
