"""Runs some of the layers at a time, for a step that is several programs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from llamajax.parallel.host_memory import DEVICE, HOST, moved
from llamajax.parallel.saved_values import joined, parted
from llamajax.parallel.stack import Layers, Stack, separated
from llamajax.parallel.zero import PreparedWeights


@jax.named_scope("layers")
def forward_group(
    stack: Stack, weights: PreparedWeights[Layers], shared: tuple[Any, ...], x: Any, start: jax.Array, count: int
) -> tuple[Any, list[Any]]:
    """Runs some of the layers, written out, for a step that is several programs.

    Args:
        stack: the form of the layers.
        weights: weights of all layers, grouped as `stack.grouped`. The first layer's, if gathered earlier, are those of the
            layer at `start`.
        shared: data for each kind of layer, from the kind of the layer at `start` on.
        x: input of the first of these layers.
        start: index of the first layer, int32.
        count: number of layers.

    Returns:
        The activations after the layers, and the values that the backward pass of each needs; those of `stack.offloaded` in
        host memory, and no weights.
    """
    first, kept = weights.used[1], list[Any]()
    own_weights = stack.gather(weights, start) if first is None else first
    for number in range(count):
        x, own_weights = separated(x, own_weights)
        upcoming = stack.gather(weights, start + number + 1) if number + 1 < count else ()
        x, own = stack.layer(own_weights, shared[number % len(shared)], x)
        if kept:
            (x, upcoming), kept[-1] = jax.lax.optimization_barrier(((x, upcoming), _sent(kept[-1])))
        kept, own_weights = [*kept, own], upcoming
    return x, [*kept[:-1], _sent(kept[-1])]


@jax.named_scope("layers")
def backward_group(
    stack: Stack,
    weights: PreparedWeights[Layers],
    shared: tuple[Any, ...],
    kept: Sequence[Any],
    dx: Any,
    grads: Layers,
    start: jax.Array,
) -> tuple[Any, Layers]:
    """Runs the backward pass of the layers of `forward_group`.

    Args:
        stack: as for `forward_group`, and `weights`, `shared` and `start` too.
        weights: see `stack`.
        shared: see `stack`.
        kept: values that `forward_group` returned; those of the last layer may be on the card already.
        dx: gradient of the activations after the layers.
        grads: gradients so far, in the form of the weights, with None for frozen ones.
        start: see `stack`.

    Returns:
        The gradient of the layers' input, and the gradients with those of these layers added.
    """
    stored, first = weights.trained
    last = len(kept) - 1
    own_weights = weights.used[1] if last == 0 and first is not None else stack.gather(weights, start + last)
    (stacked, of_first), above, coming = grads, None, moved(parted(kept[last])[1], DEVICE)
    for number in range(last, -1, -1):
        staying, below = parted(kept[number])[0], parted(kept[number - 1])[1] if number else []
        waiting = staying, coming, below, dx, above
        (staying, own_away, below, dx, above), own_weights = separated(waiting, own_weights)
        upcoming, coming = (), moved(below, DEVICE)
        if number:
            upcoming = weights.used[1] if number == 1 and first is not None else stack.gather(weights, start + number - 1)
        own, own_shared = joined(kept[number], staying, own_away), shared[number % len(shared)]
        d_weights, dx, (own_weights, above) = stack.layer_back(own_weights, own_shared, own, dx, (upcoming, above))
        if above is not None:
            stacked = _plus(stacked, stack.reduced(stored, above), start + number + 1)
        above = d_weights
    if first is not None:
        return dx, (stacked, _trained_sum(of_first, above))
    return dx, (_plus(stacked, stack.reduced(stored, above), start), of_first)


def _sent(kept: Any) -> Any:
    """Returns a layer's saved values with those that wait in host memory there."""
    staying, leaving = parted(kept)
    return joined(kept, staying, moved(leaving, HOST))


def _plus(stacked: Any, one: Any, index: jax.Array) -> Any:
    """Adds a layer's gradients to those of all layers, in place."""

    def add(index: jax.Array, all: jax.Array, own: jax.Array) -> jax.Array:
        total = jax.lax.dynamic_index_in_dim(all, index, keepdims=False) + own
        return jax.lax.dynamic_update_index_in_dim(all, total.astype(all.dtype), index, 0)

    def add_parts(all: jax.Array, own: jax.Array) -> jax.Array:
        """Adds each device's parts: jax cannot read a layer of gradients that are still to be summed over devices."""
        lies, of_own = jax.typeof(all).sharding.spec, jax.typeof(own).sharding.spec
        if not lies.unreduced:
            return add(index, all, own)
        return jax.shard_map(add, in_specs=(jax.P(), lies, of_own), out_specs=lies, check_vma=False)(index, all, own)

    return _of_trained(add_parts, stacked, one)


def _trained_sum(total: Any, own: Any) -> Any:
    return _of_trained(lambda total, own: (total + own).astype(total.dtype), total, own)


def _of_trained(add: Callable[[jax.Array, jax.Array], jax.Array], total: Any, own: Any) -> Any:
    """Adds gradients; a frozen weight's total stays None."""
    return jax.tree.map(
        lambda total, own: None if total is None else add(total, own), total, own, is_leaf=lambda x: x is None
    )  # fmt: skip
