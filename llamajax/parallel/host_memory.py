"""Arrays in pinned host memory: moving them, and passing over a stack of them layer by layer.

GPUs compute on the card only. A program that computes with a whole stack from host memory would need room for it there.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax._src.lax import lax as lax_internals  # for `empty_like`, which works without it

Tree = TypeVar("Tree")
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
KIND = "pinned_host"
"""Name of the memory in shardings."""


def is_on_host(x: jax.Array) -> bool:
    """Returns whether an array is in host memory; within a traced function, whether its type says so."""
    return jax.typeof(x).memory_space == HOST


def moved(tree: Tree, space: Any) -> Tree:
    """Returns the arrays of a tree in `HOST` or `DEVICE` memory, within a traced function."""
    return jax.tree.map(lambda x: x if jax.typeof(x).memory_space == space else jax.device_put(x, space), tree)


def empty_like(x: jax.Array, lies: jax.P) -> jax.Array:
    """Returns an array in host memory with the shape and dtype of `x`, and any contents: write each part before it is
    read. XLA allocates even zeros there without writing them, if parts are written later."""
    number = moved(jnp.zeros((), x.dtype), HOST)
    if (empty := getattr(lax_internals, "empty2", None)) is not None:
        number = empty(x.dtype, memory_space=HOST)  # as for a loop's results; of zeros, XLA would warn that it writes them
    return jax.lax.broadcast(number, x.shape, out_sharding=lies)


def by_layer(run: Callable[[jax.Array], Tree], stacked: jax.Array) -> Tree:
    """Returns the stacked results of `run` for each layer of a stack, brought to the card one by one; within a traced
    function."""

    def step(index: jax.Array, _: None) -> tuple[jax.Array, Tree]:
        own = jax.lax.dynamic_index_in_dim(stacked, index, keepdims=False)
        return index + 1, run(moved(own, DEVICE))

    return jax.lax.scan(step, jnp.int32(0), None, length=stacked.shape[0])[1]


def added(so_far: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the sum of two arrays in the dtype of the first, and in its memory: layer by layer in that of the host."""
    if not is_on_host(so_far):
        return (so_far + x).astype(so_far.dtype)

    def add(index: jax.Array, so_far: jax.Array) -> jax.Array:
        own, other = (moved(jax.lax.dynamic_index_in_dim(y, index, keepdims=False), DEVICE) for y in (so_far, x))
        return jax.lax.dynamic_update_index_in_dim(so_far, moved((own + other).astype(so_far.dtype), HOST), index, 0)

    return jax.lax.fori_loop(0, so_far.shape[0], add, so_far)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns an array in another dtype, in the memory where it is."""
    if x.dtype == dtype or not is_on_host(x):
        return x.astype(dtype)
    if x.ndim < 3:
        return moved(moved(x, DEVICE).astype(dtype), HOST)
    return by_layer(lambda own: moved(own.astype(dtype), HOST), x)


def total(run: Callable[[jax.Array, Any], jax.Array], x: jax.Array) -> jax.Array:
    """Returns the sum of `run(part, first)` over the parts of an array, where `first` is the number of elements before each:
    the whole array at once, or, for a stack in host memory, one layer after the other; within a traced function."""
    if not is_on_host(x) or x.ndim < 3:
        return run(moved(x, DEVICE), 0)
    size = x.size // x.shape[0]

    def add(index: jax.Array, so_far: jax.Array) -> jax.Array:
        own = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
        return so_far + run(moved(own, DEVICE), index * size)

    like = jax.eval_shape(lambda: run(moved(x[0], DEVICE), jnp.int32(0)))
    return jax.lax.fori_loop(0, x.shape[0], add, jnp.zeros(like.shape, like.dtype))
