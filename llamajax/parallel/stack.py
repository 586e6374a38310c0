"""Runs a stack of layers: the one place where a layer's weights are gathered and where it is decided what is recomputed."""

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike

from llamajax.parallel.zero import PreparedWeights, gathered

Policy = Callable[..., bool]
"""Of `jax.checkpoint`: whether the results of a primitive are kept."""


@jax.named_scope("layers")
def run_layers(
    layers: PreparedWeights[Any],
    run_layer: Callable[[Any, Any, Any], tuple[Any, Any]],
    carry: Any,
    inputs: Any = None,
    *,
    dtype: DTypeLike,
    saved: Policy | None = None,
) -> tuple[Any, Any]:
    """Runs layers one after the other, as one loop: compile time does not grow with their number.

    Args:
        layers: each as one tree of all layers, whose weights have a leading dim L.
        run_layer: from the carry, a layer with gathered weights and its inputs to the next carry and the layer's results.
        carry: what the first layer is given.
        inputs: a tree whose arrays have a leading dim L: what each layer is given of its own.
        dtype: that weights are gathered in.
        saved: what the forward pass keeps of a layer for the backward pass, beside the carry it was given; all else is
            computed again, and weights are gathered again. None: everything is kept, with the gathered weights.

    Returns:
        What the last layer gave on, and the results of all layers with a leading dim L.
    """

    def step(carry: Any, of_layer: tuple[PreparedWeights[Any], Any]) -> tuple[Any, Any]:
        layer, own_inputs = of_layer
        return run_layer(carry, gathered(layer.trained, dtype, layer.copies), own_inputs)

    if saved is not None:
        step = jax.checkpoint(step, policy=saved, prevent_cse=False)
    return jax.lax.scan(step, carry, (layers, inputs))
