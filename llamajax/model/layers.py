"""The parts of a decoder that look at one token at a time: token embedding, RMSNorm and the SwiGLU MLP."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jax.ad_checkpoint import checkpoint_name

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import axes_of
from llamajax.parallel.sharding import spec
from llamajax.parallel.zero import weight


def normal(key: jax.Array, std: float) -> Callable[..., jax.Array]:
    """Draws initial values from N(0, std^2), which do not depend on the mesh."""
    return lambda *shape_and_dtype, out_sharding: std * jax.random.normal(key, *shape_and_dtype, out_sharding=out_sharding)


def residual_std(config: ModelConfig) -> float:
    """Initial standard deviation of the 2L matmuls that add to the residual stream, so that their sum does not
    grow with depth (GPT-2, section 2.3)."""
    return config.init_std / math.sqrt(2 * config.num_layers)


def embed(table: jax.Array, tokens: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The rows of table [V, D], stored ("vocab", "embed"), for int32 tokens [B, T]: [B, T, D] of `dtype`.

    Every device looks its tokens up in its part of the vocabulary. Written with collectives by hand, because a sharded
    lookup and its transpose, a scatter, would otherwise be left to XLA's guess. The result is sharded as the tokens are.
    """
    token_spec = jax.typeof(tokens).sharding.spec
    token_axes = axes_of("batch") if token_spec[1] is None else axes_of("batch") + axes_of("seq")

    @partial(jax.shard_map, in_specs=(spec("vocab", "embed"), token_spec), out_specs=P(*token_spec, None))
    def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
        # Varying before the gather: the transpose first scatters the gradient over `embed`, then reduces what is left.
        reduced_last = tuple(axis for axis in token_axes if axis not in axes_of("embed"))
        with jax.named_scope("gather_weight"):
            rows = jax.lax.pcast(table.astype(dtype), reduced_last, to="varying")
            rows = jax.lax.all_gather(rows, axes_of("embed"), axis=1, tiled=True)
        # fp32 only locally: the transpose adds up the gradients of all tokens with the same id, and a bf16 sum stops
        # growing after a few hundred of them.
        index = tokens - jax.lax.axis_index(axes_of("vocab")) * rows.shape[0]
        index = jnp.where(index < 0, rows.shape[0], index)  # out of bounds like any other row that lies elsewhere
        found = rows.astype(jnp.float32).at[index].get(mode="fill", fill_value=0).astype(dtype)
        return jax.lax.psum(found, axes_of("vocab"))

    return look_up(table, tokens)


class RMSNorm(nnx.Module):
    """Scales the last dim, of `size`, to a root mean square of one, then by learned weights (arXiv:1910.07467)."""

    def __init__(self, size: int, config: ModelConfig):
        self.eps = config.norm_eps
        self.scale = weight((size,), config.param_dtype, stored=(None,), compute=None, init=jnp.ones)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size] of x's dtype; computed in fp32."""
        wide = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...].astype(jnp.float32), range(x.ndim - 1))
        return (wide * inverse_rms * scale).astype(x.dtype)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv:2002.05202), gate and up as one matmul."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        D, F, dtype = config.embed_dim, config.mlp_dim, config.param_dtype
        gate_up_key, down_key = jax.random.split(key)
        init = normal(gate_up_key, config.init_std)
        self.w_gate_up = weight((D, 2, F), dtype, stored=("embed", None, "mlp"), compute=(None, None, "mlp"), init=init)
        init = normal(down_key, residual_std(config))
        self.w_down = weight((F, D), dtype, stored=("mlp", "embed"), compute=("mlp", None), init=init)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D] of x's dtype."""
        with jax.named_scope("gate_up"):
            gate_up = checkpoint_name(jnp.einsum("BTD,DCF->BTCF", x, self.w_gate_up[...]), "gate_up")
            gate, up = gate_up[:, :, 0], gate_up[:, :, 1]
        with jax.named_scope("gated"):
            gated = jax.nn.silu(gate) * up
        with jax.named_scope("down_projection"):
            return jnp.einsum("BTF,FD->BTD", gated, self.w_down[...], out_sharding=jax.typeof(x).sharding.spec)
