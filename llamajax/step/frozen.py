"""Splits the weights into trained and frozen ones (`train.frozen`, `adapters`)."""

from typing import Any

import jax
from flax import nnx

from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.model import Llama
from llamajax.parallel.arrays import named_arrays
from llamajax.step.optim import check_names


def partition(config: Config, model: Llama) -> tuple[Llama, Llama]:
    """Returns the trained weights and the frozen ones: two trees of the model's type, with None where the other has a
    weight.

    Raises:
        ConfigError: an entry of `frozen` matches no parameter name, or all parameters are frozen.
    """
    names = list(named_arrays(model, _is_weight))
    check_names("train.frozen", config.train.frozen, names)
    if all(map(config.is_frozen, names)):
        raise ConfigError(f"train.frozen: {', '.join(config.train.frozen)} leaves no parameter to train; remove some of it")
    weights, tree = jax.tree.flatten(model, is_leaf=_is_weight)
    pairs = [(None, x) if config.is_frozen(name) else (x, None) for name, x in zip(names, weights, strict=True)]
    trained, frozen = (jax.tree.unflatten(tree, side) for side in zip(*pairs, strict=True))
    return trained, frozen


def combine(trained: Any, frozen: Any) -> Any:
    """Joins the two trees of `partition`, or trees derived from both, weight by weight."""
    return jax.tree.map(
        lambda own, other: other if own is None else own, trained, frozen, is_leaf=lambda x: x is None or _is_weight(x)
    )


def _is_weight(node: Any) -> bool:
    return isinstance(node, nnx.Param)
