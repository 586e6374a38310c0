"""Weights in four or eight bits, in blocks with a scale each: sizes of blocks, and the meshes that leave blocks whole."""

from collections.abc import Mapping
from typing import Literal

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import axes_of, num_parts

QuantizedForm = Literal["float8", "int8", "nf4"]
CODE_BITS: dict[QuantizedForm, int] = {"float8": 8, "int8": 8, "nf4": 4}
"""Bits that a weight takes, without its share of a scale."""
LARGEST_BLOCK = 64
"""Largest number of weights with a common scale, as in QLoRA (arXiv:2305.14314)."""


def block_size(size: int) -> int:
    """Returns the number of neighbours with a common scale along a dim of this size: the largest power of two that divides
    it, at most `LARGEST_BLOCK`."""
    return min(size & -size, LARGEST_BLOCK)


def undivided_blocks(model: ModelConfig, form: QuantizedForm, axes: Mapping[str, int]) -> list[str]:
    """Returns one `key: rule; remedy` line for each size of the model that a mesh with axes of these sizes does not divide
    into whole blocks."""
    is_split = model.num_kv_heads % num_parts("kv_heads", axes) == 0
    dims = {"embed_dim": "embed" if is_split else "embed_tensor", "mlp_dim": "mlp", "head_dim": "head_dim"}
    problems = []
    for name, dim in dims.items():
        size = getattr(model, name)
        block, over = block_size(size), [f"mesh.{axis}={axes[axis]}" for axis in axes_of(dim) if axes[axis] > 1]
        if block * CODE_BITS[form] < 8:
            problems.append(f"model.{name}: {size} must be even with {form}, which stores two weights per byte; choose int8")
        elif size % (block * num_parts(dim, axes)):
            rule = (
                f"must be divisible by {' x '.join([str(block), *over])} with {form}, which scales blocks of {block} weights"
            )
            problems.append(f"model.{name}: {size} {rule}; use fewer devices on these axes and more on mesh.data")
    return problems
