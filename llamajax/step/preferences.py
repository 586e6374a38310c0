"""Losses over preferred and rejected answers: DPO, IPO, KTO, ORPO, SimPO and CPO; and the loss of a reward model.

In a row, pair j has segment 2 j + 1 for the chosen answer and segment 2 j + 2 for the rejected one, each after its prompt.
`targets` are the answers' tokens; an answer with a label but without a partner has the segment of its side.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from llamajax.config.objective import ObjectiveConfig
from llamajax.config.offload import ON_CARD
from llamajax.config.parallel import PLAIN
from llamajax.config.run import Config
from llamajax.model import Llama
from llamajax.parallel.sequence import whole_rows
from llamajax.parallel.zero import PreparedWeights, whole_over_data
from llamajax.step.batch import IGNORE, OTHER, Batch
from llamajax.step.log_probs import log_probs
from llamajax.step.loss import LossSums
from llamajax.step.scores import last_scores

TOTALS = (
    "chosen", "rejected", "chosen_reward", "rejected_reward", "chosen_log_prob", "rejected_log_prob", "correct", "nll",
    "nll_tokens",
)  # fmt: skip
"""Sums of a batch, beside its losses."""
Sums = tuple[LossSums, dict[str, jax.Array]]
Sides = Float32[Array, "B T 2"]
"""A number for each answer of a row: pairs, then the chosen and the rejected side."""


class Whole(NamedTuple):
    """Figures of a whole step that the loss of each of its micro-batches needs."""

    num_counted: Int32[Array, ""]
    """Number of pairs; for KTO, of answers."""
    nll_tokens: Float32[Array, ""]
    """Number of tokens of the preferred answers' cross-entropy."""
    kl: Float32[Array, ""]
    """KTO: estimate of the divergence from the reference, at least 0."""


def look_at_whole(config: Config, weights: PreparedWeights[Llama], batch: Batch) -> Whole:
    """Returns what the micro-batches of a step have to know; no gradient passes. Arguments as for `preference_loss`, with
    arrays [A, B, T]."""
    objective = config.objective

    def add(whole: Whole, micro_batch: Batch) -> tuple[Whole, None]:
        answers = answers_of(micro_batch["targets"], micro_batch["segment_ids"])
        own = Whole(_count(objective, answers), _nll_tokens(micro_batch), jnp.zeros(()))
        if objective.kind == "kto":
            other = _others(micro_batch)
            ratios = by_answer(log_probs(weights, other, config) - _reference(weights, other, config), other["segment_ids"])
            own = own._replace(kl=jnp.sum(ratios))
        return jax.tree.map(jnp.add, whole, own), None

    zero = Whole(jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(()))
    whole = lax.stop_gradient(lax.scan(add, zero, batch)[0])
    return whole._replace(kl=jnp.maximum(whole.kl / jnp.maximum(whole.num_counted, 1), 0.0))


def preference_loss(
    weights: PreparedWeights[Llama], batch: Mapping[str, jax.Array], config: Config, whole: Whole
) -> tuple[jax.Array, Sums]:
    """Returns a micro-batch's summed loss, to differentiate and to divide by the number of pairs; and for reports its sums.

    Args:
        weights: the Llama, prepared or as stored.
        batch: as for `llamajax.step.loss.loss_fn`, and further fields, see `llamajax.step.batch.fields`.
        config: the run.
        whole: see `look_at_whole`.
    """
    objective, targets = config.objective, batch["targets"]
    own = last_scores(weights, batch, config) if objective.kind == "reward" else log_probs(weights, batch, config)
    ids = jax.reshard(batch["segment_ids"], jax.typeof(own).sharding.spec)
    targets = jax.reshard(targets, jax.typeof(own).sharding.spec)
    is_learnt = (targets != IGNORE) | (objective.kind == "reward")
    answers = answers_of(targets, ids)
    sums = by_answer(jnp.where(is_learnt, own, 0.0), ids)
    scores = sums
    if objective.has_reference:
        reference = lax.stop_gradient(_reference(weights, batch, config))
        scores = sums - by_answer(jnp.where(is_learnt, reference, 0.0), ids)
    lengths = jnp.maximum(answers, 1.0)
    scores = scores / lengths if _is_per_token(objective) else scores

    counts = _is_there(objective, answers)
    # An answer that is not there gets an ordinary score: its loss is not counted, but must have a gradient.
    losses = _LOSSES[objective.kind](objective, jnp.where(counts, scores, -1.0), whole.kl)
    preference = jnp.sum(jnp.where(counts if losses.ndim == 3 else counts[..., 0], losses, 0.0))
    nll = -jnp.sum(jnp.where(_is_in_nll(batch, ids), own, 0.0))
    loss = preference + objective.own_nll_weight * nll * whole.num_counted / jnp.maximum(whole.nll_tokens, 1.0)

    rewards, told = scores if objective.kind == "reward" else objective.beta * scores, lax.stop_gradient(sums)
    correct = counts.all(axis=-1) & (rewards[..., 0] > rewards[..., 1])
    totals = {
        "chosen": counts[..., 0], "rejected": counts[..., 1], "correct": correct, "nll": nll,
        "chosen_reward": jnp.where(counts, rewards, 0.0)[..., 0], "rejected_reward": jnp.where(counts, rewards, 0.0)[..., 1],
        "chosen_log_prob": jnp.where(counts, told, 0.0)[..., 0], "rejected_log_prob": jnp.where(counts, told, 0.0)[..., 1],
        "nll_tokens": _nll_tokens(batch),
    }  # fmt: skip
    totals = {name: jnp.sum(values, dtype=jnp.float32) for name, values in totals.items()}
    return loss, lax.stop_gradient((LossSums(loss, preference, _count(objective, answers)), totals))


