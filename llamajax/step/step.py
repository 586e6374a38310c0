"""The training step: one pure, donated function from (state, batch) to (state, metrics)."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from llamajax.config.objective import ObjectiveConfig
from llamajax.config.run import Config
from llamajax.model import Llama
from llamajax.parallel.host_memory import added, cast, is_on_host, total
from llamajax.parallel.stages import num_stages
from llamajax.parallel.zero import PreparedWeights, as_frozen, no_gradient, whole_over_data
from llamajax.step import host_state, pipeline, policy, preferences
from llamajax.step.balance import Statistics, balanced, expert_metrics, with_statistics, without_statistics
from llamajax.step.batch import IGNORE, Batch, token_seeds
from llamajax.step.frozen import combine, partition
from llamajax.step.loss import LossSums, loss_fn
from llamajax.step.optim import learning_rate, make_optimizer
from llamajax.step.prepared_weights import copies, prepare, whole
from llamajax.step.resolve import ResolvedRun
from llamajax.step.state import TrainState

Result = TypeVar("Result")


def loss_and_grads(run: ResolvedRun, model: Llama, batch: Batch) -> tuple[dict[str, jax.Array], Llama]:
    """Returns loss and gradients of a batch: summed over micro-batches and tokens, then divided once.

    Dividing sums by the global token count, rather than averaging means, keeps the result independent of packing,
    accumulation and mesh.

    Returns:
        `loss` (cross-entropy alone, in nats per token; NaN without counted tokens), the layers' auxiliary values by name,
        also per token, and `tokens`, as float32 and int32 scalars; for preferences and completions, the means that
        `preference_metrics` or `policy_metrics` takes, and their number for `tokens`; and the gradients, a `Llama` in
        float32 whatever the dtype of the parameters, in their shardings, with None for frozen weights. Where moments are in
        host memory, their dtype is `offload.gradient_dtype`.
    """
    means, sums = summed_gradients(run, model, batch)
    tokens = jnp.maximum(means["tokens"], 1)
    return means, jax.tree.map(lambda grad: grad / tokens, sums)


def summed_gradients(run: ResolvedRun, model: Llama, batch: Batch) -> tuple[dict[str, jax.Array], Llama]:
    """Returns the same, but gradients of the sum over all tokens, and in `offload.gradient_dtype` where weights or moments
    are in host memory."""
    config, prepared = run.config, begin(run.config, model)
    chex.assert_equal_shape(list(batch.values()))
    own, fixed, own_copies = prepared.own, prepared.fixed, prepared.copies
    if num_stages() > 1:
        forms = {"parallel": config.parallel, "remat": config.model.remat, "z_loss_weight": config.train.z_loss_weight}
        forms["counts"] = config.mesh.stages
        sums = pipeline.accumulate(combine(own, fixed), own_copies, batch, prepared.zeros, **forms)
    else:
        sums = _accumulate(config, own, fixed, own_copies, batch, prepared.zeros)
    return end(prepared, *sums)


class Prepared(NamedTuple):
    """Weights at the start of a step, and the way of their gradients back."""

    own: Llama
    """Trained weights, prepared."""
    fixed: Llama
    """Frozen weights, prepared."""
    copies: Llama | None
    """See `llamajax.step.prepared_weights.copies`."""
    wide: Llama
    """Shapes of `own` for float32 weights."""
    pull_back: Callable[[Llama], tuple[Llama]]
    """Returns the gradients of the weights as stored, from those of `wide`."""
    zeros: tuple[Llama, pipeline.Sums]
    """Gradients of `own`, left to be reduced, and sums, to start from."""


def begin(config: Config, model: Llama) -> Prepared:
    """Prepares the weights of a step."""
    trained, frozen = partition(config, model)
    trained = with_statistics(trained)
    own, fixed = prepare(config, trained), as_frozen(prepare(config, frozen))
    own_copies = copies(config, combine(own, fixed))
    # Of float32 weights, so that gradients are not rounded where they need not travel.
    width = config.offload.gradient_dtype if config.offload.state_share else "float32"
    wide, pull_back = jax.vjp(
        functools.partial(prepare, config),
        jax.tree.map(lambda weight: weight if is_on_host(weight) else weight.astype(width), trained),
    )
    zero = jnp.zeros((), config.train.grad_accum_dtype if config.train.grad_accum_steps > 1 else width)
    none = (_no_losses(), _no_auxiliary(model))
    if config.objective.kind != "next_token":
        none = policy.no_sums() if config.objective.is_on_policy else preferences.no_sums()
    zeros = (jax.tree.map(lambda weight: no_gradient(weight, zero), own), none)
    return Prepared(own, fixed, own_copies, wide, pull_back, zeros)


def end(prepared: Prepared, grads: Llama, summed: pipeline.Sums) -> tuple[dict[str, jax.Array], Llama]:
    """Returns the results of `summed_gradients` from the summed gradients of the prepared weights and the summed losses."""
    sums, auxiliary = summed
    (grads,) = prepared.pull_back(jax.tree.map(lambda grad, weight: cast(grad, weight.dtype), grads, prepared.wide))
    grads, statistics = without_statistics(grads)
    grads = jax.tree.map(_laid_out_as_stored, grads)
    # NaN where there is nothing to take the mean of.
    means = {name: total / sums.num_counted for name, total in ({"loss": sums.cross_entropy} | auxiliary).items()}
    of_experts = {} if statistics is None else {"expert_statistics": statistics}
    return means | of_experts | {"tokens": sums.num_counted}, grads


def _accumulate(
    config: Config, own: Llama, fixed: Llama, copies: Llama | None, batch: Batch, zeros: Any
) -> tuple[Llama, pipeline.Sums]:
    """Returns the gradients of all micro-batches, one after the other, and their summed losses; see
    `llamajax.step.pipeline.accumulate`."""

    def weights(own: Llama) -> PreparedWeights[Llama]:
        return PreparedWeights(combine(own, fixed), copies)

    whole = preferences.look_at_whole(config, weights(own), batch) if config.objective.is_preference else None

    def micro_loss(own: Llama, micro_batch: Batch) -> tuple[jax.Array, Any]:
        if config.objective.is_on_policy:
            return policy.policy_loss(weights(own), micro_batch, config)
        if whole is not None:
            return preferences.preference_loss(weights(own), micro_batch, config, whole)
        return loss_fn(
            weights(own), micro_batch, z_loss_weight=config.train.z_loss_weight, parallel=config.parallel,
            remat=config.model.remat, offload=config.offload,
        )  # fmt: skip

    def micro_step(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
        if config.train.grad_accum_steps > 1:
            # Where XLA unrolls the loop, the next micro-batch would start before this one ends.
            sums, micro_batch = lax.optimization_barrier((sums, micro_batch))
        own_sums = jax.grad(micro_loss, has_aux=True)(own, micro_batch)
        return jax.tree.map(added, sums, own_sums), None

    if not any(map(is_on_host, jax.tree.leaves(own))):
        return lax.scan(micro_step, zeros, batch)[0]
    # There are no zeros in host memory to start from.
    first = jax.grad(micro_loss, has_aux=True)(own, jax.tree.map(lambda x: x[0], batch))
    if config.train.grad_accum_steps == 1:
        return first
    grads = jax.tree.map(lambda x: cast(x, jnp.dtype(config.train.grad_accum_dtype)), first[0])
    return lax.scan(micro_step, (grads, first[1]), jax.tree.map(lambda x: x[1:], batch))[0]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(run: ResolvedRun, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """Runs one optimizer step.

    Returns:
        The next state, and scalars: the metrics of `summed_gradients`, `grad_norm` (before clipping), `learning_rate`,
            `skipped_steps`, `skipped_in_a_row`.
    """
    if run.config.adapters.enabled and run.config.adapters.dropout:
        batch |= {"seeds": token_seeds(run.config.seed, state.step, batch["tokens"])}
    metrics, sums = summed_gradients(run, state.weights, batch)
    return finish(run.config, state, metrics, sums, divisor=jnp.maximum(metrics["tokens"], 1))


def finish(
    config: Config, state: TrainState, metrics: dict[str, jax.Array], grads: Any, divisor: jax.Array | int = 1
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns the results of `train_step` from its summed metrics and gradients; the step's forms with several programs end
    with it too. Arguments as for `apply_gradients`."""
    statistics = metrics.get("expert_statistics")
    metrics = {name: value for name, value in metrics.items() if name != "expert_statistics"}
    state, update_metrics = apply_gradients(config, state, grads, metrics["tokens"], divisor, statistics)
    of_experts = {} if statistics is None else expert_metrics(statistics, config.model.experts)
    return state, told(config.objective, metrics) | of_experts | update_metrics


