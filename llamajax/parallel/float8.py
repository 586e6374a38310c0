"""Matrix products in eight bits (FP8 Formats for Deep Learning, arXiv:2209.05433): factors are rounded, sums are fp32.

A tensor is scaled by its current largest entry: a weight by the largest on all devices, tokens by the largest on the devices
that share them in a matmul, so that no device waits for one with other tokens. Scales are powers of two: only the format
rounds, and another scale yields the same numbers, except for the smallest.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from llamajax.parallel.sharding import axes_in
from llamajax.parallel.stages import is_staged
from llamajax.parallel.tensor import SHARED, token_dims

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
"""E4M3, with three bits of fraction, for activations and weights; E5M2, with two and 2^15 times the range, for gradients."""
LARGEST = "float8_largest"
"""Checkpoint name (`checkpoint_name`) of a tensor's largest entry: a policy saves one number, or reads the whole tensor
again."""
LEAST_CAPABILITY = 8, 9
"""CUDA compute capability of the first GPUs that multiply in these formats (Ada; Hopper is 9.0)."""
_TOP = {E4M3: 448.0, E5M2: 57344.0}
"""The largest number of each format. Wider types store their input unchanged, except for a power of two."""


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale", "stand_in"], meta_fields=["dtype"])
@dataclass(frozen=True)
class Float8:
    """An array as a factor of a matmul: `values` times `scale`."""

    values: Array
    """Numbers in an eight-bit format, or in a wider type where nothing is to be rounded."""
    scale: Float32[Array, "..."]
    """One number for all values of a weight, one per layer for stacked layers, and [1, 1] per device for tokens."""
    dtype: jnp.dtype
    """Dtype of the array that was rounded, and of its products."""
    stand_in: Array | None = None
    """For a weight: zeros of its shape and dtype that receive the weight's gradient; an eight-bit array has no gradient."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def __getitem__(self, index: Any) -> "Float8":
        """Returns itself, for `weight[...]`, which is how the model reads a parameter."""
        assert index is ..., "Float8 supports no indexing but [...]"
        return self


Factor = Array | Float8
"""Factor of a product: an array, or an array in eight bits."""


def rounded(x: Float[Array, "*dims"], form: DTypeLike, *, num_stacked: int = 0, axes: tuple[str, ...] = ()) -> Float8:
    """Rounds the array to a format, with its largest entry in the upper half of the format's range; non-finite entries stay
    so.

    Args:
        x: of any finite size: zeros stay zeros, and entries of at most 2^-31 (`E5M2`) or 2^-17 (`E4M3`) of the largest entry
            become zero.
        form: `E4M3`, `E5M2`, or a wider type.
        num_stacked: number of leading dims with a separate scale for each index.
        axes: axes with one scale for all their devices, in a `jax.shard_map`.
    """
    form = jnp.dtype(form)
    largest = jnp.max(jnp.abs(x), range(num_stacked, x.ndim)).astype(jnp.float32)
    largest = checkpoint_name(jax.lax.pmax(largest, axes) if axes else largest, LARGEST)
    factor = _power_of_two(_TOP.get(form, 1.0) / largest)
    values = x.astype(jnp.float32) * jnp.expand_dims(factor, range(num_stacked, x.ndim))
    return Float8(values.astype(form), 1 / factor, x.dtype)


def _rounded_tokens(x: Float[Array, "B T *dims"], form: DTypeLike) -> Float8:
    """Rounds tokens like `rounded`, with one scale per group of devices that share them."""
    lies = jax.typeof(x).sharding.spec
    shared = tuple(axes_in(lies.partitions).intersection(SHARED))

    @partial(jax.shard_map, in_specs=lies, out_specs=(lies, P(*token_dims(lies))))
    def on_device(x: Array) -> tuple[Array, Array]:
        own = rounded(x, form, axes=shared)
        return own.values, own.scale[None, None]

    return Float8(*on_device(x), x.dtype)


def _power_of_two(x: Float32[Array, "*dims"]) -> Float32[Array, "*dims"]:
    """Returns the largest power of two that is at most x, which is positive; at most 2^126, which has a finite inverse."""
    bits = jax.lax.bitcast_convert_type(jnp.minimum(x, 2.0**126), jnp.int32)
    return jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)


