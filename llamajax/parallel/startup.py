"""The start of a process: settings for jax, the connection to the other processes, and the mesh."""

import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
import jaxlib.version
from jax.sharding import Mesh

from llamajax.config.file import config_to_dict, dotted
from llamajax.config.parallel import DistributedConfig, MeshConfig
from llamajax.config.run import Config
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.estimates import gpu_memory_budget
from llamajax.estimates.gpu_memory_budget import MEMORY_FRACTION
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.stage_meshes import CPU_ADDRESS
from llamajax.processes import addresses, domains, heartbeat, peers, rendezvous
from llamajax.processes.relay import relay

# Emulated devices share the machine's cores, so a collective may have to wait for seconds until every device's thread has
# had its turn; XLA's limits of seconds would abort the process.
_CPU_COLLECTIVE_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
)

_JAX_NOTICES_S = 7 * 86_400  # heartbeat timeout of jax, long because a job may be suspended

GLOO = "make_gloo_tcp_collectives"
"""The function that jax calls to connect processes on CPUs; a jax without it is left unchanged."""


def select_platform(config: MeshConfig, *, or_more: bool = False) -> None:
    """Selects the CPU with `config.num_cpu_devices` emulated devices, if set; call it before any other use of jax.

    Args:
        config: the mesh.
        or_more: a jax that already runs may have more of them.

    Raises:
        EnvironmentMismatchError: jax already runs with another platform or device count.
    """
    if config.num_cpu_devices is None:
        return
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags += [flag for flag in _CPU_COLLECTIVE_FLAGS if not any(f.startswith(flag.split("=")[0]) for f in flags)]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    # A program over all devices needs a thread for each of them at once, and jaxlib before 0.12 lends the same threads to
    # launches that wait for their turn (at most 32 are in flight): with one thread per device both wait forever.
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 2 * config.num_cpu_devices)))
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.num_cpu_devices)
    except RuntimeError as error:
        number = jax.local_device_count()
        suffices = number >= config.num_cpu_devices if or_more else number == config.num_cpu_devices
        if jax.default_backend() != "cpu" or not suffices:
            raise EnvironmentMismatchError(
                f"mesh.num_cpu_devices: {config.num_cpu_devices} emulated devices are requested, but jax already runs with"
                f" {jax.local_device_count()} {jax.default_backend()} device(s); start a new process"
            ) from error


