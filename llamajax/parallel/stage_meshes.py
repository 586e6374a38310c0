"""Stages of a pipeline as separate meshes, for stages that run their own programs.

The mesh of a stage has the axes of the whole mesh, with one device along `pipeline`. An array on the whole mesh shares
memory with its parts on the stages' meshes: nothing is copied from one to the other. Along `pipeline` the whole array is
split, or is the same on all stages, or is left to be summed.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import P
from jax.sharding import Mesh, NamedSharding

from llamajax.errors import EnvironmentMismatchError
from llamajax.parallel.sharding import as_tuple
from llamajax.parallel.stages import STAGE

CPU_ADDRESS = "jax_cross_host_transfer_socket_address"
"""Setting of jax: address at which the emulated devices of a process receive arrays of other processes."""


def stage_meshes(mesh: Mesh) -> list[Mesh]:
    """Returns the mesh of each stage."""
    assert mesh.axis_names[0] == STAGE
    return [Mesh(devices[None], mesh.axis_names, axis_types=mesh.axis_types) for devices in mesh.devices]


def is_here(mesh: Mesh) -> bool:
    """Returns whether this process has devices of the mesh."""
    return jax.process_index() in _processes(mesh)


def check_transfers(meshes: Sequence[Mesh]) -> None:
    """Refuses stages between which jax cannot send arrays.

    Raises:
        EnvironmentMismatchError: neighbours share a process, but have others too; or jax has started without connections
            between CPUs.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu" and not jax.config.values[CPU_ADDRESS]:
        raise EnvironmentMismatchError(
            "mesh.stages: jax already runs in this process, without connections between the CPUs of several processes;"
            " start new processes"
        )
    for stage, (one, other) in enumerate(itertools.pairwise(map(_processes, meshes))):
        if one & other and len(one | other) > 1:
            raise EnvironmentMismatchError(
                f"mesh.stages: stages {stage} and {stage + 1} share some of their processes, and jax sends arrays either"
                " within one process or between different ones; start a number of processes that gives each process whole"
                " stages, or each stage whole processes"
            )


def on_stage(x: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array on a stage's mesh: a part of one on the whole mesh, or as on another stage's."""
    assert isinstance(x.sharding, NamedSharding)
    lies, parts = x.sharding.spec, x.sharding.mesh.shape[STAGE] // mesh.shape[STAGE]
    entries = [*map(as_tuple, lies.partitions), *[()] * (len(x.shape) - len(lies.partitions))]
    shape = [size // parts if STAGE in entry else size for size, entry in zip(x.shape, entries, strict=True)]
    # Nothing is summed over a single device, and jax has no such type.
    lies = P(*lies.partitions) if mesh.size == 1 else lies
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=NamedSharding(mesh, lies))


def split_by_stage(tree: Any, meshes: Sequence[Mesh]) -> list[Any]:
    """Returns the parts of arrays on the whole mesh, one tree for each stage."""

    def parts(x: jax.Array) -> list[jax.Array]:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        here = {shard.device: shard.data for shard in x.addressable_shards}
        return [_made_of(on_stage(like, mesh), here) for mesh in meshes]

    leaves, structure = jax.tree.flatten(tree)
    by_leaf = [parts(x) for x in leaves]
    return [structure.unflatten([own[stage] for own in by_leaf]) for stage in range(len(meshes))]


def join_stages(trees: Sequence[Any], like: Any) -> Any:
    """Reverts `split_by_stage`; `like` has the shapes and shardings of the whole arrays."""

    def whole(like: jax.ShapeDtypeStruct, *parts: jax.Array) -> jax.Array:
        return _made_of(like, {shard.device: shard.data for part in parts for shard in part.addressable_shards})

    return jax.tree.map(whole, like, *trees)


def absent(like: Any) -> Any:
    """Returns arrays on the mesh of a stage that has no device in this process."""
    return jax.tree.map(lambda x: _made_of(x, {}), like)


def send(tree: Any, source: Mesh, target: Mesh) -> Any:
    """Sends arrays from a stage's mesh to another's.

    All processes call this for all transfers, in the same order: jax counts those between processes, in every process.
    """
    if _processes(source) == _processes(target) and not is_here(target):
        return absent(jax.tree.map(lambda x: on_stage(_like(x), target), tree))
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(target, x.sharding.spec)), tree)


def _processes(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.reshape(-1)}


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _made_of(like: jax.ShapeDtypeStruct, here: dict[Any, jax.Array]) -> jax.Array:
    """Returns the array of which this process has these parts, by device."""
    assert isinstance(like.sharding, NamedSharding)
    own = [here[device] for device in np.asarray(like.sharding.mesh.devices).reshape(-1) if device in here]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, own, dtype=like.dtype)