def as_factor(x: Array, w: Factor) -> Factor:
    """Returns an activation in the format that it is multiplied with `w`, or with its gradients, in."""
    return _rounded_tokens(x, w.values.dtype) if isinstance(w, Float8) else x


def as_gradient(d_y: Array, w: Factor) -> Factor:
    """Returns the gradient of a product with `w` in the format that it is multiplied in."""
    return _rounded_tokens(d_y, gradient_format(w)) if isinstance(w, Float8) else d_y


def gradient_format(w: Float8) -> jnp.dtype:
    """Returns the format of gradients that are multiplied with a weight, or by its inputs."""
    return E5M2 if w.values.dtype == E4M3 else w.values.dtype


def moved(how: Callable[[Array], Array], x: Factor) -> Factor:
    """Applies `how`, which must not change any number, to an array, or to its values where it is in eight bits."""
    return dataclasses.replace(x, values=how(x.values)) if isinstance(x, Float8) else how(x)


def values(x: Factor) -> Array:
    """Returns the numbers that are stored and sent."""
    return x.values if isinstance(x, Float8) else x


def specs(x: Factor) -> Any:
    """Returns its partition specs, for `jax.shard_map`."""
    return jax.tree.map(lambda array: jax.typeof(array).sharding.spec, x)


def differentiable(w: Factor, *, frozen: bool = False) -> tuple[Factor, Array | None]:
    """Splits a weight into the factor of the product and the array that receives its gradient, None for a frozen one."""
    factor, stand_in = (dataclasses.replace(w, stand_in=None), w.stand_in) if isinstance(w, Float8) else (w, w)
    return factor, None if frozen else stand_in


def rejoined(factor: Factor, stand_in: Array | None) -> Factor:
    """Reverts `differentiable` for a weight that is not frozen."""
    return dataclasses.replace(factor, stand_in=stand_in) if isinstance(factor, Float8) else stand_in


def product(x: Factor, y: Factor, dims: Any, out: P) -> Array:
    """Computes `jax.lax.dot_general` of two arrays, or of two arrays in eight bits, in x's dtype and with the sharding
    `out`. Stages of a pipeline each use their own layer's weight, and `dims` leaves the dim of the stages out."""
    staged = [is_staged(jax.typeof(values(factor)).sharding.spec) for factor in (x, y)]
    if isinstance(x, Array) and isinstance(y, Array) and not any(staged) and not is_staged(out):
        return jax.lax.dot_general(x, y, dims, out_sharding=out)
    lie = specs(x), specs(y)
    split = axes_in(entry for factor in (x, y) for entry in jax.typeof(values(factor)).sharding.spec.partitions)
    left_open = out.unreduced if jax.sharding.get_abstract_mesh().size > 1 else frozenset()  # jax requires several
    summed = tuple(split - axes_in(out.partitions) - left_open)

    @partial(jax.shard_map, in_specs=lie, out_specs=P(*out.partitions, unreduced=left_open))
    def on_device(x: Factor, y: Factor) -> Array:
        x, y = (own_layer(factor) if of_stage else factor for factor, of_stage in zip((x, y), staged, strict=True))
        whole = jax.lax.psum(own_product(x, y, dims), summed)
        whole = whole[None] if is_staged(out) else whole
        return jax.lax.pcast(whole, tuple(left_open), to="unreduced")

    return on_device(x, y)


def own_layer(w: Factor) -> Factor:
    """Drops the dim of the stages from a weight, in a `jax.shard_map`, where it has size one."""
    return moved(lambda values: values[0], w)


def own_product(x: Factor, y: Factor, dims: Any) -> Array:
    """Computes `product` of a device's own parts, in a `jax.shard_map`."""
    if isinstance(x, Array) and isinstance(y, Array):
        return jax.lax.dot_general(x, y, dims)
    assert isinstance(x, Float8), "both are in eight bits, or neither"
    assert isinstance(y, Float8), "both are in eight bits, or neither"
    # Multiply the eight-bit values, not the numbers that they stand for: XLA would fuse the conversion into the matmul and
    # run it at 16 bits.
    exact = jax.lax.dot_general(x.values, y.values, dims, preferred_element_type=x.dtype)
    return exact * (x.scale.reshape(()) * y.scale.reshape(())).astype(x.dtype)