def join_run(config: DistributedConfig, settings: Mapping[str, Any] | None = None, *, between_cpus: bool = False) -> None:
    """Connects this process to the others of the run, if `config.enabled`; call it before any other use of jax.

    Args:
        config: addresses of the processes.
        settings: settings that must be the same in all processes.
        between_cpus: emulated devices of one process send arrays to another's.

    Raises:
        EnvironmentMismatchError: the others cannot be found or do not arrive, have other settings, or the port cannot be
            used.
    """
    if not config.enabled or jax.distributed.is_initialized():
        return
    address, num_processes, own_rank, local_device_ids = rendezvous.find(config)
    host, port = addresses.host_and_port(address)
    bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "")
    if own_rank == 0 and not bind_address:
        bind_address = addresses.bind_address_for(host, port)
    if num_processes > 1:
        call = rendezvous.receive_all if own_rank == 0 else rendezvous.call_on_first
        links = call(address, bind_address, num_processes, own_rank, config.initialization_timeout_s)
        peers.meet(own_rank, links, config.heartbeat_timeout_s)
        peers.check_same_everywhere(settings or {})
    if addresses.is_loopback(host):
        listen_on_loopback()
    if between_cpus and num_processes > 1:
        send_between_cpus(addresses.own_address(host, port))
    coordinator = (host, port)
    if own_rank == 0:
        coordinator = addresses.host_and_port(bind_address)
        if coordinator[0] in ("::", "0.0.0.0"):
            coordinator = (addresses.LOOPBACK, coordinator[1])
    # We handle SIGTERM (llamajax.training.stop) and detect lost processes ourselves; jax's own timeout aborts.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=relay(coordinator),
            num_processes=num_processes,
            process_id=own_rank,
            local_device_ids=local_device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=bind_address or None,
            heartbeat_timeout_seconds=_JAX_NOTICES_S,
            initialization_timeout=config.initialization_timeout_s,
        )
    except (ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EnvironmentMismatchError(
            f"distributed: cannot join the other processes: {reason}; start all processes again"
        ) from error


def listen_on_loopback() -> None:
    """Makes the libraries that move data between processes listen only on this machine, because all processes run here.

    By default gloo, for CPUs, listens on the address of the host's name, and NCCL on the first other interface.
    """
    library = getattr(jaxlib, "_jax", None)  # gloo's address has no public setting
    if (make := getattr(library, GLOO, None)) is not None:
        setattr(library, GLOO, functools.partial(make, hostname="127.0.0.1"))
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def send_between_cpus(host: str) -> None:
    """Lets devices of this process, which the CPU emulates, send arrays to another's and receive them at this address.

    jax needs a given port here: with port 0, the others never find it. The watchdog limits the wait, not jax.
    """
    jax.config.update(CPU_ADDRESS, addresses.join(host, addresses.free_port(host)))
    jax.config.update("jax_cross_host_transport_addresses", addresses.join(host, 0))
    jax.config.update("jax_cross_host_transfer_timeout_seconds", _JAX_NOTICES_S)


def connect(
    config: MeshConfig,
    distributed: DistributedConfig,
    *,
    memory_fraction: float = MEMORY_FRACTION,
    settings: Mapping[str, Any] | None = None,
    or_more: bool = False,
) -> None:
    """Starts jax with its devices and the other processes; call it before any other use of jax.

    Args:
        config: the mesh.
        distributed: the other processes.
        memory_fraction: share of a GPU's memory that jax takes for arrays, unless the environment says otherwise; the rest
            is for CUDA, its libraries and NCCL.
        settings: settings that must be the same in all processes.
        or_more: see `select_platform`.

    Raises:
        EnvironmentMismatchError: the machine does not match the configuration, or processes have other settings.
    """
    os.environ.setdefault(gpu_memory_budget.VARIABLE, str(memory_fraction))
    select_platform(config, or_more=or_more)
    join_run(distributed, settings, between_cpus=bool(config.stages) and config.num_cpu_devices is not None)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # with a missing plugin, jax fails an assertion
        reason = str(error).strip().splitlines() or ["no device started"]
        raise EnvironmentMismatchError(
            f"jax cannot start its devices: {reason[0]}; check the driver and JAX_PLATFORMS, or set mesh.num_cpu_devices"
        ) from error
    heartbeat.of_this_process()  # a program without a watchdog counts as alive from here on, without a limit


def start(config: Config) -> Mesh:
    """Starts jax for `config` and makes its mesh the current one for the whole process: `begin`, then `lay_out`.

    Raises:
        ConfigError: the model or batch cannot be divided over the mesh.
        EnvironmentMismatchError: the machine does not match the configuration, or processes have other settings.
    """
    begin(config)
    return lay_out(config)


def begin(config: Config) -> None:
    """Starts jax for the processes of `config`, with its devices and the NCCL settings of this host's domain.

    Raises:
        EnvironmentMismatchError: the machine does not match the configuration, or processes have other settings.
    """
    os.environ.update(domains.nccl_settings(config.hardware, os.environ))
    own = ("distributed.", "data.cache_dir")  # may differ between processes
    settings = {key: value for key, value in dotted(config_to_dict(config)).items() if not key.startswith(own)}
    connect(
        config.mesh,
        config.distributed,
        memory_fraction=gpu_memory_budget.memory_fraction(config),
        settings=settings | (_installed() if config.distributed.enabled else {}),
    )


def _installed() -> dict[str, str]:
    """Returns the versions of the code on this host, which must be the same on all hosts."""
    root, code = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        code.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}
    return {"llamajax (its code)": code.hexdigest(), **versions}


def lay_out(config: Config) -> Mesh:
    """Makes the mesh of `config` the current one for the whole process; all processes call this together.

    Raises:
        ConfigError: the model or batch cannot be divided over it.
        EnvironmentMismatchError: a process is in no domain, or a domain's devices are not a whole number of stages.
    """
    mesh = make_mesh(config.mesh, domains=domains.domains_of_processes(config.hardware))
    if problems := config.undivided(mesh.shape):
        raise ConfigError("\n".join(problems))
    jax.set_mesh(mesh)
    return mesh