def told(objective: ObjectiveConfig, metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the metrics of `summed_gradients` as a run reports them."""
    if objective.kind == "next_token":
        return metrics
    if objective.is_on_policy:
        counted = "completions" if objective.length_normalized else "tokens"
        return policy.policy_metrics(objective, metrics) | {counted: metrics["tokens"]}
    counted = "answers" if objective.kind == "kto" else "pairs"
    return preferences.preference_metrics(objective, metrics) | {counted: metrics["tokens"]}


@jax.named_scope("update")
def apply_gradients(
    config: Config,
    state: TrainState,
    grads: Any,
    tokens: jax.Array,
    divisor: jax.Array | int = 1,
    statistics: Statistics | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Clips and applies gradients, once they are divided by `divisor`. Gradients that are not finite, or that come from no
    tokens, are counted and leave weights and optimizer state unchanged. `statistics` move the experts' biases."""
    trained, frozen = partition(config, state.model)
    chex.assert_trees_all_equal_shapes(grads, trained)
    is_away = host_state.is_away(trained, state.opt_state)
    if not is_away:  # otherwise rounded gradients would be rounded again; their update divides them
        grads, divisor = jax.tree.map(lambda grad: grad / divisor, grads), 1
    grad_norm = global_norm(grads) / divisor
    finite = jnp.isfinite(grad_norm)
    applied = finite & (tokens > 0)
    scale = jnp.ones(())
    if config.optimizer.grad_clip_norm is not None:
        scale = jnp.minimum(1.0, config.optimizer.grad_clip_norm / jnp.maximum(grad_norm, 1e-12))

    params: Any = trained
    copies = state.copies
    if is_away:
        optimizer = make_optimizer(config.optimizer, config.train.num_steps, whole=False)
        # The update of some weights would otherwise start before all gradients are there, and then wait for them.
        grads, scale = lax.optimization_barrier((grads, scale / divisor))
        model, opt_state, copies = host_state.update(optimizer, params, state.opt_state, copies, grads, scale, applied)
    else:
        optimizer = make_optimizer(config.optimizer, config.train.num_steps)
        if config.optimizer.grad_clip_norm is not None:
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        updated = (optax.apply_updates(params, updates), opt_state)
        model, opt_state = jax.tree.map(lambda new, old: jnp.where(applied, new, old), updated, (trained, state.opt_state))

    rate = learning_rate(config.optimizer, config.train.num_steps)(state.step - state.skipped_steps)
    state = TrainState(
        step=state.step + 1,
        model=balanced(combine(model, frozen), statistics, applied),
        opt_state=opt_state,
        rng=state.rng,
        skipped_steps=state.skipped_steps + ~applied,
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        copies=copies,
    )
    return state, {
        "grad_norm": grad_norm,
        "learning_rate": jnp.asarray(rate, jnp.float32),
        "skipped_steps": state.skipped_steps,
        "skipped_in_a_row": state.skipped_in_a_row,
    }


def global_norm(grads: Llama) -> jax.Array:
    """Returns the norm of all gradients together, float32, of those in host memory too."""
    squares = [total(lambda own, _: jnp.sum(jnp.square(own.astype(jnp.float32))), g) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares))