def _reference(weights: PreparedWeights[Llama], batch: Mapping[str, jax.Array], config: Config) -> Float32[Array, "B T"]:
    """Returns the reference's log-probabilities, those that the batch brings or those of the weights without adapters."""
    if "reference" in batch:
        return whole_rows(batch["reference"], "gather")
    copies = weights.copies if weights.copies is None else weights.copies.without_adapters()
    base = PreparedWeights(weights.trained.without_adapters(), copies)
    return log_probs(base, {name: values for name, values in batch.items() if name != "seeds"}, config)


def _others(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the rows in which every prompt has another one's answer."""
    return {name.removeprefix(OTHER): values for name, values in batch.items() if name.startswith(OTHER)}


def by_answer(values: Float32[Array, "B T"], segment_ids: Int32[Array, "B T"]) -> Sides:
    """Returns the sums of the values of each answer, whole rows in and out; 0 where a row has no such answer."""
    lies = jax.typeof(values).sharding.spec
    T, segment_ids = values.shape[1], jax.reshard(segment_ids, lies)

    def join(before: tuple[jax.Array, jax.Array], after: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.where(before[1] == after[1], before[0] + after[0], after[0]), after[1]

    # Up to a token, the sum of its segment. A scatter-add of all tokens would add in another order every time on a GPU.
    sums = lax.associative_scan(join, (values, segment_ids), axis=1)[0]
    is_last = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    place = jnp.where(is_last & (segment_ids > 0), segment_ids - 1, 2 * T + jnp.arange(T))

    def put(sums: jax.Array, place: jax.Array) -> jax.Array:
        return jnp.zeros(2 * T).at[place].set(sums, mode="drop", unique_indices=True)

    placed = jax.shard_map(jax.vmap(put), in_specs=(lies, lies), out_specs=lies)(sums, place)
    return placed.reshape(*values.shape, 2)


def answers_of(targets: Int32[Array, "B T"], segment_ids: Int32[Array, "B T"]) -> Sides:
    """Returns the number of tokens of each answer."""
    lies = jax.P(jax.typeof(targets).sharding.spec[0], None)
    return by_answer((jax.reshard(targets, lies) != IGNORE).astype(jnp.float32), segment_ids)


def preference_metrics(objective: ObjectiveConfig, means: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the metrics of a step, or of an evaluation, from `loss`, the mean of `LossSums.cross_entropy`, and from the
    means of `TOTALS`: all over the number of pairs, or of answers for KTO. NaN where there are none."""
    nll = means["nll"] / means["nll_tokens"]
    weight = objective.own_nll_weight
    found = {"loss": means["loss"] + weight * nll if weight else means["loss"]}
    for side in ("chosen", "rejected"):
        found |= {f"reward_{side}": means[f"{side}_reward"] / means[side]}
        if objective.kind != "reward":
            found |= {f"log_prob_{side}": means[f"{side}_log_prob"] / means[side]}
    found["reward_margin"] = found["reward_chosen"] - found["reward_rejected"]
    if objective.kind != "kto":
        found["reward_accuracy"] = means["correct"]
    return found | ({"nll": nll} if weight else {})


def _count(objective: ObjectiveConfig, answers: Sides) -> Int32[Array, ""]:
    there = _is_there(objective, answers)
    return jnp.sum(there if objective.kind == "kto" else there[..., 0], dtype=jnp.int32)


def _is_there(objective: ObjectiveConfig, answers: Sides) -> Bool[Array, "B T 2"]:
    """Returns which answers count; of a pair, both or none."""
    there = answers > 0
    return there if objective.kind == "kto" else jnp.broadcast_to(there.all(axis=-1, keepdims=True), there.shape)


def _is_per_token(objective: ObjectiveConfig) -> bool:
    return objective.length_normalized or objective.kind in ("ipo", "orpo", "simpo")


def _is_in_nll(batch: Mapping[str, jax.Array], segment_ids: Int32[Array, "B T"]) -> Bool[Array, "B T"]:
    """Returns which tokens the preferred answers' cross-entropy counts."""
    targets = jax.reshard(batch.get("whole_targets", batch["targets"]), jax.typeof(segment_ids).sharding.spec)
    return (targets != IGNORE) & (segment_ids % 2 == 1)


def _nll_tokens(batch: Mapping[str, jax.Array]) -> Float32[Array, ""]:
    return jnp.sum(_is_in_nll(batch, batch["segment_ids"]), dtype=jnp.float32)


def _smoothed(objective: ObjectiveConfig, logits: jax.Array) -> jax.Array:
    share = objective.label_smoothing
    return -(1 - share) * jax.nn.log_sigmoid(logits) - share * jax.nn.log_sigmoid(-logits)


def _dpo(objective: ObjectiveConfig, scores: Sides, kl: jax.Array) -> jax.Array:
    return _smoothed(objective, objective.beta * (scores[..., 0] - scores[..., 1]))


def _reward(objective: ObjectiveConfig, scores: Sides, kl: jax.Array) -> jax.Array:
    losses = _smoothed(objective, scores[..., 0] - scores[..., 1])
    return losses + objective.center_weight * jnp.square(jnp.sum(scores, axis=-1))


def _simpo(objective: ObjectiveConfig, scores: Sides, kl: jax.Array) -> jax.Array:
    return _smoothed(objective, objective.beta * (scores[..., 0] - scores[..., 1]) - objective.margin)


def _ipo(objective: ObjectiveConfig, scores: Sides, kl: jax.Array) -> jax.Array:
    return jnp.square(scores[..., 0] - scores[..., 1] - 1 / (2 * objective.beta))


def _orpo(objective: ObjectiveConfig, scores: Sides, kl: jax.Array) -> jax.Array:
    odds = scores - jnp.log(-jnp.expm1(jnp.minimum(scores, -1e-7)))  # of a mean probability p: log p - log (1 - p)
    return -objective.beta * jax.nn.log_sigmoid(odds[..., 0] - odds[..., 1])


def _kto(objective: ObjectiveConfig, scores: Sides, kl: jax.Array) -> jax.Array:
    signs, weights = jnp.array([1.0, -1.0]), jnp.array([objective.desirable_weight, objective.undesirable_weight])
    return weights[None, None] * (1 - jax.nn.sigmoid(objective.beta * signs[None, None] * (scores - kl)))


_LOSSES: dict[str, Callable[[ObjectiveConfig, Sides, jax.Array], jax.Array]] = {
    "dpo": _dpo, "cpo": _dpo, "ipo": _ipo, "simpo": _simpo, "orpo": _orpo, "kto": _kto,
    "reward": _reward,
}  # fmt: skip
"""Loss of each pair [B, T], or of each answer [B, T, 2], by kind; from scores: log-probabilities of answers, over those of
the reference where there is one, per token where the method says so; or what the score head gives."""


@functools.partial(jax.jit, static_argnums=0)
def eval_sums(config: Config, model: Llama, batch: Batch) -> Sums:
    """Returns the sums of an evaluation's batch."""
    config, weights = plainly(config), PreparedWeights(whole_over_data(model, config.model.compute_dtype))
    whole = look_at_whole(config, weights, batch)

    def add(sums: Sums, micro_batch: Batch) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, sums, preference_loss(weights, micro_batch, config, whole)[1]), None

    return lax.scan(add, no_sums(), batch)[0]


@functools.partial(jax.jit, static_argnums=0)
def reference_log_probs(config: Config, model: Llama, batch: Batch) -> dict[str, Float32[Array, "B T"]]:
    """Returns the cached reference's fields of a batch of one micro-batch, whole on every device, in rows' own order.

    Args:
        config: the run.
        model: the weights that it starts from.
        batch: its other fields, [1, B, T].
    """
    weights = PreparedWeights(whole_over_data(model, config.model.compute_dtype))
    rows = jax.tree.map(lambda array: array[0], batch)
    found = {"reference": log_probs(weights, rows, plainly(config))}
    if config.objective.kind == "kto":
        found[OTHER + "reference"] = log_probs(weights, _others(rows), plainly(config))
    return jax.tree.map(lambda array: jax.reshard(array, jax.P(None, None)), found)


def plainly(config: Config) -> Config:
    """Returns the run with the forms of a pass without gradients."""
    model = dataclasses.replace(config.model, remat="none")
    return dataclasses.replace(config, model=model, parallel=PLAIN, offload=ON_CARD)


def no_sums() -> Sums:
    """Returns sums of nothing."""
    return LossSums(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32)), dict.fromkeys(TOTALS, jnp.zeros(()))
