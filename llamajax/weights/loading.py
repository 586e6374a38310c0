"""Reads the weights of a pretrained model onto the mesh."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import NamedSharding

from llamajax.checkpoint.read import read_weights
from llamajax.config.model import ModelConfig
from llamajax.errors import CheckpointError
from llamajax.model import Llama
from llamajax.parallel.arrays import concretise, named_arrays
from llamajax.parallel.host_memory import DEVICE, KIND, moved, total
from llamajax.parallel.quantized import Quantized, quantize
from llamajax.parallel.zero import as_frozen, trained_only
from llamajax.weights import names
from llamajax.weights.pretrained import Pretrained
from llamajax.weights.safetensors import Stored

Index = tuple[slice, ...]


def load_model(pretrained: Pretrained, config: ModelConfig, abstract: Llama | None = None) -> Llama:
    """Returns the model on the current mesh, in `config.param_dtype`, and with its adapters, if it has some, in float32;
    without a head, if `config` has another kind of head. Processes call this together.

    Besides arrays that wait in its memory, the host holds at most the part of one layer's largest array, or of a vocabulary
    table, that this process's devices need.

    Args:
        pretrained: the location of the weights.
        config: configuration of the model; settings that do not shape weights may differ, see `Pretrained.check`.
        abstract: its weights, without adapters, as `jax.ShapeDtypeStruct`, with the memory of each; None: all of them on the
            devices.

    Raises:
        CheckpointError: the checkpoint was deleted meanwhile, holds another version of the model, or has a weight that is
            not finite.
    """
    abstract = concretise(_abstract_model(config)) if abstract is None else abstract
    if pretrained.base is not None:
        return _with_adapters(pretrained, load_model(pretrained.base, config, abstract))
    has_head = config.head == pretrained.config.head
    abstract = abstract if has_head else _without_head(abstract)
    weights, tree = jax.tree.flatten(abstract, is_leaf=_is_quantized)
    arrays = dict(zip(named_arrays({"model": abstract}, _is_quantized), weights, strict=True))
    if pretrained.tensors is not None:
        leaves = [read_array(name, leaf, pretrained.tensors, config) for name, leaf in arrays.items()]
    else:
        as_stored = concretise(_abstract_model(dataclasses.replace(config, param_dtype=pretrained.config.param_dtype)))
        as_stored = as_stored if has_head else _without_head(as_stored)
        leaves = read_weights(pretrained.source, _in_memory_of(weights, as_stored), config.param_dtype)
        leaves = [_quantized_by_layer(own, like) for own, like in zip(leaves, weights, strict=True)]
    return _checked(pretrained, jax.tree.unflatten(tree, leaves))


def load_beside(pretrained: Pretrained, config: ModelConfig, base: Llama) -> Llama:
    """Returns the model of adapters on a base that is loaded, of which it has the very arrays.

    Args:
        pretrained: the location of the adapters.
        config: configuration of the model; its arrays have the shapes and types of the base's.
        base: the weights that the adapters add to.

    Raises:
        CheckpointError: see `load_model`.
    """
    as_configured = jax.tree.structure(_abstract_model(config))
    return _with_adapters(pretrained, jax.tree.unflatten(as_configured, jax.tree.leaves(base)))


def load_adapters(pretrained: Pretrained, like: Llama) -> Llama:
    """Returns the adapters of a model on the current mesh, with None for other weights. Processes call this together.

    Args:
        pretrained: the location of the adapters.
        like: arrays or `jax.ShapeDtypeStruct` with the types and shardings of the adapters, and None for other weights.

    Raises:
        CheckpointError: see `load_model`.
    """
    arrays = named_arrays({"model": concretise(like)})
    if pretrained.tensors is not None:
        leaves = [read_array(name, leaf, pretrained.tensors, pretrained.config) for name, leaf in arrays.items()]
    else:
        stored = jnp.dtype(pretrained.config.param_dtype)
        as_stored = jax.tree.map(lambda leaf: leaf.update(dtype=stored), concretise(like))
        leaves = read_weights(pretrained.source, as_stored, next(iter(arrays.values())).dtype)
    return _checked(pretrained, jax.tree.unflatten(jax.tree.structure(like), leaves))


def _with_adapters(pretrained: Pretrained, base: Llama) -> Llama:
    """Returns the base, frozen, with the adapters that belong to it; nothing is dropped outside of training."""
    assert pretrained.adapters is not None
    key, adapters = jax.random.key(0), dataclasses.replace(pretrained.adapters, dropout=0.0)  # no value is drawn
    adapted = jax.eval_shape(lambda base: as_frozen(base).with_adapters(adapters, "float32", key), base)
    arrays = named_arrays(base) | named_arrays(load_adapters(pretrained, trained_only(adapted)))
    return jax.tree.unflatten(jax.tree.structure(adapted), [arrays[name] for name in named_arrays(adapted)])


def _checked(pretrained: Pretrained, model: Llama) -> Llama:
    """Raises `CheckpointError` if a weight is not finite; returns the weights."""
    finite = named_arrays({"model": _are_finite(model)})
    if bad := [name for name, is_finite in finite.items() if not is_finite]:
        raise CheckpointError(f"{pretrained.source}: {', '.join(bad)} holds values that are not finite; use earlier weights")
    return model


def _abstract_model(config: ModelConfig) -> Llama:
    return jax.eval_shape(partial(Llama, config), jax.random.key(0))


def _without_head(model: Llama) -> Llama:
    model = jax.tree.map(lambda weight: weight, model)
    model.head = None
    return model


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def _in_memory_of(weights: Sequence[Any], others: Llama) -> Llama:
    """Returns arrays like `others`, each in the memory of the one in `weights`; those to quantize in host memory."""
    leaves, tree = jax.tree.flatten(others)
    places = [
        x.sharding.with_memory_kind(KIND) if _is_quantized(own) else own.sharding
        for own, x in zip(weights, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, [x.update(sharding=lies) for x, lies in zip(leaves, places, strict=True)])


@jax.jit
def _are_finite(model: Llama) -> Llama:
    """Returns a bool [] for every weight, on every device."""
    return jax.tree.map(lambda weight: total(lambda own, _: jnp.sum(~jnp.isfinite(own)), weight) == 0, model)


def read_array(
    name: str, abstract: jax.ShapeDtypeStruct | Quantized, tensors: Mapping[str, Stored], config: ModelConfig
) -> jax.Array | Quantized:
    """Reads one of our arrays, with its type and sharding, from Hugging Face tensors; a stacked array is filled by layer,
    and a quantized one rounded by layer."""
    if isinstance(abstract, Quantized):
        return _read_quantized(name, abstract, tensors, config)
    sharding = abstract.sharding
    assert isinstance(sharding, NamedSharding)
    if not names.is_stacked(name):
        read = partial(names.from_hf, name, 0, tensors, abstract.shape, config=config)
        return _place(abstract.shape, abstract.dtype, sharding, read)
    array = _zeros(abstract.shape, abstract.dtype, sharding)
    of_layer, shape = NamedSharding(sharding.mesh, P(*sharding.spec[1:])), abstract.shape[1:]
    for layer in range(abstract.shape[0]):
        read = partial(names.from_hf, name, layer, tensors, shape, config=config)
        array = _set_layer(array, _place(shape, abstract.dtype, of_layer, read), layer)
        array.block_until_ready()  # without this the host reads ahead and holds more than one layer
    return array


def _read_quantized(name: str, abstract: Quantized, tensors: Mapping[str, Stored], config: ModelConfig) -> Quantized:
    lies, shape = abstract.codes.sharding, abstract.shape[1:]
    assert isinstance(lies, NamedSharding)
    of_layer = NamedSharding(lies.mesh, P(*lies.spec[1:]))

    def layer(number: int) -> jax.Array:
        read = partial(names.from_hf, name, number, tensors, shape, config=config)
        return _place(shape, np.dtype(abstract.dtype), of_layer, read)

    return _filled(abstract, layer)


def _quantized_by_layer(stacked: jax.Array, like: Any) -> jax.Array | Quantized:
    """Returns layers in host memory in codes and scales on the devices; other arrays as they are."""
    if not isinstance(like, Quantized):
        return stacked
    return _filled(like, lambda number: _layer_on_card(stacked, number))


@jax.jit
def _layer_on_card(stacked: jax.Array, number: jax.Array) -> jax.Array:
    return moved(jax.lax.dynamic_index_in_dim(stacked, number, keepdims=False), DEVICE)


def _filled(abstract: Quantized, layer: Callable[[int], jax.Array]) -> Quantized:
    """Returns a stack of layers in codes and scales, rounded on the devices one after the other."""
    stacked = jax.tree.map(lambda x: _zeros(x.shape, x.dtype, x.sharding), abstract)
    for number in range(abstract.shape[0]):
        stacked = _set_quantized(stacked, layer(number), number)
        stacked.codes.block_until_ready()  # without this the host reads ahead and holds more than one layer
    return stacked


@partial(jax.jit, donate_argnums=0)
def _set_quantized(stacked: Quantized, block: jax.Array, layer: jax.Array) -> Quantized:
    own = quantize(block, stacked.form, 0 if stacked.dim != -1 else -1, double=stacked.steps is not None)
    return jax.tree.map(lambda all, own: jax.lax.dynamic_update_index_in_dim(all, own, layer, 0), stacked, own)


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
