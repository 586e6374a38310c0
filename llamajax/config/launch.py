"""Settings of `python -m llamajax.launch`."""

from collections.abc import Iterator
from dataclasses import dataclass

from llamajax.config.rules import NonNegativeInt, PositiveFloat, PositiveIntOrUnset, Section


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Section):
    """The processes of one host, started together, ended together, and started again when that can help."""

    module: str = "llamajax.train"
    """What every process runs, as `python -m` does: `llamajax.train`, `llamajax.evaluate`, `llamajax.generate`, or a program
    of your own that takes the options of `llamajax.train`."""
    num_processes: PositiveIntOrUnset = None
    """Processes on this host, the same number on every host; its GPUs are divided among them. Unset: one per GPU, or one
    where there is none and where the CPU emulates devices (`mesh.num_cpu_devices`, for each process)."""
    interface: str | None = None
    """The network interface, such as eth0, on which process 0 listens for the others, and NCCL unless NCCL_SOCKET_IFNAME
    says otherwise. Unset: the one that has the address of the coordinator; with one host loopback, which other machines do
    not reach."""
    max_restarts: NonNegativeInt = 3
    """Restarts of a training run in a row without a new checkpoint in between; then the exit code is 93. Only where they can
    help: after exit codes 69, 74 and 75, and after signals that nobody sent to the launcher. 0: never, exit codes are passed
    on."""
    stopped_code: NonNegativeInt = 0
    """Exit code of a training run that was stopped by a signal, and saved, before its last step. A cluster that takes 0 for
    done, as Kubernetes does, needs another one to start it again: 75."""
    backoff_s: PositiveFloat = 1.0
    """Seconds before the first restart in a row; twice as many before each further one."""
    max_backoff_s: PositiveFloat = 60.0
    """Seconds before a restart at most."""

    def broken_rules(self) -> Iterator[str]:
        if not all(part.isidentifier() for part in self.module.split(".")):
            yield f"module: {self.module!r} is no name of a module; write it as for python -m, such as llamajax.train"
        if self.interface == "":
            yield "interface: must not be empty; name one, such as eth0, or remove it"
        if self.max_backoff_s < self.backoff_s:
            yield f"max_backoff_s: {self.max_backoff_s} must not be below backoff_s={self.backoff_s}; raise it"
