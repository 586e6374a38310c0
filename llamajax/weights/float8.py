"""Reads weights stored in float8 (e4m3) as wide numbers: each block of a matrix times its scale.

Supported are `fp8` of DeepSeek and transformers (`weight_scale_inv`, per block), `fbgemm_fp8` and `compressed-tensors`
(`weight_scale`: per tensor, per row, or per block). In both kinds the stored number is the factor to multiply by.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamajax.errors import ConfigError, show
from llamajax.weights.safetensors import DTYPES, Scales, Stored

_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
_SCALES = ("weight_scale_inv", "weight_scale")
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale")
"""Suffixes of scales for inference in eight bits, which weights do not need."""
_REMEDY = "convert it on a machine that can run it: model.dequantize().save_pretrained(OUT) of transformers"


def quantization_of(body: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
    """Returns the quantization section of a `config.json`; None if the weights are plain numbers.

    Raises:
        ConfigError: the weights are quantized, but not in float8.
    """
    found = body.get("quantization_config", body.get("compression_config"))
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method not in _METHODS:
        raise ConfigError(
            f"{path}: quantization_config: {show(str(method))} is not read; supported are weights in float32, bfloat16,"
            f" float16, float64 and float8 ({', '.join(_METHODS)}); {_REMEDY}"
        )
    if found.get("transform_config"):
        raise ConfigError(f"{path}: quantization_config.transform_config: is not read: it changes the model; {_REMEDY}")
    return found


def with_scales(tensors: Mapping[str, Stored], quantization: Mapping[str, Any] | None) -> dict[str, Stored]:
    """Returns a model's tensors: float8 ones with their scales, without tensors that are not weights.

    Args:
        tensors: all tensors of the directory, by name.
        quantization: the result of `quantization_of`; None: a float8 tensor without scales holds its values directly.

    Raises:
        ConfigError: a scale is missing, or its shape does not match blocks of its tensor.
    """
    found = dict(tensors)
    for name, stored in tensors.items():
        if stored.dtype != DTYPES["F8_E4M3"]:
            continue
        base = name.removesuffix("weight")
        scales = [found.pop(base + suffix) for suffix in _SCALES if name != base and base + suffix in found]
        if len(scales) == 1 and len(stored.shape) == 2:
            found[name] = dataclasses.replace(stored, scales=_scales(name, stored, scales[0], quantization))
        elif scales or quantization is not None:
            rule = f"is a {len(stored.shape)}-dimensional tensor in float8 with {len(scales)} scales, not a matrix with one"
            raise ConfigError(f"{stored.file}: {show(name)} {rule}; download it again")
    if quantization is not None:
        found = {name: stored for name, stored in found.items() if name.rpartition(".")[2] not in _OF_ACTIVATIONS}
    return found


def _scales(name: str, stored: Stored, scale: Stored, quantization: Mapping[str, Any] | None) -> Scales:
    """Returns the scale laid out as a grid over the tensor."""
    (rows, columns), size = stored.shape, math.prod(scale.shape)
    sizes = _block_size(quantization or {})
    if size == 1:
        grid = 1, 1
    elif size == rows and scale.shape[0] == rows:
        grid = rows, 1
    else:
        grid = scale.shape
    if sizes is not None and grid == (-(-rows // sizes[0]), -(-columns // sizes[1])):
        block = sizes
    elif len(grid) == 2 and rows % grid[0] == 0 and columns % grid[1] == 0:
        block = rows // grid[0], columns // grid[1]
    else:
        raise ConfigError(
            f"{scale.file}: the scale of {show(name)} is {list(scale.shape)}, which does not divide"
            f" {list(stored.shape)} into blocks; download it again"
        )
    return Scales(dataclasses.replace(scale, shape=grid), block)


def _block_size(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns rows and columns of a block in either format, or None."""
    groups = quantization.get("config_groups")
    for said in [quantization, *(groups.values() if isinstance(groups, dict) else ())]:
        match said:
            case {"weight_block_size": [int(rows), int(columns)]} if min(rows, columns) > 0:
                return rows, columns
            case {"weights": {"block_structure": [int(rows), int(columns)]}} if min(rows, columns) > 0:
                return rows, columns
    return None
