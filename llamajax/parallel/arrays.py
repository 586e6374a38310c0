"""Trees of arrays: the name of every leaf, and its sharding on the mesh."""

from typing import Any, TypeVar

import jax
from jax import P
from jax.sharding import AbstractMesh, NamedSharding

Tree = TypeVar("Tree")


def concretise(abstract_state: Tree) -> Tree:
    """Returns `abstract_state` with shardings on the current mesh, ready to restore arrays into.

    `jax.eval_shape` under `jax.set_mesh` returns partitions without devices, and scalars without any sharding: partitions
    are placed on the mesh, all other leaves are replicated. Leaves that already name devices stay.
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
    """Returns the leaves by their path in the tree, such as `model.layers.up`, in the order of `jax.tree.leaves`."""
    paths, _ = jax.tree.flatten_with_path(state)
    # An nnx.Param is a node with one leaf `value`; the name `value` adds nothing.
    named = {jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in paths}
    assert len(named) == len(paths), "two leaves have the same name"
    return named


def after(x: jax.Array, others: Any) -> jax.Array:
    """Returns `x`, available only after `others`. Zeros depend on nothing, so without this XLA may create the zeros that a
    micro-batch starts with while the previous one still needs the memory."""
    return jax.lax.optimization_barrier((x, others))[0]
