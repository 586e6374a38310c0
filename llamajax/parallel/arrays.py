"""Trees of arrays: the name of every leaf, and its place on the mesh."""

from typing import Any, TypeVar

import jax
from jax import P
from jax.sharding import AbstractMesh, NamedSharding

Tree = TypeVar("Tree")


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


def after(x: jax.Array, others: Any) -> jax.Array:
    """`x`, which is not there before `others` are. Zeros depend on nothing, so that XLA may make those that a micro-batch
    begins with while the one before needs the memory."""
    return jax.lax.optimization_barrier((x, others))[0]
