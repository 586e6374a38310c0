"""The parts of a decoder that process one token at a time: token embedding, RMSNorm and the SwiGLU MLP."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from llamajax.config.adapters import AdaptersConfig, Projection
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import PLAIN, ParallelConfig
from llamajax.kernels.swiglu import gated, gated_and_gradient
from llamajax.model.adapters import Adapter, Seeds, with_columns, with_rows
from llamajax.parallel.matmul import Made, gathered_matmul, scattered_matmul
from llamajax.parallel.stages import is_staged, merge, split
from llamajax.parallel.zero import scaled, scaled_late, weight

Auxiliary = dict[str, Float32[Array, "B T"]]
"""Values that a part of a layer returns besides its output, by name: one number per token, sharded as the residual stream.

The loss sums them over the counted tokens, as it sums their cross-entropy, so they are the same on all meshes and for all
micro-batches and packings, and no layer waits for a sum over devices. A value that depends on several tokens, such as a loss
that balances experts, uses the tokens of one document and gives each of them its share.
"""


def normal(key: jax.Array, std: float) -> Callable[..., jax.Array]:
    """Returns an initialiser that draws values from N(0, std^2); they do not depend on the mesh."""
    return lambda *shape_and_dtype, out_sharding: std * jax.random.normal(key, *shape_and_dtype, out_sharding=out_sharding)


def output_first(init: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns an initialiser with the same values for a matrix with its output dim first instead of last."""

    def moved(shape: tuple[int, ...], dtype: DTypeLike, out_sharding: jax.P) -> jax.Array:
        (first, *rest), (first_axes, *rest_axes) = shape, out_sharding
        return jnp.moveaxis(init((*rest, first), dtype, out_sharding=jax.P(*rest_axes, first_axes)), -1, 0)

    return moved


def residual_std(config: ModelConfig) -> float:
    """Returns the initial standard deviation of the 2L matmuls that add to the residual stream, so that their sum does not
    grow with depth (GPT-2, section 2.3)."""
    return config.init_std / math.sqrt(2 * config.num_layers)


def with_bias(x: Float[Array, "B T *N"], bias: nnx.Param | Float[Array, "..."] | None) -> Float[Array, "B T *N"]:
    """Adds a learned bias to x, if the model has one, or that of every stage, [p, *N]; the result has x's dtype.

    The sum is in fp32, so that its gradient, a sum over all tokens, is in fp32 too.
    """
    if bias is None:
        return x
    wide, own = x.astype(jnp.float32), bias[...].astype(jnp.float32)
    if is_staged(jax.typeof(own).sharding.spec):
        return merge(split(wide) + own[:, None, None]).astype(x.dtype)
    return (wide + own[None, None]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Scales the last dim, of `size`, to a root mean square of one, then by learned weights (arXiv:1910.07467)."""

    def __init__(self, size: int, config: ModelConfig):
        self.eps = config.norm_eps
        self.scale = weight((size,), config.param_dtype, stored=(None,), compute=None, init=jnp.ones, late=True)

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Returns the normed values in x's dtype; computed in fp32."""
        wide = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        times = scaled if self.scale.frozen else scaled_late
        return times(wide * inverse_rms, self.scale[...].astype(jnp.float32)).astype(x.dtype)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv:2002.05202), gate and up as one matmul."""

    MATRICES: ClassVar[Mapping[str, Sequence[Projection]]] = {"w_gate_up": ("gate", "up"), "w_down": ("down",)}
    """Projections that each matrix joins, see `columns_of`."""
    auxiliary: ClassVar[Mapping[str, float]] = {}
    """Weight in the loss of each value of `Auxiliary` that it returns, by name; 0 for a value that is only reported."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        D, F, dtype = config.embed_dim, config.mlp_dim, config.param_dtype
        gate_up_key, down_key = jax.random.split(key)
        init = normal(gate_up_key, config.init_std)
        self.w_gate_up = weight((D, 2, F), dtype, stored=("embed", None, "mlp"), compute=(None, None, "mlp"), init=init)
        init = output_first(normal(down_key, residual_std(config)))
        self.w_down = weight((D, F), dtype, stored=("embed", "mlp"), compute=(None, "mlp"), init=init)
        bias = partial(weight, dtype=dtype, compute=None, init=jnp.zeros)
        self.gate_up_bias = bias((2, F), stored=(None, "mlp")) if config.mlp_bias else None
        self.down_bias = bias((D,), stored=(None,)) if config.mlp_bias else None
        self.gate_adapter: Adapter | None = nnx.data(None)
        self.up_adapter: Adapter | None = nnx.data(None)
        self.down_adapter: Adapter | None = nnx.data(None)

    @staticmethod
    def adapters(model: ModelConfig, config: AdaptersConfig, dtype: DTypeLike, key: jax.Array) -> dict[Projection, Adapter]:
        """Draws adapters of its projections; those that `config` does not name are left out."""
        D, F = model.embed_dim, model.mlp_dim
        column = {"shape": (D, 1, F), "is_row": False, "stored": (None, "mlp"), "compute": (None, "mlp")}
        row = {"shape": (D, F), "is_row": True, "stored": ("mlp",), "compute": ("mlp",)}
        kinds: dict[Projection, Any] = {"gate": column, "up": column, "down": row}
        return {
            name: Adapter(config, dtype=dtype, key=own_key, **kind)
            for (name, kind), own_key in zip(kinds.items(), jax.random.split(key, len(kinds)), strict=True)
            if name in config.targets
        }

    def __call__(
        self,
        x: Float[Array, "B T D"],
        parallel: ParallelConfig = PLAIN,
        *,
        gates_in_stack: bool = False,
        is_saved: bool = True,
        seeds: Seeds | None = None,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """Returns the addition to the residual stream, in x's dtype; and the auxiliary values.

        Args:
            x: normed residual stream.
            parallel: the forms in which devices share the work.
            gates_in_stack: whether the backward pass reads `gate_up` from a stack of all layers. XLA's own kernels read it
                there; another kernel needs a copy.
            is_saved: whether gates and inputs have the checkpoint name `gate_up`.
            seeds: see `Seeds`.
        """
        residual, w_down, tensor = jax.typeof(x).sharding.spec, self.w_down[...], parallel.tensor
        with jax.named_scope("gate_up"):
            w_gate_up = self.w_gate_up[...]
            gate_up = gathered_matmul(x, w_gate_up, tensor, frozen=self.w_gate_up.frozen)
            gate_up = with_columns(gate_up, x, w_gate_up, (self.gate_adapter, self.up_adapter), seeds)
            gate_up = with_bias(gate_up, self.gate_up_bias)
            gate_up = checkpoint_name(gate_up, "gate_up") if is_saved else gate_up
        with jax.named_scope("down_projection"):
            frozen, made = self.w_down.frozen, Made(gated, gated_and_gradient)
            if gates_in_stack or self.down_adapter is not None:
                y = gated(gate_up)
                out = scattered_matmul(y, w_down, residual, tensor, frozen=frozen)
                out = with_rows(out, y, w_down, self.down_adapter, seeds)
            else:
                out = scattered_matmul(gate_up, w_down, residual, tensor, made=made, frozen=frozen)
            return with_bias(out, self.down_bias), {}
