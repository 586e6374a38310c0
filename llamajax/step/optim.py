"""Optimizers and the learning-rate schedule, as one optax chain built from the configuration.

Clipping is not part of the chain: `train_step` needs the global norm anyway, to report it and to skip non-finite steps, and
scales the gradients once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from llamajax.config.training import MOMENTS, Moments, OptimizerConfig
from llamajax.errors import ConfigError
from llamajax.parallel.arrays import named_arrays

Direction = Callable[[OptimizerConfig], optax.GradientTransformation]
"""Makes the transformation from gradients to the direction of an update; weight decay and the learning rate come after
it."""

DIRECTIONS: dict[str, Direction] = {
    "adamw": lambda config: optax.scale_by_adam(config.b1, config.b2, config.eps),
}
"""Directions by the optimizer's name; see `llamajax.config.training.MOMENTS`."""


def register(name: str, direction: Direction, moments: Moments) -> None:
    """Registers a custom optimizer for configurations that are read afterwards, in every process of the run.

    Args:
        name: value of `optimizer.name`.
        direction: makes the transformation; each array of its state with a weight's path and shape is a moment.
        moments: number of moments that it keeps, for plans.
    """
    DIRECTIONS[name], MOMENTS[name] = direction, moments


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of updates already applied.

    Warm-up is linear and reaches the peak with update number `warmup_steps`; a decay ends at `min_lr_ratio * learning_rate`
    with the last of `num_steps` updates. If that is 0, it ends one update later, as in the schedules of transformers and
    Megatron-LM: an update by 0 would learn nothing.
    """
    after_warmup = _after_warmup(config, num_steps - config.warmup_steps)
    if config.warmup_steps == 0:
        return after_warmup
    peak = config.learning_rate
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after_warmup], [config.warmup_steps])


def _after_warmup(config: OptimizerConfig, num_updates: int) -> optax.Schedule:
    """Returns the schedule of the `num_updates` updates after the warm-up."""
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


def make_optimizer(config: OptimizerConfig, num_steps: int, *, whole: bool = True) -> optax.GradientTransformation:
    """Returns the optimizer `config.name` with decoupled decay of all parameters except those in `no_weight_decay`.

    The moments are sharded like the parameters, because they are created from them.

    Args:
        config: the optimizer.
        num_steps: steps of the run.
        whole: it gets all parameters at once, so each of `no_weight_decay` must match one.
    """
    mask = partial(decay_mask if whole else _decayed, config)
    return optax.chain(
        _keep_in(DIRECTIONS[config.name](config), jnp.dtype(config.moment_dtype)),
        optax.add_decayed_weights(config.weight_decay, mask=mask),
        optax.scale_by_learning_rate(learning_rate(config, num_steps)),
    )


def decay_mask(config: OptimizerConfig, params: Any) -> Any:
    """Returns True for every parameter that weight decay applies to; same tree as `params`.

    Raises:
        ConfigError: an entry of `no_weight_decay` matches no parameter name, for example a misspelt one. The default entries
            are always valid, whether or not a model has such parameters.
    """
    names = list(named_arrays(params))
    check_names("optimizer.no_weight_decay", config.no_weight_decay, names, OptimizerConfig.no_weight_decay)
    return _decayed(config, params)


def _decayed(config: OptimizerConfig, params: Any) -> Any:
    decayed = [not any(part in name for part in config.no_weight_decay) for name in named_arrays(params)]
    return jax.tree.unflatten(jax.tree.structure(params), decayed)


def check_names(key: str, parts: Sequence[str], names: Sequence[str], also: Sequence[str] = ()) -> None:
    """Raises `ConfigError` where one of the `parts` in the setting `key` is a substring of none of the `names` or `also`."""
    if unused := [part for part in parts if not any(part in name for name in (*names, *also))]:
        raise ConfigError(
            f"{key}: {', '.join(unused)} matches no parameter name; correct or remove it; the names are {', '.join(names)}"
        )


def moments(opt_state: Any, params: Any) -> list[dict[str, jax.Array]]:
    """Returns a list with the first moments, the second moments and so on, each by parameter name, of the parameters that
    have them."""
    kept: dict[str, list[jax.Array]] = {}
    for name, leaf in zip(_moment_of(opt_state, params), jax.tree.leaves(opt_state), strict=True):
        if name is not None:
            kept.setdefault(name, []).append(leaf)
    most = max(map(len, kept.values()), default=0)
    return [{name: own[place] for name, own in kept.items() if place < len(own)} for place in range(most)]


def _moment_of(opt_state: Any, params: Any) -> list[str | None]:
    """Returns for each leaf of `opt_state` the name of its parameter, if it is a moment: it has the parameter's shape, and
    its path ends in the parameter's path. None for other leaves."""
    shapes = {name: weight.shape for name, weight in named_arrays(params).items()}
    return [
        next((name for name, shape in shapes.items() if path.endswith(f".{name}") and leaf.shape == shape), None)
        for path, leaf in named_arrays(opt_state).items()
    ]


def _keep_in(inner: optax.GradientTransformation, dtype: jnp.dtype) -> optax.GradientTransformation:
    """Wraps `inner` so that its moments are stored in `dtype` between updates and are float32 during them."""

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
