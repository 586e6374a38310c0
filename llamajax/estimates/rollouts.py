"""Memory that a run on its own completions takes beside its training step."""

import math
from collections.abc import Mapping

from llamajax.config.parallel import num_parts
from llamajax.config.run import Config
from llamajax.estimates.formulas import DTYPE_BYTES, per_device, weights


def held_reference_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of a device's part of the weights that the run holds as its reference."""
    if not config.objective.holds_reference(config.adapters):
        return 0
    numbers = per_device(weights(config.model), num_parts("embed", mesh) * mesh["tensor"])
    return numbers * DTYPE_BYTES[config.model.compute_dtype]


def cache_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of a device's part of the keys and values of all completions that are written at once."""
    model, rows = config.model, config.objective.rollout.batch_size or config.train.micro_batch_size
    rows_here = math.ceil(rows / num_parts("batch", mesh))
    slots_here = math.ceil(config.data.seq_len / num_parts("seq", mesh))
    heads = model.computed_kv_heads(mesh) // num_parts("kv_heads", mesh)
    per_slot = 2 * model.num_layers * heads * model.head_dim * DTYPE_BYTES[model.compute_dtype]
    return rows_here * slots_here * per_slot
