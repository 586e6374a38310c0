"""Weights kept in four or eight bits, with one scale per block of 64 neighbours along the inputs of a matmul.

These are the blocks that bitsandbytes has in a torch matrix [out, in], and NF4 has its codes and scales (QLoRA,
arXiv:2305.14314). Each array of a quantized weight has the weight's dims, of smaller sizes. It is sharded by the weight's
own partition spec, and gathered, sliced or exchanged like the weight. Devices that hold whole blocks quantize and decode
without communication.

With double quantization, scales are in eight bits: in equal steps from the smallest to the largest of a group of 64
neighbouring blocks. Groups run along another dim than blocks, so that they divide over a mesh as blocks do. On 16.8
million normally distributed weights this adds 0.005% to the root mean square error of NF4; bitsandbytes 0.50.2 adds 0.025%.
"""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from llamajax.config.quantized import CODE_BITS, QuantizedForm, block_size

_NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""Number of each NF4 code (QLoRA, appendix E)."""
_TOP: dict[QuantizedForm, float] = {"nf4": 1.0, "int8": 127.0, "float8": 448.0}
"""Largest number of the codes, which stands for the largest weight of a block."""
_SMALLEST = 2.0**-125
"""Smaller divisors are replaced by it: their reciprocals would overflow."""
_NUM_STEPS = 255
"""Steps between the smallest and the largest scale of a group."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "steps", "least"],
    meta_fields=["form", "dim", "across", "dtype"],
)
@dataclass(frozen=True)
class Quantized:
    """A weight as codes and scales; any number of leading dims may hold a layer for each index."""

    codes: Array
    """Codes: int8, float8_e4m3fn, or uint8 with two NF4 codes per byte, the first one in the upper half."""
    scales: Array
    """Scales of blocks, by which the numbers of codes are multiplied: float32, or uint8 with double quantization."""
    steps: Float32[Array, "..."] | None
    """Double quantization: difference between neighbouring scales of a group; otherwise None."""
    least: Float32[Array, "..."] | None
    """Double quantization: smallest scale of a group; otherwise None."""
    form: QuantizedForm
    """Format of the codes."""
    dim: int
    """Dim along which blocks run, counted from the end."""
    across: int
    """Dim along which groups of blocks run, counted from the end."""
    dtype: jnp.dtype
    """Dtype of the weight that was quantized."""

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.codes.shape)
        shape[self.dim] *= 8 // CODE_BITS[self.form]
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    def __getitem__(self, index: Any) -> "Quantized":
        """Returns itself, for `weight[...]`, which is how the model reads a parameter."""
        assert index is ..., "Quantized supports no indexing but [...]"
        return self


def quantize(
    x: Float[Array, "*dims"], form: QuantizedForm, dim: int, *, num_stacked: int = 0, double: bool = False
) -> Quantized:
    """Rounds every weight to the nearest code of its block.

    Blocks of zeros stay zeros. A non-finite weight makes its block non-finite, and with `double` its group of blocks. A
    block of weights below 2^-106 may become zeros, because XLA may compute with numbers below 2^-126 as with zeros.

    Args:
        x: a weight, or a stack of layers. If it is sharded, each device must hold whole blocks, and with `double` whole
            groups (`llamajax.config.quantized.undivided_blocks`).
        form: format of the codes.
        dim: dim of the inputs in the matrix of one layer: 0 or -1.
        num_stacked: number of leading dims with a layer for each index.
        double: whether to store the scales in eight bits.

    Raises:
        ValueError: a block would be half a byte.
    """
    first, last = num_stacked - x.ndim, -1
    dim, across = (first, last) if dim == 0 else (last, first)
    block = block_size(x.shape[dim])
    if block * CODE_BITS[form] < 8:
        raise ValueError(f"{form} stores two weights per byte, so the inputs must be even; the weight is {x.shape}")
    wide = x.astype(jnp.float32)
    largest = _largest(jnp.abs(_split(wide, dim, block)), dim)
    # Multiply by the reciprocal, as bitsandbytes does, because a quotient can round to another code. Four times the
    # reciprocal is a normal number even for the largest weights.
    fractions = wide * _spread(4 / jnp.maximum(largest, _SMALLEST), dim, block) / 4
    codes, top = _encoded(fractions, form, dim), _TOP[form]
    if not double:
        return Quantized(codes, largest / top, None, None, form, dim, across, x.dtype)
    group = block_size(largest.shape[across])
    groups = _split(largest, across, group)
    least = jnp.min(groups, across)
    # With 16 significant bits, the products of steps and eight-bit places are exact: all programs decode the same numbers,
    # whether or not they round products before they add.
    steps = jax.lax.reduce_precision((_largest(groups, across) - least) / (_NUM_STEPS * top), 8, 15)
    per_step = 1 / jnp.maximum(top * steps, _SMALLEST)
    places = jnp.round((largest - _spread(least, across, group)) * _spread(per_step, across, group))
    return Quantized(codes, places.astype(jnp.uint8), steps, least / top, form, dim, across, x.dtype)


