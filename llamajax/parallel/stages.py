"""Stages of a pipeline in one program: devices along `pipeline` hold different layers and different rows.

The rows of all stages are one batch [p B, ...] that is split over `pipeline` first. A weight of a stage's layer has a first
dim p, split over `pipeline`. Only products with weights and scales know of that dim; attention, for example, sees p B rows.
No manual axis surrounds a stage: XLA refuses partial sums (`unreduced`) inside one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from llamajax.config.parallel import axes_of
from llamajax.parallel.sharding import as_tuple

STAGE = "pipeline"
"""Mesh axis of the stages."""


def num_stages() -> int:
    """Returns the number of stages on the current mesh."""
    return jax.sharding.get_abstract_mesh().shape[STAGE]


def is_staged(spec: P) -> bool:
    """Returns whether an array with this spec is the weight of a layer of every stage, [p, ...]."""
    return spec.partitions[:1] == (STAGE,)


def split(x: jax.Array) -> jax.Array:
    """Reshapes the rows of all stages [p B, ...] to [p, B, ...]; no device sends anything."""
    spec = jax.typeof(x).sharding.spec
    batch, *rest = spec.partitions
    shape, p = x.shape, num_stages()
    lies = spec.update(partitions=(STAGE, as_tuple(batch)[1:], *rest))
    return jax.lax.reshape(x, (p, shape[0] // p, *shape[1:]), out_sharding=lies)


def merge(x: jax.Array) -> jax.Array:
    """Reshapes [p, B, ...] to the rows of all stages [p B, ...]; no device sends anything."""
    spec = jax.typeof(x).sharding.spec
    stage, batch, *rest = spec.partitions
    lies = spec.update(partitions=((stage, *as_tuple(batch)), *rest))
    return jax.lax.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]), out_sharding=lies)


def by_stage(function: Callable[..., Any], *trees: Any, out_specs: Any) -> Any:
    """Returns `function(stage, ...)` of each device's own part: no communication, and an index that depends on the stage is
    a local one."""
    in_specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, trees)

    def on_device(*trees: Any) -> Any:
        return function(jax.lax.axis_index(STAGE), *trees)

    return jax.shard_map(on_device, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*trees)


def specs(tree: Any) -> Any:
    """Returns the partition spec of every array."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


def shift(tree: Any, by: int) -> Any:
    """Sends the rows [p B, ...] of every stage to the next stage (1) or to the previous one (-1), as a ring."""
    p = num_stages()
    ring = [(stage, (stage + by) % p) for stage in range(p)]

    def on_device(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, STAGE, ring)

    def send(x: jax.Array) -> jax.Array:
        lies = jax.typeof(x).sharding.spec
        return jax.shard_map(on_device, in_specs=lies, out_specs=lies)(x)

    return jax.tree.map(send, tree)


def share_tokens(x: jax.Array, stage: int) -> jax.Array:
    """Splits the tokens of one stage's rows over all stages: from [p B, T, ...] to [B, T, ...], padded with zeros to a
    multiple of the stages, by a reduce-scatter. Its transpose gathers the tokens on that stage."""
    lies = jax.typeof(x).sharding.spec
    batch, tokens, *rest = lies.partitions

    def on_device(x: jax.Array) -> jax.Array:
        own = jnp.where(jax.lax.axis_index(STAGE) == stage, x, 0)
        own = jnp.pad(own, ((0, 0), (0, -x.shape[1] % jax.lax.axis_size(STAGE)), *[(0, 0)] * (x.ndim - 2)))
        return jax.lax.psum_scatter(own, STAGE, scatter_dimension=1, tiled=True)

    out_specs = P(as_tuple(batch)[1:], (*as_tuple(tokens), STAGE), *rest)
    return jax.shard_map(on_device, in_specs=lies, out_specs=out_specs)(x)


