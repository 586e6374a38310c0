"""The weights of a pretrained model, read onto the mesh."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from llamajax.checkpoint.read import read_weights
from llamajax.config.model import ModelConfig
from llamajax.errors import CheckpointError
from llamajax.model import Llama
from llamajax.parallel.arrays import concretise, named_arrays
from llamajax.weights.load_array import read_array
from llamajax.weights.pretrained import Pretrained


def load_model(pretrained: Pretrained, config: ModelConfig) -> Llama:
    """The model on the current mesh, in `config.param_dtype`; processes call this together.

    On the host is never more than what this process's devices need of one layer's largest array, or of a
    vocabulary's table.

    Args:
        pretrained: where its weights are.
        config: the model's, but for settings that shape no weight; see `Pretrained.check`.

    Raises:
        CheckpointError: the checkpoint was deleted meanwhile, or is of another version of the model, or a weight is no
            finite number.
    """
    abstract = concretise(_abstract_model(config))
    arrays = named_arrays({"model": abstract})
    if pretrained.tensors is not None:
        leaves = [read_array(name, leaf, pretrained.tensors) for name, leaf in arrays.items()]
    else:
        as_stored = _abstract_model(dataclasses.replace(config, param_dtype=pretrained.config.param_dtype))
        leaves = read_weights(pretrained.source, concretise(as_stored), config.param_dtype)
    model = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    finite = jax.tree.leaves(_are_finite(model))
    if bad := [name for name, is_finite in zip(arrays, finite, strict=True) if not is_finite]:
        raise CheckpointError(
            f"{pretrained.source}: {', '.join(bad)} holds values that are no finite numbers; take weights from before that"
        )
    return model


def _abstract_model(config: ModelConfig) -> Llama:
    return jax.eval_shape(partial(Llama, config), jax.random.key(0))


@jax.jit
def _are_finite(model: Llama) -> Llama:
    """A bool [] for every weight, on every device."""
    return jax.tree.map(lambda weight: jnp.all(jnp.isfinite(weight)), model)
