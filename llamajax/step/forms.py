"""What `auto` comes to in `parallel`: the forms in which the devices of a mesh share the training step, and why."""

import dataclasses
from collections.abc import Mapping

from llamajax.config.formulas import expected_bytes, layer_matrix_bytes
from llamajax.config.gpus import planned_gpu
from llamajax.config.parallel import StackForm, num_parts
from llamajax.config.run import Config
from llamajax.kernels.forms import sequence_form
from llamajax.kernels.plain import MAX_CHUNK_SCORES
from llamajax.parallel.allowance import memory_fraction
from llamajax.parallel.matmul import tensor_form
from llamajax.step.loss import MAX_CHUNK_LOGITS
from llamajax.units import format_bytes

PREFETCHED_LAYERS = 4
"""Layers of weights that prefetching keeps more than a scan does: the next one's, and gradients of two, unreduced."""


def with_forms(config: Config, axes: Mapping[str, int]) -> tuple[Config, dict[str, str]]:
    """The run with every form of `parallel` chosen, and by setting in one line which and why, where there is a choice.

    Args:
        config: the run.
        axes: sizes of the mesh axes.
    """
    chosen = {
        "stack": stack_form(config, axes),
        "sequence": sequence_form(config, axes),
        "tensor": tensor_form(config, axes),
    }
    parallel = dataclasses.replace(config.parallel, **{setting: form for setting, (form, _) in chosen.items()})
    told = {setting: f"{form}: {reason}" for setting, (form, reason) in chosen.items() if axes.get(setting) != 1}
    return dataclasses.replace(config, parallel=parallel), told


def stack_form(config: Config, axes: Mapping[str, int]) -> tuple[StackForm, str]:
    """How the layers run, and why, in one line."""
    if config.parallel.stack != "auto":
        return config.parallel.stack, "parallel.stack says so"
    shards = num_parts("embed", axes)
    if num_parts("batch", axes) * num_parts("seq", axes) == 1:
        return "scan", "there is nothing to gather or to reduce"
    if config.mesh.num_cpu_devices is not None:
        return "scan", "emulated devices hide nothing"
    layer = layer_matrix_bytes(config.model) // num_parts("mlp", axes)
    if not _fits(config, PREFETCHED_LAYERS * layer):
        return "scan", f"{format_bytes(PREFETCHED_LAYERS * layer)} more, for four layers' weights, would hardly fit"
    if shards == 1:
        return "prefetch", f"{format_bytes(layer)} of gradients are reduced while the layer below computes"
    return "prefetch", f"{format_bytes(layer)} of weights come from {shards} devices while the layer before computes"


def _fits(config: Config, more: int) -> bool:
    """Whether so many bytes more should fit the planned GPU by the formulas; true if none is named."""
    if config.hardware.gpu == "none":
        return True
    expected = expected_bytes(config, max_chunk_scores=MAX_CHUNK_SCORES, max_chunk_logits=MAX_CHUNK_LOGITS)
    return sum(expected.values()) + more <= memory_fraction(config) * planned_gpu(config.hardware).memory_bytes
