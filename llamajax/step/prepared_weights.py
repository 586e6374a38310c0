"""Weights prepared once per step and reused by all micro-batches, depending on `parallel.zero` and `parallel.grad_reduce`:
they are gathered once, and their gradients are reduced once."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from llamajax.config.run import Config
from llamajax.config.stages import EMPTY, layers_of_stages
from llamajax.model import Llama
from llamajax.parallel.float8 import E4M3
from llamajax.parallel.stages import exchange, num_stages
from llamajax.parallel.zero import DATA, gathered, in_float8, summed_late, token_axes, whole_over_data, with_value


def prepare(config: Config, model: Llama) -> Llama:
    """Returns `PreparedWeights.trained` of a step, a linear function of the weights as stored, or of some of them.
    Micro-batches compute gradients for the prepared weights, and the sum goes back through this function once.

    The weights are whole for `zero: 1`. Otherwise they are each device's part; if gradients wait for the end of the step,
    the embedding, the head and, where the layers would otherwise begin and end with waiting, the first layer are whole. On a
    mesh with a pipeline, each stage has its own layers, one in each slot.
    """
    parallel, dtype = config.parallel, config.model.compute_dtype
    if num_stages() > 1:
        model = in_slots(model, parallel.pipeline_chunks or 1, dtype, config.mesh.stages)
    at_the_end = parallel.grad_reduce == "step"
    left_open = token_axes() if at_the_end else DATA if parallel.zero_data else ()
    trained = summed_late(whole_over_data(model, dtype, left_open=left_open))
    if parallel.zero == 1:
        return gathered(trained, dtype)
    if at_the_end:
        if parallel.prefetches and config.model.experts.layer_step == 1:
            trained.whole_first = gathered(_first(trained.layers), dtype)
        trained.embedding = gathered(trained.embedding, dtype)
        trained.head = None if trained.head is None else gathered(trained.head, dtype)
    return trained


def in_slots(model: Llama, chunks: int, dtype: DTypeLike, counts: Sequence[int] = ()) -> Llama:
    """Returns the weights as stored, with the layers in the slots of the stages of a pipeline; matrices in `dtype`. `counts`
    as for `layers_of_stages`."""
    config = model.config
    table = np.array(layers_of_stages(config.num_layers, num_stages(), chunks, counts, config.dense_layers))
    of_experts = [layer for layer in range(config.num_layers) if layer not in config.dense_layers]
    by_slot = dict[int, Any]()
    for stack, layers in ((model.dense_layers, config.dense_layers), (model.layers, of_experts)):
        own = [slot for slot in range(table.shape[2]) if table[:, :, slot].max() in layers]
        # The index of each layer within its stack; the last one is that of an empty slot.
        index = np.full(config.num_layers + 1, EMPTY)
        index[list(layers)] = np.arange(len(layers))
        by_slot |= zip(own, _stack_in_slots(stack, index[table[:, :, own]], dtype) if own else [], strict=True)
    arranged = jax.tree.map(lambda weight: weight, model)
    arranged.layers, arranged.dense_layers = nnx.data(tuple(by_slot[slot] for slot in sorted(by_slot))), nnx.data(None)
    return arranged


def _stack_in_slots(stack: Any, table: np.ndarray, dtype: DTypeLike) -> list[Any]:
    """Returns the weights in each slot of `table`, which names layers of the stack."""

    def slots_of(param: nnx.Param) -> list[nnx.Param]:
        stored = param[...]
        if param.compute is not None and isinstance(stored, jax.Array):
            stored = stored.astype(dtype)
        arrays, tree = jax.tree.flatten(stored)
        slots = zip(*(exchange(array, table) for array in arrays), strict=True)
        return [with_value(param, tree.unflatten(own)) for own in slots]

    weights, tree = jax.tree.flatten(stack, is_leaf=lambda node: isinstance(node, nnx.Param))
    slots = list(map(slots_of, weights))
    return [tree.unflatten(own[slot] for own in slots) for slot in range(table.shape[2])]


def whole(model: Llama) -> Llama:
    """Returns the weights of a pipeline's stages as an evaluation uses them, without a way back for gradients."""
    dtype = model.config.compute_dtype
    return gathered(whole_over_data(in_slots(model, 1, dtype), dtype), dtype)


def copies(config: Config, trained: Llama) -> Llama | None:
    """Returns `PreparedWeights.copies` of a step: with `zero: 2` whole copies of all weights; in any case float8 copies of
    the layers' matrices in float8, each device's part of them unless whole. None: there are no copies."""
    model, dtype, names = config.model, config.model.compute_dtype, config.model.float8_weights
    whole = config.parallel.zero == 2
    if not whole and not names:
        return None
    made: Llama = jax.tree.map(lambda _: None, trained, is_leaf=lambda node: isinstance(node, nnx.Param))
    made.layers, made.dense_layers, made.whole_first = trained.layers, trained.dense_layers, trained.whole_first
    if names:
        form = E4M3 if model.matmul_dtype == "float8" else dtype
        of_chunks = num_stages() > 1 and (config.parallel.pipeline_chunks or 1) > 1
        made.layers, made.dense_layers = in_float8(
            (made.layers, made.dense_layers), names, form, dtype, num_stacked=1 + of_chunks
        )
    if whole:
        made.layers, made.dense_layers = gathered((made.layers, made.dense_layers), dtype)
    if names and made.whole_first is not None:
        made.whole_first = gathered(_first(made.layers), dtype)
    if whole:
        made.embedding = gathered(trained.embedding, dtype)
        made.head = None if trained.head is None else gathered(trained.head, dtype)
    return made


def _first(layers: Any) -> Any:
    return jax.tree.map(lambda stacked: stacked[0], layers)
