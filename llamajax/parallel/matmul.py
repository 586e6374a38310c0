"""Matmuls that devices share: by their outputs, of tokens that are gathered first; by their inputs, and scattered then.

As a ring (arXiv:2305.06942), a device multiplies the tokens it has while it passes them on, or adds to a sum that passes by,
so that the links work while the device computes. Bytes are those of the collectives.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float

from llamajax.config.parallel import TensorForm, axes_of, num_parts, splits_residual
from llamajax.config.run import Config
from llamajax.parallel.tensor import SHARED, gather_tokens, is_shared, partial_spec, scatter_tokens, shared_axes

LEAST_TOKENS = 2048
"""That a device multiplies while it passes as many on; with fewer, small matmuls and hops cost more than they hide."""
LEAST_DEVICES = 4
"""That share a matmul; two send so little that plans come out alike."""


def tensor_form(config: Config, axes: Mapping[str, int]) -> tuple[TensorForm, str]:
    """The form that `parallel.tensor` names, or that `auto` comes to for training on GPUs; and why, in one line.

    Args:
        config: the run.
        axes: sizes of the mesh axes.
    """
    devices = math.prod(axes[axis] for axis in SHARED)
    if devices == 1:
        return "collective", "no matmul is shared"
    if config.parallel.tensor != "auto":
        return config.parallel.tensor, "parallel.tensor says so"
    if config.mesh.num_cpu_devices is not None:
        return "collective", "emulated devices hide nothing"
    if not splits_residual(config.data.seq_len, axes):
        return "collective", f"mesh.tensor does not divide the tokens of a row of {config.data.seq_len}"
    if devices < LEAST_DEVICES:
        return "collective", f"{devices} devices send too little to gain from a ring"
    rows = config.rows_per_device(axes)
    tokens = rows * config.data.seq_len // num_parts("residual_seq", axes)
    if tokens < LEAST_TOKENS:
        return "collective", f"{tokens:,} tokens per hop are too few for matmuls of their own"
    return "ring", f"{tokens:,} tokens per hop are multiplied while others travel"


def gathered_matmul(x: Float[Array, "B T D"], w: Float[Array, "D *N"], form: TensorForm) -> Float[Array, "B T *N"]:
    """x w for all tokens of a residual stream x, of x's dtype; w is split along one of its last dims, as the result is.

    Args:
        x: the residual stream, or what was made of it.
        w: of x's dtype, gathered (`llamajax.parallel.zero`).
        form: how the tokens come to the devices.
    """
    if form == "ring" and is_shared(x):
        return _gathered_ring(x, w)
    return jnp.einsum("BTD,D...->BT...", gather_tokens(x), w)


def scattered_matmul(
    y: Float[Array, "B T *N"], w: Float[Array, "D *N"], residual: P, form: TensorForm
) -> Float[Array, "B T D"]:
    """y w^T, summed over the devices that share it, for a residual stream that lies as `residual` says; of y's dtype.

    Args:
        y: split along one of its last dims.
        w: as for `gathered_matmul`.
        residual: how the result lies.
        form: how the sums come to the devices.
    """
    if form == "ring" and _size(shared_axes(residual)) > 1:
        return _scattered_ring(residual, y, w)
    outputs = "NMO"[: w.ndim - 1]
    parts = jnp.einsum(f"BT{outputs},D{outputs}->BTD", y, w, out_sharding=partial_spec(residual))
    return scatter_tokens(parts, residual)


def _over_outputs(y: jax.Array) -> Any:
    return ((tuple(range(2, y.ndim)), tuple(range(1, y.ndim - 1))), ((), ()))


def _size(axes: tuple[str, ...]) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return max((sizes[axis] for axis in axes), default=1)


@jax.custom_vjp
def _gathered_ring(x: jax.Array, w: jax.Array) -> jax.Array:
    return _gather(x, w)[0]


def _gathered_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    y, whole = _gather(x, w)
    return y, (whole, w)


def _gathered_backward(kept: Any, d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    whole, w = kept
    batch, *_ = jax.typeof(whole).sharding.spec
    residual = P(batch, axes_of("residual_seq"), None)
    return _scatter(residual, d_y, w), _weight_gradient(whole, d_y, w)


_gathered_ring.defvjp(_gathered_forward, _gathered_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered_ring(residual: P, y: jax.Array, w: jax.Array) -> jax.Array:
    return _scatter(residual, y, w)


def _scattered_forward(residual: P, y: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    return _scatter(residual, y, w), (y, w)


def _scattered_backward(residual: P, kept: Any, d_x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y, w = kept
    d_y, whole = _gather(d_x, w)
    return d_y, _weight_gradient(whole, y, w)


_scattered_ring.defvjp(_scattered_forward, _scattered_backward)


def _gather(x: Float[Array, "B T D"], w: Float[Array, "D *N"]) -> tuple[Float[Array, "B T *N"], Float[Array, "B T D"]]:
    """x w for all tokens, and all of x."""
    x_spec, w_spec = jax.typeof(x).sharding.spec, _spec(w)
    batch, _, dim = x_spec
    tokens, (_, *outputs) = (batch, axes_of("seq")), w_spec.partitions
    (axis,) = shared_axes(x_spec)

    # That all devices have the same `whole` in the end is more than jax can see.
    @partial(
        jax.shard_map,
        in_specs=(x_spec, w_spec),
        out_specs=(P(*tokens, *outputs), P(*tokens, dim)),
        check_vma=False,
    )
    def on_device(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        n, own, length = jax.lax.axis_size(axis), jax.lax.axis_index(axis), x.shape[1]
        whole = jnp.zeros((x.shape[0], n * length, x.shape[2]), x.dtype)
        y = jnp.zeros((*whole.shape[:2], *w.shape[1:]), x.dtype)
        for step in range(n):
            start = (own - step) % n * length
            product, passed = jnp.tensordot(x, w, 1), x
            if step < n - 1:
                # Or the scheduler would pass everything on before it multiplies anything.
                product, passed = jax.lax.optimization_barrier((product, _pass_on(x, axis)))
            y = jax.lax.dynamic_update_slice_in_dim(y, product, start, axis=1)
            whole = jax.lax.dynamic_update_slice_in_dim(whole, x, start, axis=1)
            x = passed
        return y, whole

    return on_device(x, w)


def _scatter(residual: P, y: Float[Array, "B T *N"], w: Float[Array, "D *N"]) -> Float[Array, "B T D"]:
    """y w^T, summed over the devices that share it, each with its own tokens."""
    (axis,) = shared_axes(residual)

    @partial(jax.shard_map, in_specs=(jax.typeof(y).sharding.spec, _spec(w)), out_specs=residual)
    def on_device(y: jax.Array, w: jax.Array) -> jax.Array:
        n, own = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
        length = y.shape[1] // n

        def product(y: jax.Array, step: int) -> jax.Array:
            part = jax.lax.dynamic_slice_in_dim(y, (own - 1 - step) % n * length, length, axis=1)
            return jax.lax.dot_general(part, w, _over_outputs(y))

        total = product(y, 0)
        for step in range(1, n):
            # Or the scheduler would multiply everything before it passes anything on.
            total, y = jax.lax.optimization_barrier((total, y))
            total = _pass_on(total, axis) + product(y, step)
        return total

    return on_device(y, w)


def _weight_gradient(x: Float[Array, "B T D"], y: Float[Array, "B T *N"], w: jax.Array) -> Float[Array, "D *N"]:
    """x^T y, whose sum over the devices with other tokens is left to do, as w's type has it."""
    sharding = jax.typeof(w).sharding.spec
    return jnp.tensordot(x, y, ((0, 1), (0, 1)), out_sharding=P(*sharding.partitions, unreduced=sharding.reduced))


def _pass_on(x: jax.Array, axis: str) -> jax.Array:
    n = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(device, (device + 1) % n) for device in range(n)])


def _spec(w: jax.Array) -> P:
    return jax.typeof(w).sharding.spec
