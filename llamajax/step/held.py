"""What devices hold of the weights for a whole step, for all its micro-batches: what `parallel.zero` and
`parallel.grad_reduce` gather once, and whose gradients they reduce once."""

from dataclasses import dataclass

import jax

from llamajax.config.run import Config
from llamajax.model import Llama
from llamajax.model.llama import Layer
from llamajax.parallel.zero import DATA, gathered, summed_late, token_axes, whole_over_data


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


def copies(config: Config, held: Held) -> Llama | None:
    """All weights whole, for `zero: 2`; they get no gradient."""
    return gathered(held.model, config.model.compute_dtype) if config.parallel.zero == 2 else None
