"""Bytes of weights in four or eight bits, with their scales."""

import math
from collections.abc import Sequence

from llamajax.config.quantized import CODE_BITS, QuantizedForm, block_size


def num_bytes(shape: Sequence[int], form: QuantizedForm, dim: int, *, double: bool = False) -> int:
    """Returns the bytes of one layer's matrix as `llamajax.parallel.quantized.quantize` stores it.

    Args:
        shape: shape of the matrix.
        form: format of the codes.
        dim: dim of the inputs: 0 or -1.
        double: whether the scales are in eight bits.
    """
    weights, across = math.prod(shape), -1 - dim
    blocks = weights // block_size(shape[dim])
    groups = blocks // block_size(shape[across])
    return weights * CODE_BITS[form] // 8 + (blocks + 8 * groups if double else 4 * blocks)


def bits_per_weight(form: QuantizedForm, *, double: bool = False) -> float:
    """Returns the bits per weight of a matrix with dims that are multiples of 64: `nf4` takes 4.5, or 4.14 with `double`."""
    return num_bytes((64, 64), form, 0, double=double) / 512
