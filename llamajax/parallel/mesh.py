"""The device mesh: axis names, emulated CPU devices, and what jax is told before it starts."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax import P
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from llamajax.config.file import config_to_dict
from llamajax.config.keys import dotted
from llamajax.config.parallel import AXES, DistributedConfig, MeshConfig
from llamajax.config.run import Config
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.parallel import allowance, processes
from llamajax.parallel.allowance import MEMORY_FRACTION

# Emulated devices share the machine's cores, so a collective may have to wait for seconds until every
# device's thread has had its turn; XLA's limits of seconds would end the process.
_CPU_COLLECTIVE_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
)

Tree = TypeVar("Tree")

_DRIVER = Path("/proc/driver/nvidia")


def _is_news(record: logging.LogRecord) -> bool:
    return _DRIVER.exists() or not (record.exc_info and "plugin" in record.getMessage())


# jax's plugin for GPUs, which plans compile with on any machine, tells with a stack that this one has none.
logging.getLogger("jax._src.xla_bridge").addFilter(_is_news)


def select_platform(config: MeshConfig) -> None:
    """Chooses the CPU with `config.num_cpu_devices` emulated devices, if set; before any other use of jax.

    Raises:
        EnvironmentMismatchError: jax already runs with another platform or device count.
    """
    if config.num_cpu_devices is None:
        return
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags += [flag for flag in _CPU_COLLECTIVE_FLAGS if not any(f.startswith(flag.split("=")[0]) for f in flags)]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    # A program over all devices needs a thread for each of them at once, and jaxlib before 0.12 lends the same threads to
    # launches that wait for their turn (32 are in flight at most): with one thread per device both wait forever.
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 2 * config.num_cpu_devices)))
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.num_cpu_devices)
    except RuntimeError as error:
        if jax.default_backend() != "cpu" or jax.local_device_count() != config.num_cpu_devices:
            raise EnvironmentMismatchError(
                f"mesh.num_cpu_devices: {config.num_cpu_devices} emulated devices are asked for, but jax already runs with"
                f" {jax.local_device_count()} {jax.default_backend()} device(s); start a new process"
            ) from error


def connect(config: MeshConfig, distributed: DistributedConfig, *, memory_fraction: float = MEMORY_FRACTION) -> None:
    """Brings up jax with its devices and the other processes; before any other use of jax.

    Args:
        config: the mesh.
        distributed: the other processes.
        memory_fraction: share of a GPU's memory that jax takes for arrays, unless the environment says otherwise; the rest
            is for CUDA, its libraries and NCCL.

    Raises:
        EnvironmentMismatchError: the machine is not what the configuration asks for.
    """
    os.environ.setdefault(allowance.VARIABLE, str(memory_fraction))
    select_platform(config)
    processes.join_run(distributed)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # a missing plugin ends in an assertion of jax's
        reason = str(error).strip().splitlines() or ["no device could be started"]
        raise EnvironmentMismatchError(
            f"jax cannot start its devices: {reason[0]}; check the driver and JAX_PLATFORMS, or set mesh.num_cpu_devices"
        ) from error


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over all devices of all processes, or over `devices`; every axis Explicit.

    Raises:
        ConfigError: the axis sizes do not multiply to the number of devices.
    """
    # Not jax.make_mesh: it refuses GPUs of several nodes, each of which XLA takes for a slice of its own. Node after
    # node in the order of the ids, so that the inner axes stay within a node.
    ordered = sorted(jax.devices() if devices is None else devices, key=lambda d: (getattr(d, "slice_index", 0), d.id))
    shape = tuple(config.axis_sizes(len(ordered)).values())
    return Mesh(np.array(ordered).reshape(shape), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def start(config: Config) -> Mesh:
    """Brings up jax for `config` and makes its mesh the current one for the whole process.

    Raises:
        ConfigError: the model or batch cannot be divided over the mesh.
        EnvironmentMismatchError: the machine is not what the configuration asks for, or processes have other settings.
    """
    connect(config.mesh, config.distributed, memory_fraction=allowance.memory_fraction(config))
    settings = dotted(config_to_dict(config))
    own = ("distributed.", "data.cache_dir")  # of each process
    processes.check_same_everywhere({key: value for key, value in settings.items() if not key.startswith(own)})
    mesh = make_mesh(config.mesh)
    if problems := config.placement_problems(mesh.size):
        raise ConfigError("\n".join(problems))
    jax.set_mesh(mesh)
    return mesh


def concretise(abstract_state: Tree) -> Tree:
    """`abstract_state` on the current mesh, as arrays can be restored onto it.

    `jax.eval_shape` under `jax.set_mesh` knows partitions but no devices, and gives scalars no sharding at all:
    partitions are laid over the mesh, the rest is replicated. Leaves that already name devices stay.
    """
    mesh = jax.sharding.get_mesh()

    def leaf(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = array.sharding
        if sharding is None:
            sharding = NamedSharding(mesh, P())
        elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            sharding = NamedSharding(mesh, sharding.spec)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(leaf, abstract_state)


def named_arrays(state: Any) -> dict[str, Any]:
    """The leaves by their path in the tree, `model.layers.up`; the order is that of `jax.tree.leaves`."""
    paths, _ = jax.tree.flatten_with_path(state)
    # An nnx.Param is a node with the one leaf `value`, which says nothing.
    named = {jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in paths}
    assert len(named) == len(paths), "two leaves have one name"
    return named
