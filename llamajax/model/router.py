"""Which experts each token chooses, and with which weights; on one device, within `shard_map`, in float32."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from llamajax.config.experts import ExpertsConfig
from llamajax.config.parallel import SequenceForm
from llamajax.parallel.dispatch import hits
from llamajax.parallel.sequence import reordered


class Choices(NamedTuple):
    """The router's choices for n tokens, k experts each."""

    experts: Int32[Array, "n k"]
    weights: Float32[Array, "n k"]
    scores: Float32[Array, "n E"]
    """Scores of all experts, which add up to one."""
    logits: Float32[Array, "n E"]


def choose(logits: Float32[Array, "n E"], bias: Float32[Array, "E"] | None, config: ExpertsConfig) -> Choices:
    """Returns the choices by the router's logits; `bias` is added to scores for the choice alone."""
    scores = jax.nn.softmax(logits) if config.scores == "softmax" else jax.nn.sigmoid(logits)
    biased = jax.lax.stop_gradient(scores if bias is None else scores + bias[None])
    _, experts = jax.lax.top_k(_within_groups(biased, config), config.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalize:
        weights = _shares(weights)
    if config.scores == "sigmoid":
        scores = _shares(scores)
    return Choices(experts, config.weight_scale * weights, scores, logits)


def _shares(x: Float32[Array, "n m"]) -> Float32[Array, "n m"]:
    return x / jnp.sum(x, axis=-1, keepdims=True)


def _within_groups(scores: Float32[Array, "n E"], config: ExpertsConfig) -> Float32[Array, "n E"]:
    """Returns the scores, the lowest possible outside of each token's best groups."""
    if config.top_groups == config.num_groups:
        return scores
    by_group = scores.reshape(len(scores), config.num_groups, -1)
    counted = 2 if config.scores == "sigmoid" else 1
    best = jnp.sum(jax.lax.top_k(by_group, counted)[0], axis=-1)
    _, groups = jax.lax.top_k(best, config.top_groups)
    is_best = hits(groups, config.num_groups) > 0
    return jnp.where(is_best[:, :, None], by_group, -jnp.inf).reshape(scores.shape)


def kept_choices(chosen: Int32[Array, "b T k"], config: ExpertsConfig, form: SequenceForm) -> Int32[Array, "b T k"]:
    """Returns the choices of whole rows, in the order of `form`; those beyond an expert's capacity are `num_experts`.

    Capacity is counted by row, and tokens come in the order of the row, so that every mesh drops the same ones.
    """
    _, T, k = chosen.shape
    most = math.ceil(config.capacity_factor * T * k / config.num_experts)
    in_order = reordered(chosen, form)
    own = hits(in_order, config.num_experts)
    before = jnp.cumsum(own, axis=1) - own
    rank = jnp.take_along_axis(before, in_order, axis=2)
    return reordered(jnp.where(rank < most, in_order, config.num_experts), form, back=True)
