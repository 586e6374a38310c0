"""The contents of a batch: the contract between data, model and loss."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from llamajax.config.run import Config
from llamajax.errors import DataError
from llamajax.parallel.arrays import mixed
from llamajax.parallel.sharding import spec

Batch = dict[str, jax.Array]
"""Arrays [micro-batches, B, T] by the names of `fields`, sharded (None, "micro_batch", "seq")."""

FIELDS = ("tokens", "targets", "segment_ids", "positions")
"""Fields of every batch, int32."""
OTHER = "other_"
"""Prefix of the fields of rows in which every prompt has another one's answer."""

IGNORE = -1
"""Target of a token that is not counted: padding, or the last token of a document."""


def token_seeds(seed: int, step: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns a number for every token of a step, uint32 [A, B, T] like `tokens`; the same on every mesh and for any number
    of micro-batches."""
    place, lies = jnp.uint32(0), jax.typeof(tokens).sharding.spec
    for dim, size in enumerate(tokens.shape):
        index = jax.reshard(jnp.arange(size, dtype=jnp.uint32), jax.P(lies[dim]))
        place = place * jnp.uint32(size) + jnp.expand_dims(index, [other for other in range(3) if other != dim])
    return mixed(mixed(place, step.astype(jnp.uint32)), jnp.uint32(seed))


def fields(config: Config) -> dict[str, type[np.number]]:
    """Returns the fields of the run's batches and their types.

    Beside `FIELDS`: `whole_targets`, int32, the targets of prompts too (`orpo`); `reference`, float32, the log-probabilities
    of the targets by the reference, where it does not run in the step; the same fields with the prefix `OTHER` (`kto`); and
    of completions, float32, `advantages` and, where a rollout has several steps, `old`, their log-probabilities before the
    first of them (`grpo`).
    """
    kind, found = config.objective.kind, dict[str, type[np.number]](dict.fromkeys(FIELDS, np.int32))
    if config.objective.reference_of(config.adapters) == "cached":
        found["reference"] = np.float32
    if config.objective.is_on_policy:
        found["advantages"] = np.float32
        found |= {"old": np.float32} if config.objective.rollout.steps > 1 else {}
        found |= {"reference": np.float32} if config.objective.kl_weight else {}
    if kind == "orpo":
        found["whole_targets"] = np.int32
    if kind == "kto":
        found |= {OTHER + name: dtype for name, dtype in found.items()}
    return found


def check_ids(ids: np.ndarray | Sequence[int], vocab_size: int, where: str, remedy: str) -> None:
    """Refuses token ids outside the model's table, which devices would silently look up as zeros.

    Raises:
        DataError: names the first such id; `IGNORE` is allowed.
    """
    ids = np.asarray(ids)
    if (wrong := ids[(ids >= vocab_size) | (ids < IGNORE)]).size:
        raise DataError(f"{where}: token id {wrong[0]} is not among the {vocab_size} rows of the model's table; {remedy}")


def batch_sharding() -> jax.NamedSharding:
    """Returns the sharding of a batch on the current mesh."""
    return jax.NamedSharding(jax.sharding.get_mesh(), spec(None, "micro_batch", "seq"))
