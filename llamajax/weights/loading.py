"""Reads the weights of a pretrained model onto the mesh."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P
from jax.sharding import NamedSharding

from llamajax.checkpoint.read import read_weights
from llamajax.config.model import DType, ModelConfig
from llamajax.errors import CheckpointError
from llamajax.model import Llama
from llamajax.parallel.arrays import concretise, named_arrays
from llamajax.parallel.host_memory import KIND, moved, total
from llamajax.weights import names
from llamajax.weights.pretrained import Pretrained
from llamajax.weights.safetensors import Stored

Index = tuple[slice, ...]


def load_model(
    pretrained: Pretrained, config: ModelConfig, abstract: Llama | None = None, *, adapters_dtype: DType = "float32"
) -> Llama:
    """Returns the model on the current mesh, in `config.param_dtype`, with its adapters if it has some. Processes call this
    together.

    Besides arrays that wait in its memory, the host holds at most the part of one layer's largest array, or of a vocabulary
    table, that this process's devices need.

    Args:
        pretrained: the location of the weights.
        config: configuration of the model; settings that do not shape weights may differ, see `Pretrained.check`.
        abstract: its weights, without adapters, as `jax.ShapeDtypeStruct`, with the type and memory of each; None: all of
            them on the devices.
        adapters_dtype: type of the adapters; these are few numbers, and small ones.

    Raises:
        CheckpointError: the checkpoint was deleted meanwhile, holds another version of the model, or has a weight that is
            not finite.
    """
    abstract = concretise(_abstract_model(config)) if abstract is None else abstract
    if pretrained.base is not None:
        return _with_adapters(pretrained, load_model(pretrained.base, config, abstract), adapters_dtype)
    return _read(pretrained, abstract)


def _abstract_model(config: ModelConfig) -> Llama:
    return jax.eval_shape(partial(Llama, config), jax.random.key(0))


def _with_adapters(pretrained: Pretrained, base: Llama, dtype: DType) -> Llama:
    """Returns the base with its adapters, in `dtype`."""
    attach = partial(Llama.with_adapters, config=pretrained.adapters, dtype=dtype, key=jax.random.key(0))
    adapted = concretise(jax.eval_shape(attach, base))
    weights, tree = jax.tree.flatten(adapted, is_leaf=lambda node: isinstance(node, nnx.Param))
    mine = map(names.is_adapter, named_arrays(adapted))
    alone = jax.tree.unflatten(tree, [weight if own else None for weight, own in zip(weights, mine, strict=True)])
    arrays = named_arrays(base) | named_arrays(_read(pretrained, alone))
    return jax.tree.unflatten(jax.tree.structure(adapted), [arrays[name] for name in named_arrays(adapted)])


def _read(pretrained: Pretrained, abstract: Llama) -> Llama:
    """Returns the weights that `pretrained.source` holds.

    Args:
        pretrained: the location of the weights.
        abstract: the weights with the type and memory of each, and None for those that are elsewhere.
    """
    arrays = named_arrays({"model": abstract})
    if pretrained.tensors is not None:
        leaves = [read_array(name, leaf, pretrained.tensors) for name, leaf in arrays.items()]
    else:
        as_stored = jax.tree.map(lambda leaf: leaf.update(dtype=pretrained.config.param_dtype), abstract)
        leaves = read_weights(pretrained.source, as_stored, next(iter(arrays.values())).dtype)
    model = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    finite = jax.tree.leaves(_are_finite(model))
    if bad := [name for name, is_finite in zip(arrays, finite, strict=True) if not is_finite]:
        raise CheckpointError(f"{pretrained.source}: {', '.join(bad)} holds values that are not finite; use earlier weights")
    return model


@jax.jit
def _are_finite(model: Llama) -> Llama:
    """Returns a bool [] for every weight, on every device."""
    return jax.tree.map(lambda weight: total(lambda own, _: jnp.sum(~jnp.isfinite(own)), weight) == 0, model)


def read_array(name: str, abstract: jax.ShapeDtypeStruct, tensors: Mapping[str, Stored]) -> jax.Array:
    """Reads one of our arrays, with its type and sharding, from Hugging Face tensors; a stacked array is filled by layer."""
    sharding = abstract.sharding
    assert isinstance(sharding, NamedSharding)
    if not names.is_stacked(name):
        return _place(abstract.shape, abstract.dtype, sharding, partial(names.from_hf, name, 0, tensors, abstract.shape))
    array = _zeros(abstract.shape, abstract.dtype, sharding)
    of_layer, shape = NamedSharding(sharding.mesh, P(*sharding.spec[1:])), abstract.shape[1:]
    for layer in range(abstract.shape[0]):
        read = partial(names.from_hf, name, layer, tensors, shape)
        array = _set_layer(array, _place(shape, abstract.dtype, of_layer, read), layer)
        array.block_until_ready()  # without this the host reads ahead and holds more than one layer
    return array


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any], sharding: NamedSharding) -> jax.Array:
    """Returns zeros; on the host they are made there."""
    if sharding.memory_kind != KIND:
        return jnp.zeros(shape, dtype, device=sharding)
    part = sharding.shard_shape(shape)
    return jax.make_array_from_callback(shape, sharding, lambda _: np.zeros(part, dtype))


@partial(jax.jit, donate_argnums=0)
def _set_layer(stacked: jax.Array, block: jax.Array, layer: jax.Array) -> jax.Array:
    block = moved(block, jax.typeof(stacked).memory_space)
    return jax.lax.dynamic_update_index_in_dim(stacked, block, layer, 0)


def _place(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sharding: NamedSharding,
    read: Callable[[Index, np.ndarray], None],
) -> jax.Array:
    """Creates a sharded array; `read` fills the box around the parts of this process's devices."""

    def ranges(index: Index | None) -> list[range]:
        assert index is not None
        return [range(size)[dim] for dim, size in zip(index, shape, strict=True)]

    parts = [ranges(index) for index in sharding.addressable_devices_indices_map(shape).values()]
    box = tuple(slice(min(dim.start for dim in dims), max(dim.stop for dim in dims)) for dims in zip(*parts, strict=True))
    block = np.empty([dim.stop - dim.start for dim in box], dtype)
    read(box, block)

    def part(index: Index | None) -> np.ndarray:
        inside = zip(ranges(index), box, strict=True)
        return block[tuple(slice(dim.start - around.start, dim.stop - around.start) for dim, around in inside)]

    return jax.make_array_from_callback(shape, sharding, part)