@jax.jit
def eval_step(model: Llama, batch: Batch, token_bytes: jax.Array) -> tuple[LossSums, jax.Array]:
    """Returns the summed losses of a batch, and the bytes of text that its counted targets represent (int32).

    Args:
        model: the Llama.
        batch: the batch.
        token_bytes: bytes that each token represents, int32 [V].
    """

    targets = batch["targets"]
    num_bytes = token_bytes.at[jnp.maximum(targets, 0)].get(out_sharding=jax.typeof(targets).sharding.spec)
    num_bytes = jnp.sum(jnp.where(targets == IGNORE, 0, num_bytes))
    if num_stages() > 1:
        return pipeline.forward_losses(whole(model), batch, (_no_losses(), _no_auxiliary(model)))[0], num_bytes
    weights = PreparedWeights(whole_over_data(model, model.config.compute_dtype))

    def micro_step(sums: LossSums, micro_batch: Batch) -> tuple[LossSums, None]:
        _, (loss_sums, _) = loss_fn(weights, micro_batch, z_loss_weight=0.0)
        return jax.tree.map(jnp.add, sums, loss_sums), None

    return lax.scan(micro_step, _no_losses(), batch)[0], num_bytes


def one_behind(results: Iterable[Result]) -> Iterator[Result]:
    """Yields each result once the next one has been requested: a caller that waits for one keeps the devices busy with the
    next, and never queues more than two."""
    behind: list[Result] = []
    for result in results:
        behind.append(result)
        if len(behind) == 2:
            yield behind.pop(0)
    yield from behind


def _laid_out_as_stored(grad: jax.Array) -> jax.Array:
    """Returns the gradient in row-major layout: otherwise XLA would update in the layout of a scattered gradient and copy
    all updated arrays."""
    if is_on_host(grad):
        return grad
    lies, rows = jax.typeof(grad).sharding.spec, Layout(tuple(range(grad.ndim)))
    return jax.shard_map(lambda own: with_layout_constraint(own, rows), in_specs=lies, out_specs=lies, check_vma=False)(grad)


def _no_losses() -> LossSums:
    return LossSums(loss=jnp.zeros(()), cross_entropy=jnp.zeros(()), num_counted=jnp.zeros((), jnp.int32))


def _no_auxiliary(model: Llama) -> dict[str, jax.Array]:
    return dict.fromkeys(model.auxiliary, jnp.zeros(()))
