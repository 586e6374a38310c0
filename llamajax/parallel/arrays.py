"""Trees of arrays: the name of every leaf, and its sharding on the mesh."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import P
from jax.sharding import AbstractMesh, NamedSharding

from llamajax.parallel.host_memory import KIND

Tree = TypeVar("Tree")


def concretise(abstract_state: Tree, on_host: Sequence[bool] | None = None) -> Tree:
    """Returns `abstract_state` with shardings on the current mesh, ready to restore arrays into.

    `jax.eval_shape` under `jax.set_mesh` returns partitions without devices, and scalars without any sharding: partitions
    are placed on the mesh, all other leaves are replicated. Leaves that already name devices stay.

    Args:
        abstract_state: a tree of `jax.ShapeDtypeStruct`.
        on_host: for each leaf whether it is in host memory; None: none of them is.
    """
    mesh = jax.sharding.get_mesh()

    def leaf(array: jax.ShapeDtypeStruct, away: bool) -> jax.ShapeDtypeStruct:
        sharding = array.sharding
        away = away or (sharding is not None and sharding.memory_kind == KIND)
        kind = KIND if away else None
        if sharding is None:
            sharding = NamedSharding(mesh, P())
        elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            placed = NamedSharding(mesh, sharding.spec, memory_kind=kind)
            # Devices that are only described have no memories: an abstract mesh keeps the kind.
            kept = placed.memory_kind == kind or not away
            sharding = placed if kept else NamedSharding(mesh.abstract_mesh, sharding.spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    leaves, tree = jax.tree.flatten(abstract_state)
    return jax.tree.unflatten(tree, map(leaf, leaves, on_host or [False] * len(leaves)))


def named_arrays(state: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns the leaves by their path in the tree, such as `model.layers.up`, in the order of `jax.tree.leaves`."""
    paths, _ = jax.tree.flatten_with_path(state, is_leaf=is_leaf)
    # An nnx.Param is a node with one leaf `value`; the name `value` adds nothing.
    named = {jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in paths}
    assert len(named) == len(paths), "two leaves have the same name"
    return named


def after(x: jax.Array, others: Any) -> jax.Array:
    """Returns `x`, available only after `others`. Zeros depend on nothing, so without this XLA may create the zeros that a
    micro-batch starts with while the previous one still needs the memory."""
    return jax.lax.optimization_barrier((x, others))[0]
