"""What devices hold of the weights for a whole step, for all its micro-batches: what `parallel.zero` and
`parallel.grad_reduce` gather once, and whose gradients they reduce once."""

from dataclasses import dataclass

import jax

from llamajax.config.run import Config
from llamajax.model import Llama
from llamajax.model.llama import Copies, Layer
from llamajax.parallel.float8 import E4M3
from llamajax.parallel.zero import DATA, gathered, in_float8, summed_late, token_axes, whole_over_data


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Held:
    """Weights that micro-batches compute from and have their gradients for, which go back through `hold`."""

    model: Llama
    """Whole for `zero: 1`; else each device's part, of which embedding and head are whole if gradients wait for the end."""
    first: Layer | None
    """The first layer, whole, where the layers otherwise would begin and end with waiting."""


def hold(config: Config, model: Llama) -> Held:
    """From the weights as they are stored; a linear function."""
    parallel, dtype = config.parallel, config.model.compute_dtype
    at_the_end = parallel.grad_reduce == "step"
    left_open = token_axes() if at_the_end else DATA if parallel.zero_data else ()
    held = summed_late(whole_over_data(model, dtype, left_open=left_open))
    if parallel.zero == 1:
        return Held(gathered(held, dtype), None)
    first = None
    if at_the_end:
        if parallel.prefetches:
            first = gathered(jax.tree.map(lambda stacked: stacked[0], held.layers), dtype)
        held.embedding = gathered(held.embedding, dtype)
        held.head = None if held.head is None else gathered(held.head, dtype)
    return Held(held, first)


def copies(config: Config, held: Held) -> Copies | None:
    """What is computed with in place of held weights: with `zero: 2` all of them whole, and the layers' matrices in float8
    in any case, each device's part of them unless they are whole. None: nothing is."""
    model, names = config.model, config.model.float8_weights
    whole = config.parallel.zero == 2
    if not whole and not names:
        return None
    layers, first = held.model.layers, None
    if names:
        form = E4M3 if model.matmul_dtype == "float8" else model.compute_dtype
        layers = in_float8(layers, names, form, model.compute_dtype)
    if whole:
        layers = gathered(layers, model.compute_dtype)
    if names and held.first is not None:
        first = gathered(jax.tree.map(lambda stacked: stacked[0], layers), model.compute_dtype)
    if not whole:
        return Copies(layers, first)
    embedding = gathered(held.model.embedding, model.compute_dtype)
    head = embedding if held.model.head is None else gathered(held.model.head, model.compute_dtype)
    return Copies(layers, first, embedding, head)
