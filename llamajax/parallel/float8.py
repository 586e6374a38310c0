"""Matrix products in eight bits (FP8 Formats for Deep Learning, arXiv:2209.05433): factors are rounded, sums are fp32.

A tensor is scaled by its largest entry as it is now: a weight by that of all devices, tokens by that of the devices that
share them in a matmul, so that no device waits for one that has others. Scales are powers of two: nothing rounds but the
format, and by another scale the same numbers come out, but for the smallest.
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
from llamajax.parallel.tensor import SHARED, token_dims

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
"""Of activations and weights, with three bits of fraction; of gradients, with two and 2^15 times the range."""
LARGEST = "float8_largest"
"""The name (`checkpoint_name`) of a tensor's largest entry: one number to keep, or the whole tensor to read again."""
LEAST_CAPABILITY = 8, 9
"""CUDA's version of the first GPUs that multiply in these formats (Ada; Hopper is 9.0)."""
_TOP = {E4M3: 448.0, E5M2: 57344.0}
"""The largest number of a format. Wider types take what they are given as it is, but for a power of two."""


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale", "stand_in"], meta_fields=["dtype"])
@dataclass(frozen=True)
class Float8:
    """An array as a matmul takes it: `values` times `scale`."""

    values: Array
    """In a format of eight bits, or in a wider type where nothing is to be rounded."""
    scale: Float32[Array, "..."]
    """One number for all values of a weight; of layers that are stacked, one each; of tokens [1, 1] per device."""
    dtype: jnp.dtype
    """Of the array that was rounded, and of products."""
    stand_in: Array | None = None
    """Of a weight: zeros of its shape and dtype, whose gradient is the weight's; an array of eight bits has none."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def __getitem__(self, index: Any) -> "Float8":
        """Itself, for `weight[...]`, which is how the model reads a parameter."""
        assert index is ..., "the values of a part are another array's"
        return self


Factor = Array | Float8
"""Of a product: an array, or one in eight bits."""


def rounded(x: Float[Array, "*dims"], form: DTypeLike, *, num_stacked: int = 0, axes: tuple[str, ...] = ()) -> Float8:
    """The array in a format, its largest entry in the upper half of the format's range; what is not finite stays so.

    Args:
        x: of any finite size: zeros stay zeros, and what is 2^-31 (`E5M2`) or 2^-17 (`E4M3`) of the largest entry and below
            becomes zero.
        form: `E4M3`, `E5M2`, or a wider type.
        num_stacked: leading dims with a scale for each of their places.
        axes: whose devices have one scale, in a `jax.shard_map`.
    """
    form = jnp.dtype(form)
    largest = jnp.max(jnp.abs(x), range(num_stacked, x.ndim)).astype(jnp.float32)
    largest = checkpoint_name(jax.lax.pmax(largest, axes) if axes else largest, LARGEST)
    factor = _power_of_two(_TOP.get(form, 1.0) / largest)
    values = x.astype(jnp.float32) * jnp.expand_dims(factor, range(num_stacked, x.ndim))
    return Float8(values.astype(form), 1 / factor, x.dtype)


def _rounded_tokens(x: Float[Array, "B T *dims"], form: DTypeLike) -> Float8:
    """`rounded`, by devices."""
    lies = jax.typeof(x).sharding.spec
    shared = tuple(axes_in(lies.partitions).intersection(SHARED))

    @partial(jax.shard_map, in_specs=lies, out_specs=(lies, P(*token_dims(lies))))
    def on_device(x: Array) -> tuple[Array, Array]:
        own = rounded(x, form, axes=shared)
        return own.values, own.scale[None, None]

    return Float8(*on_device(x), x.dtype)


def _power_of_two(x: Float32[Array, "*dims"]) -> Float32[Array, "*dims"]:
    """The largest one that is not above x, which is positive; at most 2^126, whose inverse is a number too."""
    bits = jax.lax.bitcast_convert_type(jnp.minimum(x, 2.0**126), jnp.int32)
    return jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)


def as_factor(x: Array, w: Factor) -> Factor:
    """An activation as it is multiplied with `w`, or with what is."""
    return _rounded_tokens(x, w.values.dtype) if isinstance(w, Float8) else x


def as_gradient(d_y: Array, w: Factor) -> Factor:
    """The gradient of a product with `w`, as it is multiplied in turn."""
    if not isinstance(w, Float8):
        return d_y
    return _rounded_tokens(d_y, E5M2 if w.values.dtype == E4M3 else w.values.dtype)


def moved(how: Callable[[Array], Array], x: Factor) -> Factor:
    """`how` of an array that changes no number: of the values, where it has eight bits."""
    return dataclasses.replace(x, values=how(x.values)) if isinstance(x, Float8) else how(x)


def values(x: Factor) -> Array:
    """The numbers that are stored and sent of it."""
    return x.values if isinstance(x, Float8) else x


def specs(x: Factor) -> Any:
    """How it lies, for `jax.shard_map`."""
    return jax.tree.map(lambda array: jax.typeof(array).sharding.spec, x)


def differentiable(w: Factor) -> tuple[Factor, Array | None]:
    """A weight as it is multiplied, and what its gradient goes to."""
    return (dataclasses.replace(w, stand_in=None), w.stand_in) if isinstance(w, Float8) else (w, w)


def product(x: Factor, y: Factor, dims: Any, out: P) -> Array:
    """`jax.lax.dot_general` of two arrays or of two in eight bits, in the dtype of x; it lies as `out` says."""
    if isinstance(x, Array) and isinstance(y, Array):
        return jax.lax.dot_general(x, y, dims, out_sharding=out)
    lie = specs(x), specs(y)
    split = axes_in((*lie[0].values.partitions, *lie[1].values.partitions))
    left_open = out.unreduced if jax.sharding.get_abstract_mesh().size > 1 else frozenset()  # jax cannot on one device
    summed = tuple(split - axes_in(out.partitions) - left_open)

    @partial(jax.shard_map, in_specs=lie, out_specs=P(*out.partitions, unreduced=left_open))
    def on_device(x: Factor, y: Factor) -> Array:
        return jax.lax.pcast(jax.lax.psum(own_product(x, y, dims), summed), tuple(left_open), to="unreduced")

    return on_device(x, y)


def own_product(x: Factor, y: Factor, dims: Any) -> Array:
    """`product` of what a device has, in a `jax.shard_map`."""
    if isinstance(x, Array) and isinstance(y, Array):
        return jax.lax.dot_general(x, y, dims)
    assert isinstance(x, Float8), "both are in eight bits, or none"
    assert isinstance(y, Float8), "both are in eight bits, or none"
    # Factors of eight bits, and not what they stand for: XLA would take the conversion into the matmul, and it at 16 bits.
    exact = jax.lax.dot_general(x.values, y.values, dims, preferred_element_type=x.dtype)
    return exact * (x.scale.reshape(()) * y.scale.reshape(())).astype(x.dtype)
