"""The loss of GRPO: a clipped ratio of probabilities times an advantage, and the divergence from a reference.

A row holds a prompt and one completion, whose tokens are its targets. Beside them it has their advantages, their
log-probabilities when they were written, and those of the reference, see `llamajax.step.batch.fields`.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from llamajax.config.objective import ObjectiveConfig
from llamajax.config.run import Config
from llamajax.model import Llama
from llamajax.parallel.zero import PreparedWeights, whole_over_data
from llamajax.step.batch import IGNORE, Batch
from llamajax.step.log_probs import log_probs
from llamajax.step.loss import LossSums
from llamajax.step.preferences import Sums, plainly

TOTALS = ("learned", "clipped", "divergence", "log_prob")
"""Sums over the tokens of completions, beside the losses: their number, those whose ratio is clipped, their divergence from
the reference, and their log-probabilities."""


def policy_loss(weights: PreparedWeights[Llama], batch: Mapping[str, jax.Array], config: Config) -> tuple[jax.Array, Sums]:
    """Returns a micro-batch's summed loss, to differentiate and to divide by the number of tokens, or of completions where
    these count alike; and for reports its sums.

    A token with the ratio r of its probabilities, now and when it was written, and the advantage A has the loss
    -min(r A, clip(r) A) + `kl_weight` r (q - log q - 1), where q is the ratio of its probabilities under the reference and
    now (arXiv:2402.03300, equations 3 and 4). The r in the second term gives it the gradient of the divergence
    (arXiv:2512.02556, section 3.1).

    Args:
        weights: the Llama, prepared or as stored.
        batch: as for `llamajax.step.loss.loss_fn`, and further fields, see `llamajax.step.batch.fields`.
        config: the run.
    """
    objective, own = config.objective, log_probs(weights, batch, config)
    lies = jax.typeof(own).sharding.spec
    names = ("targets", "advantages", "old", "reference")
    given = {name: jax.reshard(batch[name], lies) for name in names if name in batch}
    is_learned = given["targets"] != IGNORE

    high = objective.clip_low if objective.clip_high is None else objective.clip_high
    # Where a rollout has one step, the weights that train are those that have written.
    ratio, advantages = jnp.exp(own - given.get("old", lax.stop_gradient(own))), given["advantages"]
    gain, most = ratio * advantages, jnp.clip(ratio, 1 - objective.clip_low, 1 + high) * advantages
    losses, divergence = -jnp.minimum(gain, most), jnp.zeros_like(own)
    if objective.kl_weight:
        log_ratio = given["reference"] - own
        divergence = jnp.expm1(log_ratio) - log_ratio
        losses += objective.kl_weight * ratio * divergence
    lengths = jnp.sum(is_learned, axis=1, keepdims=True, dtype=jnp.float32)
    shares = 1 / jnp.maximum(lengths, 1.0) if objective.length_normalized else 1.0
    loss = jnp.sum(jnp.where(is_learned, losses * shares, 0.0))
    counted = lengths > 0 if objective.length_normalized else is_learned

    of_tokens = {"learned": 1.0, "clipped": gain > most, "divergence": divergence, "log_prob": own}
    totals = {name: jnp.sum(jnp.where(is_learned, x, 0.0), dtype=jnp.float32) for name, x in of_tokens.items()}
    return loss, lax.stop_gradient((LossSums(loss, loss, jnp.sum(counted, dtype=jnp.int32)), totals))


def policy_metrics(objective: ObjectiveConfig, means: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the metrics of a step from `loss`, the mean of `LossSums.cross_entropy`, and from the means of `TOTALS`: all
    over the number of tokens, or of completions where these count alike."""
    per_token = {name: means[name] / means["learned"] for name in TOTALS}
    found = {"loss": means["loss"], "clipped": per_token["clipped"], "log_prob": per_token["log_prob"]}
    return found | ({"divergence": per_token["divergence"]} if objective.kl_weight else {})


@functools.partial(jax.jit, static_argnums=0)
def completion_log_probs(config: Config, model: Llama, batch: Batch) -> Float32[Array, "B T"]:
    """Returns the log-probability of every target of a batch of one micro-batch [1, B, T], or 0; whole on every device."""
    weights = PreparedWeights(whole_over_data(model, config.model.compute_dtype))
    found = log_probs(weights, jax.tree.map(lambda array: array[0], batch), plainly(config))
    return jax.reshard(found, jax.P(None, None))


def no_sums() -> Sums:
    """Returns sums of nothing."""
    return LossSums(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32)), dict.fromkeys(TOTALS, jnp.zeros(()))
