"""What devices hold of the weights for a whole step, for all its micro-batches: what `parallel.zero` and
`parallel.grad_reduce` gather once, and whose gradients they reduce once."""

from typing import Any

import jax
from flax import nnx

from llamajax.config.run import Config
from llamajax.model import Llama
from llamajax.parallel.float8 import E4M3
from llamajax.parallel.zero import DATA, gathered, in_float8, summed_late, token_axes, whole_over_data


def prepare(config: Config, model: Llama) -> Llama:
    """`PreparedWeights.trained` of a step, a linear function of the weights as they are stored, or of some of them: micro-
    batches have their gradients for these, whose sum goes back through it once.

    They are whole for `zero: 1`; else each device's part, of which embedding, head and, where the layers otherwise would
    begin and end with waiting, the first layer are whole if gradients wait for the end.
    """
    parallel, dtype = config.parallel, config.model.compute_dtype
    at_the_end = parallel.grad_reduce == "step"
    left_open = token_axes() if at_the_end else DATA if parallel.zero_data else ()
    trained = summed_late(whole_over_data(model, dtype, left_open=left_open))
    if parallel.zero == 1:
        return gathered(trained, dtype)
    if at_the_end:
        if parallel.prefetches:
            trained.whole_first = gathered(_first(trained.layers), dtype)
        trained.embedding = gathered(trained.embedding, dtype)
        trained.head = None if trained.head is None else gathered(trained.head, dtype)
    return trained


def copies(config: Config, trained: Llama) -> Llama | None:
    """`PreparedWeights.copies` of a step: with `zero: 2` all of them whole, and the layers' matrices in float8 in any case,
    each device's part of them unless they are whole. None: there are none."""
    model, dtype, names = config.model, config.model.compute_dtype, config.model.float8_weights
    whole = config.parallel.zero == 2
    if not whole and not names:
        return None
    made: Llama = jax.tree.map(lambda _: None, trained, is_leaf=lambda node: isinstance(node, nnx.Param))
    made.layers, made.whole_first = trained.layers, trained.whole_first
    if names:
        form = E4M3 if model.matmul_dtype == "float8" else dtype
        made.layers = in_float8(made.layers, names, form, dtype)
    if whole:
        made.layers = gathered(made.layers, dtype)
    if names and made.whole_first is not None:
        made.whole_first = gathered(_first(made.layers), dtype)
    if whole:
        made.embedding = gathered(trained.embedding, dtype)
        made.head = None if trained.head is None else gathered(trained.head, dtype)
    return made


def _first(layers: Any) -> Any:
    return jax.tree.map(lambda stacked: stacked[0], layers)
