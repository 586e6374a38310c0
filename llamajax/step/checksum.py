"""Checksums of the bits that every device holds, and the devices with wrong bits.

Every update of an array that several devices hold comes from one reduction, with the same bits for all of them. So their
copies stay equal, bit for bit, unless memory, a link or a compute unit silently changes one of them.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jaxtyping import Array, Shaped, UInt32

from llamajax.parallel.arrays import mixed, named_arrays
from llamajax.parallel.host_memory import total
from llamajax.parallel.sharding import axes_in


def holders(array: Any) -> np.ndarray:
    """Returns mesh positions, numbered consecutively, as int [parts, replicas]: the devices of a row hold the same part of
    `array`.

    Args:
        array: an array or `jax.ShapeDtypeStruct` on a mesh.
    """
    mesh, split = array.sharding.mesh, axes_in(array.sharding.spec)
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    split_first = sorted(range(places.ndim), key=lambda dim: mesh.axis_names[dim] not in split)
    num_replicas = mesh.size // math.prod(mesh.shape[axis] for axis in split)
    return places.transpose(split_first).reshape(-1, num_replicas)


def replicated(state: Any) -> dict[str, Any]:
    """Returns the arrays of `state` with several holders of every part, by name."""
    return {name: array for name, array in named_arrays(state).items() if holders(array).shape[1] > 1}


def held_bytes(arrays: Any) -> int:
    """Returns the bytes that one device holds of a tree of arrays."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


@jax.jit
def checksums(arrays: Sequence[jax.Array]) -> UInt32[Array, "devices arrays"]:
    """Returns the checksum of each device's part of every array, in the order of `arrays`, on all devices.

    Every byte is read once, and nothing is copied or changed.
    """
    words = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays]
    lie = [jax.typeof(x).sharding.spec for x in words]
    mesh = jax.sharding.get_abstract_mesh()

    def on_device(own: list[jax.Array]) -> jax.Array:
        return jax.lax.all_gather(jnp.stack([total(_checksum, x) for x in own]), mesh.axis_names)

    # Not checked for equality across devices: equality is the question.
    return jax.shard_map(on_device, in_specs=(lie,), out_specs=P(), check_vma=False)(words)


def fingerprint(tree: Any, form: Callable[[Any], Any] = lambda tree: tree) -> str:
    """Returns a hash of names, types, shapes and bits of all arrays; the same on every mesh. All processes call this
    together.

    Args:
        tree: the arrays.
        form: brings them into the form of which the hash is; its result never exists as a whole.
    """
    arrays = named_arrays(jax.eval_shape(form, tree))
    sums = np.asarray(_sums(tree, form))
    about = [[name, x.dtype.name, list(x.shape), int(total)] for (name, x), total in zip(arrays.items(), sums, strict=True)]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


@partial(jax.jit, static_argnames="form")
def _sums(tree: Any, form: Callable[[Any], Any]) -> UInt32[Array, "arrays"]:
    """Returns a checksum of every whole array, see `_checksum`."""

    def of_whole(x: jax.Array) -> jax.Array:
        place = jnp.zeros(x.shape, jnp.uint32, out_sharding=jax.typeof(x).sharding.spec)
        for dim, size in enumerate(x.shape):
            lies = P(jax.typeof(x).sharding.spec[dim])
            index = jax.reshard(jnp.arange(size, dtype=jnp.uint32), lies)
            place = place * jnp.uint32(size) + jnp.expand_dims(index, [other for other in range(x.ndim) if other != dim])
        return jnp.sum(mixed(_words(x), place), dtype=jnp.uint32)

    return jnp.stack([of_whole(x) for x in jax.tree.leaves(form(tree))])


def differing(table: np.ndarray, held_by: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """Returns for each array the positions of the devices with other contents than most holders of the same part. Where no
    checksum has a majority, as with two differing holders, it returns all holders. Arrays that are equal everywhere are left
    out.

    Args:
        table: result of `checksums`, uint32 [devices, arrays].
        held_by: `holders` of each of its arrays, by name.
    """
    found: dict[str, list[int]] = {}
    for column, (name, places) in zip(table.T, held_by.items(), strict=True):
        sums = column[places]
        differ = (sums != sums[:, :1]).any(axis=1)
        for own, holding in zip(sums[differ], places[differ], strict=True):
            values, counts = np.unique(own, return_counts=True)
            most = 2 * counts.max() > len(own)
            found.setdefault(name, []).extend(holding[own != values[counts.argmax()]] if most else holding)
    return {name: sorted(map(int, places)) for name, places in found.items()}


def _checksum(x: Shaped[Array, "..."], first: jax.Array | int) -> UInt32[Array, ""]:
    """Returns the sum, modulo 2^32, of a function of each word's bits and position; `first` is the position of the first.

    At every position the function is a bijection of 32 bits: a word that changes, in one bit or in all, changes its term,
    and therefore the sum, for certain. Words that change places, or several that change at once, go unnoticed once in 2^32
    times.
    """
    words = _words(x).reshape(-1)
    place = jnp.uint32(first) + jax.lax.iota(jnp.uint32, words.size)
    return jnp.sum(mixed(words, place), dtype=jnp.uint32)


def _words(x: Shaped[Array, "*dims"]) -> UInt32[Array, "*dims"]:
    """Returns the bits of each number as a word."""
    assert x.dtype.itemsize <= 4
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return (x if x.dtype == jnp.bool else jax.lax.bitcast_convert_type(x, unsigned)).astype(jnp.uint32)
