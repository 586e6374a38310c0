"""SwiGLU's product (arXiv:2002.05202), and its recomputation with the gradient for the backward pass. On GPUs one Pallas
kernel computes both; XLA would use two kernels, and both would read the gates."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from llamajax.kernels.choice import is_on_gpu

_GATE, _UP = np.int32(0), np.int32(1)
_TILE = 8, 256
"""Tokens and entries that a program computes; a row of the tile is 512 bytes in 16 bits."""


def gated(gate_up: Float[Array, "B T 2 F"]) -> Float[Array, "B T F"]:
    """Returns silu(gate) * up."""
    with jax.named_scope("gated"):
        return jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]


def gated_and_gradient(
    gate_up: Float[Array, "B T 2 F"], d_gated: Float[Array, "B T F"]
) -> tuple[Float[Array, "B T F"], Float[Array, "B T 2 F"]]:
    """Returns `gated` and the gradient of `gate_up` from the gradient of the product, with the arguments' shardings."""
    if not is_on_gpu():
        product, pull = jax.vjp(gated, gate_up)
        return product, *pull(d_gated)
    specs = jax.typeof(d_gated).sharding.spec, jax.typeof(gate_up).sharding.spec

    # Pallas calls do not say over which axes their results vary.
    @partial(jax.shard_map, in_specs=specs[::-1], out_specs=specs, check_vma=False)
    def on_device(gate_up: jax.Array, d_gated: jax.Array) -> tuple[jax.Array, jax.Array]:
        return own_gated_and_gradient(gate_up, d_gated, interpret=False)

    with jax.named_scope("gated"):
        return on_device(gate_up, d_gated)


def own_gated_and_gradient(
    gate_up: Float[Array, "b t 2 f"], d_gated: Float[Array, "b t f"], *, interpret: bool
) -> tuple[Float[Array, "b t f"], Float[Array, "b t 2 f"]]:
    """On one device: computes `gated_and_gradient` in fp32, and overwrites its arguments where nothing else reads them.

    Args:
        gate_up: gates, and the values that they scale.
        d_gated: gradient of the product.
        interpret: compute with jax, on any device and slowly, instead of compiling with Triton.
    """
    b, t, f = d_gated.shape
    of_product = pl.BlockSpec(_TILE, lambda tokens, entries: (tokens, entries))
    of_gates = pl.BlockSpec((_TILE[0], 2, _TILE[1]), lambda tokens, entries: (tokens, 0, entries))
    product, gradient = pl.pallas_call(
        partial(_tile, b * t, f),
        grid=(pl.cdiv(b * t, _TILE[0]), pl.cdiv(f, _TILE[1])),
        in_specs=[of_gates, of_product],
        out_specs=[of_product, of_gates],
        out_shape=[
            jax.ShapeDtypeStruct((b * t, f), gate_up.dtype),
            jax.ShapeDtypeStruct((b * t, 2, f), gate_up.dtype),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        input_output_aliases={0: 1, 1: 0},
        interpret=interpret,
        name="swiglu_gradient",
    )(gate_up.reshape(b * t, 2, f), d_gated.reshape(b * t, f))
    return product.reshape(d_gated.shape), gradient.reshape(gate_up.shape)


def _tile(num_tokens: int, width: int, gate_up: Any, d_gated: Any, product: Any, gradient: Any) -> None:
    """Computes one tile; the last tiles extend beyond the arrays."""
    tokens = pl.program_id(0) * _TILE[0] + jnp.arange(_TILE[0])
    entries = pl.program_id(1) * _TILE[1] + jnp.arange(_TILE[1])
    mask = None
    if num_tokens % _TILE[0] or width % _TILE[1]:
        mask = (tokens < num_tokens)[:, None] & (entries < width)[None, :]

    def load(ref: Any) -> jax.Array:
        return triton.load(ref, mask=mask, other=None if mask is None else 0).astype(jnp.float32)

    def store(ref: Any, values: jax.Array) -> None:
        triton.store(ref, values.astype(product.dtype), mask=mask)

    gate, up, d = load(gate_up.at[:, _GATE]), load(gate_up.at[:, _UP]), load(d_gated)
    sigmoid = 1 / (1 + jnp.exp(-gate))
    silu = gate * sigmoid
    store(product, silu * up)
    store(gradient.at[:, _GATE], d * up * (sigmoid + silu * (1 - sigmoid)))
    store(gradient.at[:, _UP], d * silu)
