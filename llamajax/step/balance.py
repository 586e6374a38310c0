"""Measures the load of every expert in a step, reports it, and moves the biases that balance the loads."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32

from llamajax.config.experts import ExpertsConfig
from llamajax.model import Llama
from llamajax.model.experts import STATISTICS
from llamajax.parallel.sharding import spec
from llamajax.parallel.stages import num_stages

Statistics = Float32[Array, "L S E"]
"""`STATISTICS` of every layer, summed over all tokens of a step."""


def with_statistics(model: Llama) -> Llama:
    """Returns the weights with zeros whose gradients are the layers' statistics; unchanged without experts."""
    config = model.config
    if not config.experts.enabled:
        return model
    L = config.experts.num_expert_layers(config.num_layers)
    by_stage = num_stages() > 1 and L % num_stages() == 0 and not config.dense_layers
    lies = spec("layers" if by_stage else None, None, None)
    zeros = jnp.zeros((L, len(STATISTICS), config.experts.num_experts), out_sharding=lies)
    changed = jax.tree.map(lambda weight: weight, model)
    changed.layers.mlp.statistics = nnx.Param(zeros, compute=None, arrange=None, late=True, frozen=False)
    return changed


def without_statistics(grads: Llama) -> tuple[Llama, Statistics | None]:
    """Returns the gradients of the weights alone, and the statistics."""
    if not grads.config.experts.enabled:
        return grads, None
    changed = jax.tree.map(lambda grad: grad, grads)
    statistics, changed.layers.mlp.statistics = changed.layers.mlp.statistics[...], nnx.data(None)
    return changed, statistics


def balanced(model: Llama, statistics: Statistics | None, applied: jax.Array) -> Llama:
    """Returns the weights with each expert's bias moved against its load, if the step's gradients were `applied`."""
    rate = model.config.experts.bias_update_rate
    if statistics is None or not rate:
        return model
    load, old = statistics[:, STATISTICS.index("load")], model.layers.mlp.bias[...]
    step = rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    changed = jax.tree.map(lambda weight: weight, model)
    changed.layers.mlp.bias[...] = jax.reshard(jnp.where(applied, old + step, old), jax.typeof(old).sharding.spec)
    return changed


def expert_metrics(statistics: Statistics, config: ExpertsConfig) -> dict[str, jax.Array]:
    """Returns what a run reports of its experts: means over the layers that have some, and as `NAME_by_layer` a number for
    each of these layers.

    `expert_max_load` and `expert_min_load` are the largest and smallest load over the mean load; `expert_entropy` is the
    entropy of the loads over its largest possible value. `expert_dropped` and `expert_late` are shares of all choices.
    """
    load, dropped, late, _ = jnp.moveaxis(jax.reshard(statistics, jax.P()), 1, 0)
    total = jnp.sum(load, axis=-1)
    shares = load / total[:, None]
    entropy = -jnp.sum(jax.scipy.special.xlogy(shares, shares), axis=-1) / jnp.log(float(max(2, config.num_experts)))
    by_layer = {
        "expert_max_load": jnp.max(shares, axis=-1) * config.num_experts,
        "expert_min_load": jnp.min(shares, axis=-1) * config.num_experts,
        "expert_entropy": entropy,
        "expert_dropped": jnp.sum(dropped, axis=-1) / total,
        "expert_late": jnp.sum(late, axis=-1) / total,
    }
    means = {name: jnp.mean(values) for name, values in by_layer.items()}
    return means | {f"{name}_by_layer": values for name, values in by_layer.items()}