def shared_ids(ids: jax.Array, parts: int, fill: int) -> jax.Array:
    """Returns each stage's part of ids that all stages have, [..., T], in the order in which `share_tokens` leaves the
    tokens of a residual stream, after the devices of `tensor` have gathered them.

    Args:
        ids: int32 [..., T], not split over `pipeline`.
        parts: number of devices that share these tokens in a matmul and split them elsewhere.
        fill: id of padding.
    """
    *lead, tokens = jax.typeof(ids).sharding.spec

    def own_part(stage: jax.Array, x: jax.Array) -> jax.Array:
        p, length = jax.lax.axis_size(STAGE), x.shape[-1] // parts
        x = x.reshape(*x.shape[:-1], parts, length)
        x = jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, -length % p)), constant_values=fill)
        x = x.reshape(*x.shape[:-1], p, -1)
        x = jax.lax.dynamic_index_in_dim(x, stage, x.ndim - 2, keepdims=False)
        return x.reshape(*x.shape[:-2], -1)

    return by_stage(own_part, ids, out_specs=P(*lead, (*as_tuple(tokens), STAGE)))


def exchange(stacked: jax.Array, layers: np.ndarray) -> list[jax.Array]:
    """Returns the weights in each slot of the stages, [p, ...] or with several chunks [p, chunks, ...], from the weights of
    all layers [L, ...].

    Weights that are split over `pipeline` by layer stay on their devices, if these layers are the stage's. Otherwise devices
    exchange columns for layers: they have all layers of some columns, in a dim with `pipeline` as its innermost axis. An
    empty slot holds some layer's weights.

    Args:
        stacked: weights of all layers, in order.
        layers: result of `llamajax.config.stages.layers_of_stages`, as an array.
    """
    lies = jax.typeof(stacked).sharding.spec
    p, chunks, num_slots = layers.shape
    if is_staged(lies) and np.array_equal(layers.ravel(), np.arange(stacked.shape[0])):
        partitions = (STAGE, None, *lies.partitions[1:])
        in_slots = jax.lax.reshape(
            stacked, (p, num_slots, *stacked.shape[1:]), out_sharding=lies.update(partitions=partitions)
        )
        return [in_slots[:, slot] for slot in range(num_slots)]
    stacked = _by_columns(stacked) if is_staged(lies) else stacked
    lies = jax.typeof(stacked).sharding.spec
    column = _column(lies)
    rest = [tuple(axis for axis in as_tuple(entry) if axis != STAGE) or None for entry in lies.partitions[1:]]

    def in_slot(slot: int) -> jax.Array:
        index = np.maximum(layers[:, :, slot], 0)

        @partial(jax.shard_map, in_specs=lies, out_specs=P(STAGE, None, *rest))
        def on_device(own: jax.Array) -> jax.Array:
            if column is None:
                return own[jnp.asarray(index)[jax.lax.axis_index(STAGE)]][None]
            return jax.lax.all_to_all(own[index], STAGE, 0, column + 1, tiled=True)

        weights = on_device(stacked)
        return weights if chunks > 1 else weights[:, 0]

    return [in_slot(slot) for slot in range(num_slots)]


def _by_columns(stacked: jax.Array) -> jax.Array:
    """Returns weights that are split over `pipeline` by layer with all layers of some columns on each device, or, where the
    stages divide no dim that is split over other axes, with all of everything."""
    sharding = jax.typeof(stacked).sharding
    lies, own_shape = sharding.spec, sharding.shard_shape(stacked.shape)
    embed, p = set(axes_of("embed")), sharding.mesh.shape[STAGE]
    split = [dim for dim, entry in enumerate(lies.partitions) if embed.intersection(as_tuple(entry))]
    column = next((dim for dim in split if own_shape[dim] % p == 0), None)
    if column is None:
        return jax.reshard(stacked, P(None, *lies.partitions[1:]))
    partitions = [None, *lies.partitions[1:]]
    partitions[column] = (*as_tuple(partitions[column]), STAGE)

    @partial(jax.shard_map, in_specs=lies, out_specs=P(*partitions))
    def on_device(own: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(own, STAGE, column, 0, tiled=True)

    return on_device(stacked)


def _column(lies: P) -> int | None:
    """Returns the dim that is split over `pipeline`."""
    return next((dim for dim, entry in enumerate(lies.partitions) if STAGE in as_tuple(entry)), None)
