"""Log-probabilities of single targets, without ever holding the logits of all tokens at once.

The loss of the next token is a sum, so its gradients are ready with it. A loss over whole answers weighs each token's
gradient by what it finds in all of them: the backward pass computes the logits once more.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.run import Config
from llamajax.model import Llama
from llamajax.parallel.sequence import laid_out, whole_rows
from llamajax.parallel.tensor import shared_axes
from llamajax.parallel.vocabulary import row_ids, split_softmax
from llamajax.parallel.zero import PreparedWeights
from llamajax.step.batch import IGNORE
from llamajax.step.loss import Gradients, chunk_logits, chunks, states_and_head, sums_and_gradients


def log_probs(weights: PreparedWeights[Llama], batch: Mapping[str, jax.Array], config: Config) -> Float32[Array, "B T"]:
    """Returns the log-probability of every target of a micro-batch, or 0, in the rows' own order; sharded ("batch", None).
    Those of `whole_targets` where the batch has them; of completions, those with which they are drawn."""
    forms: Any = {"parallel": config.parallel, "remat": config.model.remat, "offload": config.offload}
    hidden, _, head = states_and_head(weights, batch, **forms)
    if config.objective.is_on_policy:
        hidden /= config.objective.rollout.temperature
    targets = laid_out(batch.get("whole_targets", batch["targets"]), config.parallel.sequence)
    with jax.named_scope("loss"):
        found: Any = target_log_probs(hidden, head[...], targets, config.model.vocab_size)
        return whole_rows(found, config.parallel.sequence)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def target_log_probs(
    hidden: Float[Array, "B T D"], head: Float[Array, "R D"], targets: Int32[Array, "B T"], vocab_size: int
) -> Float32[Array, "B T"]:
    """Returns the log-probability of every target, in nats; 0 where it is `IGNORE`. Sharded as the targets.

    Args:
        hidden: see `llamajax.step.loss.token_losses`, like the others.
        head: the head's copy for compute.
        targets: in [0, V) or `IGNORE`.
        vocab_size: V.
    """
    hidden_spec, head_spec, target_spec = (jax.typeof(x).sharding.spec for x in (hidden, head, targets))

    @partial(jax.shard_map, in_specs=(hidden_spec, head_spec, target_spec), out_specs=target_spec)
    def on_device(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        vocab_ids = row_ids(head, vocab_size)
        if axes := shared_axes(hidden_spec):
            hidden = jax.lax.all_gather(hidden, axes, axis=1, tiled=True)

        def of_chunk(chunk: tuple[jax.Array, ...]) -> jax.Array:
            x, target = chunk
            softmax, _ = split_softmax(chunk_logits(x, head), vocab_ids, target)
            return jnp.where(target != IGNORE, softmax.target - softmax.largest - jnp.log(softmax.total), 0.0)

        found = jax.lax.map(of_chunk, chunks(hidden, targets, vocab_size=head.shape[0]))
        return found.reshape(-1)[: targets.size].reshape(targets.shape)

    return on_device(hidden, head, targets)


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, vocab_size: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return target_log_probs(hidden, head, targets, vocab_size), (hidden, head, targets)


def _backward(
    vocab_size: int, residuals: tuple[jax.Array, jax.Array, jax.Array], cotangents: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    hidden, head, targets = residuals
    # The gradient of the loss of a token is minus that of its log-probability.
    gradients: Gradients = sums_and_gradients(hidden, head, targets, 0.0, vocab_size, -cotangents)[1]
    return *gradients, None


target_log_probs.defvjp(_forward, _backward)