def dequantize(weight: Quantized, dtype: DTypeLike | None = None) -> Float[Array, "*dims"]:
    """Returns the numbers of a weight; its dtype is that of the weight that was quantized, unless `dtype` is another."""
    scales = weight.scales
    if weight.steps is not None and weight.least is not None:
        group = scales.shape[weight.across] // weight.steps.shape[weight.across]
        steps, least = (_spread(x, weight.across, group) for x in (weight.steps, weight.least))
        scales = least + scales.astype(jnp.float32) * steps
    block = weight.shape[weight.dim] // scales.shape[weight.dim]
    numbers = _decoded(weight.codes, weight.form, weight.dim)
    return (numbers * _spread(scales, weight.dim, block)).astype(weight.dtype if dtype is None else dtype)


def _largest(x: Float32[Array, "*dims"], dim: int) -> Float32[Array, "*others"]:
    """Returns the largest of numbers that are not negative; NaN if one of them is, unlike XLA's maximum on CPUs."""
    # The bits of such numbers, read as integers, have the same order, with infinity and NaN at the end.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, dim), jnp.float32)


def _encoded(fractions: Float32[Array, "*dims"], form: QuantizedForm, dim: int) -> Array:
    """Returns the codes of numbers in -1 ... 1."""
    if form == "float8":
        return (fractions * _TOP[form]).astype(jnp.float8_e4m3fn)
    if form == "int8":
        return jnp.round(fractions * _TOP[form]).astype(jnp.int8)
    bounds = (_NF4[1:] + _NF4[:-1]) / 2
    codes = reduce(jnp.add, [(fractions > bound).astype(jnp.uint8) for bound in bounds])
    upper, lower = jnp.unstack(_split(codes, dim, 2), axis=dim)
    return (upper << 4) | lower


def _decoded(codes: Array, form: QuantizedForm, dim: int) -> Float32[Array, "*dims"]:
    """Returns the numbers of codes, before the scale."""
    if form != "nf4":
        return codes.astype(jnp.float32)
    shifts = np.expand_dims(np.array([4, 0], np.uint8), [other for other in range(-1 - codes.ndim, 0) if other != dim])
    codes = _merged((jnp.expand_dims(codes, dim) >> shifts) & 15, dim)
    # XLA reads the table within the kernel that scales the numbers, with one load per weight. Selecting among constants
    # takes twice the instructions.
    return jnp.asarray(_NF4).at[codes].get(mode="promise_in_bounds", out_sharding=jax.typeof(codes).sharding.spec)


def _split(x: Array, dim: int, size: int) -> Array:
    """Splits a dim, counted from the end, into blocks: `dim` of the result is that within a block."""
    at, lies = x.ndim + dim, jax.typeof(x).sharding.spec
    before, after = lies.partitions[: at + 1], lies.partitions[at + 1 :]
    shape = (*x.shape[:at], x.shape[at] // size, size, *x.shape[at + 1 :])
    return jax.lax.reshape(x, shape, out_sharding=lies.update(partitions=(*before, None, *after)))


def _merged(x: Array, dim: int) -> Array:
    """Undoes `_split`."""
    at, lies = x.ndim + dim, jax.typeof(x).sharding.spec
    before, after = lies.partitions[:at], lies.partitions[at + 1 :]
    shape = (*x.shape[: at - 1], x.shape[at - 1] * x.shape[at], *x.shape[at + 1 :])
    return jax.lax.reshape(x, shape, out_sharding=lies.update(partitions=(*before, *after)))


def _spread(x: Array, dim: int, size: int) -> Array:
    """Repeats each entry along a dim, counted from the end: for all of its block."""
    single = jnp.expand_dims(x, dim)
    shape = list(single.shape)
    shape[dim] = size
    return _merged(jnp.broadcast_to(single, shape), dim)
