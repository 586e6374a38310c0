"""Trees of arrays: the name of every leaf, and its sharding on the mesh."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import AbstractMesh, NamedSharding
from jaxtyping import Array, UInt32

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
    # An nnx.Param is a node with one child `value`; the name `value` adds nothing.
    keys = (f"{jax.tree_util.keystr(path, simple=True, separator='.')}." for path, _ in paths)
    named = {key.replace(".value.", ".")[:-1]: leaf for key, (_, leaf) in zip(keys, paths, strict=True)}
    assert len(named) == len(paths), "two leaves have the same name"
    return named


def after(x: jax.Array, others: Any) -> jax.Array:
    """Returns `x`, available only after `others`. Zeros depend on nothing, so without this XLA may create the zeros that a
    micro-batch starts with while the previous one still needs the memory."""
    return jax.lax.optimization_barrier((x, others))[0]


def mixed(words: UInt32[Array, "..."], place: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns words that depend on every bit of both; for one place it is a bijection."""
    # Positions an odd number apart, then the last steps of MurmurHash3, which spread every bit (Appleby, 2011, public
    # domain).
    mixed = words ^ (place * jnp.uint32(0x9E3779B1))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> 16)
