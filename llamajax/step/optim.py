"""Optimizers and the schedule, as one optax chain made from the configuration.

Clipping is not part of the chain: `train_step` needs the global norm anyway, to report it and to skip
non-finite steps, and scales the gradients once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from llamajax.config.training import MOMENTS, Moments, OptimizerConfig
from llamajax.errors import ConfigError
from llamajax.parallel.arrays import named_arrays

Direction = Callable[[OptimizerConfig], optax.GradientTransformation]
"""Makes what turns gradients into the direction of an update, which weight decay and the learning rate follow."""

DIRECTIONS: dict[str, Direction] = {
    "adamw": lambda config: optax.scale_by_adam(config.b1, config.b2, config.eps),
}
"""By the optimizer's name; see `llamajax.config.training.MOMENTS`."""


def register(name: str, direction: Direction, moments: Moments) -> None:
    """Lets configurations that are read from here on name an optimizer of one's own, in every process of the run.

    Args:
        name: for `optimizer.name`.
        direction: makes its transformation; each array of its state with a weight's path and shape is a moment.
        moments: how many of them it keeps, for plans.
    """
    DIRECTIONS[name], MOMENTS[name] = direction, moments


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates already applied.

    Warm-up is linear and reaches the peak with update number `warmup_steps`; a decay ends at
    `min_lr_ratio * learning_rate` with the last of `num_steps` updates. If that is 0, it ends one update later, as the
    schedules of transformers and Megatron-LM do: an update by 0 would learn nothing.
    """
    after_warmup = _after_warmup(config, num_steps - config.warmup_steps)
    if config.warmup_steps == 0:
        return after_warmup
    peak = config.learning_rate
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after_warmup], [config.warmup_steps])


def _after_warmup(config: OptimizerConfig, num_updates: int) -> optax.Schedule:
    """The schedule of the `num_updates` updates that follow the warm-up."""
    peak, end = config.learning_rate, config.learning_rate * config.min_lr_ratio
    beyond = 0 if end else 1
    match config.schedule:
        case "constant":
            return optax.constant_schedule(peak)
        case "linear":
            return optax.linear_schedule(peak, end, max(num_updates - 1 + beyond, 1))
        case "cosine":
            return optax.cosine_decay_schedule(peak, max(num_updates - 1 + beyond, 1), alpha=config.min_lr_ratio)
        case "wsd":
            assert config.decay_steps is not None
            decay = optax.linear_schedule(peak, end, config.decay_steps + beyond)
            # The first decayed update is already below the peak, so that there are `decay_steps` of them.
            last_at_peak = num_updates - config.decay_steps - 1
            return lambda count: decay(jnp.maximum(count - last_at_peak, 0))


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """`config.name` with decoupled decay of all parameters but those named in `no_weight_decay`.

    The moments are sharded as the parameters are, because they are made from them.
    """
    return optax.chain(
        _keep_in(DIRECTIONS[config.name](config), jnp.dtype(config.moment_dtype)),
        optax.add_decayed_weights(config.weight_decay, mask=lambda params: decay_mask(config, params)),
        optax.scale_by_learning_rate(learning_rate(config, num_steps)),
    )


def decay_mask(config: OptimizerConfig, params: Any) -> Any:
    """True for every parameter that weight decay applies to; same tree as `params`.

    Raises:
        ConfigError: a name in `no_weight_decay` is in no parameter's, as a misspelt one would be. The names of the default
            are correct, whether or not a model has such parameters.
    """
    names = list(named_arrays(params))
    check_names("optimizer.no_weight_decay", config.no_weight_decay, names, OptimizerConfig.no_weight_decay)
    decayed = [not any(part in name for part in config.no_weight_decay) for name in names]
    return jax.tree.unflatten(jax.tree.structure(params), decayed)


def check_names(key: str, parts: Sequence[str], names: Sequence[str], also: Sequence[str] = ()) -> None:
    """Raises `ConfigError` where one of the `parts` that the setting `key` gives is in none of these names, `also` apart."""
    if unused := [part for part in parts if not any(part in name for name in (*names, *also))]:
        raise ConfigError(
            f"{key}: {', '.join(unused)} is in no parameter's name; correct it or remove it; the names"
            f" are {', '.join(names)}"
        )


def moments(opt_state: Any, params: Any) -> list[dict[str, jax.Array]]:
    """The first moment of every parameter that has one, by the parameter's name; the second; and so on."""
    kept: dict[str, list[jax.Array]] = {}
    for name, leaf in zip(_moment_of(opt_state, params), jax.tree.leaves(opt_state), strict=True):
        if name is not None:
            kept.setdefault(name, []).append(leaf)
    most = max(map(len, kept.values()), default=0)
    return [{name: own[place] for name, own in kept.items() if place < len(own)} for place in range(most)]


def _moment_of(opt_state: Any, params: Any) -> list[str | None]:
    """Of each leaf of `opt_state`, the parameter that it is a moment of, whose shape it has and whose path ends its own."""
    shapes = {name: weight.shape for name, weight in named_arrays(params).items()}
    return [
        next((name for name, shape in shapes.items() if path.endswith(f".{name}") and leaf.shape == shape), None)
        for path, leaf in named_arrays(opt_state).items()
    ]


def _keep_in(inner: optax.GradientTransformation, dtype: jnp.dtype) -> optax.GradientTransformation:
    """`inner`, its moments stored in `dtype` between updates and in float32 during them."""

    def cast(state: Any, params: Any, to: jax.typing.DTypeLike) -> Any:
        leaves, tree = jax.tree.flatten(state)
        of = _moment_of(state, params)
        return jax.tree.unflatten(tree, [x.astype(to) if name else x for name, x in zip(of, leaves, strict=True)])

    def init(params: Any) -> Any:
        return cast(inner.init(params), params, dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new_state = inner.update(updates, cast(state, params, jnp.float32), params)
        return updates, cast(new_state, params, dtype)

    return optax.GradientTransformation(init, update)
