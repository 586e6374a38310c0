"""Runs a stack of layers: the one place where a layer's weights are gathered and where it is decided what is recomputed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from llamajax.parallel.zero import PreparedWeights, gathered

Policy = Callable[..., bool]
"""Of `jax.checkpoint`: whether the results of a primitive are kept."""


@jax.named_scope("layers")
def run_layers(
    layers: PreparedWeights[Any],
    run_layer: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    carry: Any,
    inputs: Any = None,
    shared: Sequence[Any] = (None,),
    *,
    dtype: DTypeLike,
    saved: Policy | None = None,
) -> tuple[Any, Any]:
    """Runs layers one after the other, as one loop: compile time does not grow with their number.

    Args:
        layers: each as one tree of all layers, whose weights have a leading dim L.
        run_layer: from the carry, a layer with gathered weights, its inputs and what it shares with others of its kind to
            the next carry and the layer's results.
        carry: what the first layer is given.
        inputs: a tree whose arrays have a leading dim L: what each layer is given of its own.
        shared: of each kind of layer, in the order in which the kinds repeat. A round of them is written out in the loop.
        dtype: that weights are gathered in.
        saved: what the forward pass keeps of a layer for the backward pass, beside the carry it was given; all else is
            computed again, and weights are gathered again. None: everything is kept, with the gathered weights.

    Returns:
        What the last layer gave on, and the results of all layers with a leading dim L.
    """

    def step(shared: Any, carry: Any, of_layer: tuple[PreparedWeights[Any], Any]) -> tuple[Any, Any]:
        layer, own_inputs = of_layer
        return run_layer(carry, gathered(layer.trained, dtype, layer.copies), own_inputs, shared)

    steps = [partial(step, own) for own in shared]
    if saved is not None:
        steps = [jax.checkpoint(step, policy=saved, prevent_cse=len(steps) > 1) for step in steps]
    stacked = layers, inputs
    if len(steps) == 1:
        return jax.lax.scan(steps[0], carry, stacked)
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    # To part the last few layers from whole rounds would copy the stacks.
    period = len(steps) if num_layers % len(steps) == 0 else num_layers

    def run_round(carry: Any, of_round: Any) -> tuple[Any, Any]:
        results = []
        for place in range(period):
            carry, result = steps[place % len(steps)](carry, jax.tree.map(lambda x, place=place: x[place], of_round))
            results.append(result)
        return carry, jax.tree.map(lambda *each: jnp.stack(each), *results)

    rounds = jax.tree.map(partial(_reshape_layers, 1, (num_layers // period, period)), stacked)
    carry, results = jax.lax.scan(run_round, carry, rounds)
    return carry, jax.tree.map(partial(_reshape_layers, 2, (num_layers,)), results)


def _reshape_layers(count: int, dims: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Replaces the first `count` dims, over layers, which are not split; the sharding of the others is named, since jax
    forgets it for dims of one entry."""
    lies = jax.typeof(x).sharding.spec
    partitions = (*[None] * len(dims), *lies.partitions[count:])
    return jax.lax.reshape(x, (*dims, *x.shape[count:]), out_sharding=lies.update(partitions=partitions))
