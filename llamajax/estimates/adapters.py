"""Numbers and bytes of adapters and of the frozen weights beside them, by arithmetic."""

import math
from collections.abc import Mapping

from llamajax.config.adapters import AdaptersConfig, Projection
from llamajax.config.layer_weights import PROJECTION_DIMS
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import num_parts
from llamajax.estimates.quantized import bits_per_weight

_ROWS: tuple[Projection, ...] = ("o", "down")
"""Projections of row matrices, with the residual stream as their output."""


def _sizes(model: ModelConfig, projection: Projection) -> tuple[int, int]:
    """Returns the sizes of the residual stream and of a projection's other dims."""
    sizes = {"K": model.num_kv_heads, "G": model.num_heads // model.num_kv_heads, "H": model.head_dim, "F": model.mlp_dim}
    return model.embed_dim, math.prod(sizes[dim] for dim in PROJECTION_DIMS[projection].split())


def _path(projection: Projection) -> str:
    return f"layers.{'mlp' if projection in ('gate', 'up', 'down') else 'attention'}.{projection}_adapter"


def adapter_weights(adapters: AdaptersConfig, model: ModelConfig) -> dict[str, int]:
    """Returns the number of parameters of every adapter array, over all layers, by its name in the model."""
    found = dict[str, int]()
    for projection in adapters.targets if adapters.enabled else ():
        wide, narrow = _sizes(model, projection)
        inputs, outputs = (narrow, wide) if projection in _ROWS else (wide, narrow)
        own = {"a": inputs * adapters.rank, "b": outputs * adapters.rank}
        own |= {"magnitude": outputs} if adapters.kind == "dora" else {}
        found |= {f"{_path(projection)}.{name}": model.num_layers * size for name, size in own.items()}
    return found


def adapter_numbers(adapters: AdaptersConfig, model: ModelConfig, mesh: Mapping[str, int], *, zero_data: bool) -> int:
    """Returns the number of adapter parameters that a device stores: the factor with the residual stream is split as that
    dim of the matrices is; the other one by heads or MLP, and by ranks where they divide."""
    embed, tensor, stages = num_parts("embed", mesh), mesh["tensor"], mesh["pipeline"]
    data = mesh["data"] if zero_data else 1
    of_stage = stages if model.num_layers % stages == 0 else 1

    def shards(size: int) -> int:
        return 1 if size % embed else embed * data if size % (embed * data) == 0 else embed

    total = 0
    for projection in adapters.targets if adapters.enabled else ():
        wide, narrow = _sizes(model, projection)
        is_split = "F" in PROJECTION_DIMS[projection] or model.num_kv_heads % tensor == 0
        own = wide * adapters.rank // shards(wide)
        own += narrow * adapters.rank // shards(adapters.rank) // (tensor if is_split else 1)
        if adapters.kind == "dora":
            own += wide if projection in _ROWS else narrow // (tensor if is_split else 1)
        total += model.num_layers // of_stage * own
    return total


def base_bits(adapters: AdaptersConfig, *, is_layer_matrix: bool) -> float:
    """Returns the bits of a frozen number, with its share of the scales."""
    if is_layer_matrix and adapters.quantized_form is not None:
        return bits_per_weight(adapters.quantized_form, double=adapters.double_quantization)
    return 32 if adapters.base_dtype == "float32" else 16
