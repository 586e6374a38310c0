"""The scores that a reward model gives to answers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float, Float32

from llamajax.config.run import Config
from llamajax.model import Llama
from llamajax.parallel.sequence import whole_rows
from llamajax.parallel.sharding import axes_in, spec
from llamajax.parallel.zero import PreparedWeights
from llamajax.step.loss import states_and_head


def last_scores(weights: PreparedWeights[Llama], batch: Mapping[str, jax.Array], config: Config) -> Float32[Array, "B T"]:
    """Returns the score of every sequence at its last token, and 0 elsewhere, in the rows' own order; sharded ("batch",
    None). Arguments as for `llamajax.step.preferences.preference_loss`."""
    forms: Any = {"parallel": config.parallel, "remat": config.model.remat, "offload": config.offload}
    hidden, _, head = states_and_head(weights, batch, **forms)
    with jax.named_scope("loss"):
        found = whole_rows(token_scores(hidden, head[...]), config.parallel.sequence)
        ids = jax.reshard(batch["segment_ids"], jax.typeof(found).sharding.spec)
        is_last = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (0, 1)), constant_values=True) & (ids > 0)
        return jnp.where(is_last, found, 0.0)


@jax.custom_vjp
def token_scores(hidden: Float[Array, "B T D"], head: Float[Array, "R D"]) -> Float32[Array, "B T"]:
    """Returns the product of every state with the head's row, sharded like the states.

    Args:
        hidden: see `llamajax.step.loss.token_losses`, like `head`.
        head: the copy for compute of a table of one row; other rows are zeros.
    """
    return jnp.einsum("BTD,D->BT", hidden, _row(head), preferred_element_type=jnp.float32)


def _row(head: Float[Array, "R D"]) -> Float[Array, "D"]:
    """Returns the only row that is not padding, on every device."""
    return jnp.sum(jax.reshard(head, spec("vocab", None)), axis=0)


def _forward(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return token_scores(hidden, head), (hidden, head)


def _backward(residuals: tuple[jax.Array, jax.Array], d_scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden, head = residuals
    d_hidden = (d_scores[..., None] * _row(head)[None, None]).astype(hidden.dtype)
    hidden_spec, head_spec = (jax.typeof(x).sharding.spec for x in residuals)
    left_open = head_spec.reduced

    @partial(
        jax.shard_map,
        in_specs=(hidden_spec, jax.typeof(d_scores).sharding.spec),
        out_specs=P(*head_spec.partitions, unreduced=left_open),
    )
    def head_gradient(hidden: jax.Array, d_scores: jax.Array) -> jax.Array:
        d_row = jnp.einsum("bt,btD->D", d_scores, hidden, preferred_element_type=jnp.float32).astype(head.dtype)
        d_row = jax.lax.psum(d_row, tuple(sorted(axes_in(hidden_spec) - left_open)))
        # Every device takes its row for the real one: the gradient of padding is dropped.
        return jax.lax.pcast(d_row[None], tuple(sorted(left_open)), to="unreduced")

    return d_hidden, head_gradient(hidden, d_scores)


token_scores.defvjp(_forward, _backward)
