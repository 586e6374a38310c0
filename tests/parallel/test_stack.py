"""Layers of a stack run in order, each with its own inputs; what is kept for the backward pass is what is named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from llamajax.parallel.sharding import spec
from llamajax.parallel.stack import run_layers
from llamajax.parallel.zero import PreparedWeights, weight

L, B, D = 3, 8, 4
X = np.linspace(0, 1, B * D, dtype=np.float32).reshape(B, D)


class Scale(nnx.Module):
    """A multiple of the unit matrix."""

    def __init__(self, value: jax.Array):
        def unit(shape: tuple[int, ...], dtype: str, out_sharding: jax.P) -> jax.Array:
            return jax.reshard(value * jnp.eye(*shape, dtype=dtype), out_sharding)

        self.w = weight((D, D), "float32", stored=(None, "mlp"), compute=(None, None), init=unit)


def stack() -> Scale:
    return jax.vmap(Scale)(jnp.arange(1.0, 1 + L))


def run(layers: Scale, x: jax.Array, saved: tuple[str, ...] | None) -> tuple[jax.Array, jax.Array]:
    def add(x: jax.Array, layer: Scale, addend: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        scaled = checkpoint_name(jnp.einsum("BD,DE->BE", x, layer.w[...]), "scaled")
        return jnp.sin(scaled) + addend, scaled

    policy = None if saved is None else jax.checkpoint_policies.save_only_these_names(*saved)
    return run_layers(PreparedWeights(layers), add, x, jnp.arange(10.0, 10 + L), dtype="float32", saved=policy)


@pytest.mark.parametrize("saved", [None, (), ("scaled",)])
def test_layers_run_in_order_with_their_own_inputs(saved):
    x = X
    out, results = jax.jit(run, static_argnums=2)(stack(), jax.device_put(x, spec("batch", None)), saved)
    for layer in range(L):
        scaled = x * (layer + 1)
        np.testing.assert_allclose(results[layer], scaled, rtol=1e-6)
        x = np.sin(scaled) + 10 + layer
    np.testing.assert_allclose(out, x, rtol=1e-6)


@pytest.mark.parametrize(("saved", "kept"), [((), 1), (("scaled",), 2)])
def test_named_values_are_kept_beside_the_carry(saved, kept):
    x = jax.device_put(X, spec("batch", None))

    def out(layers: Scale, x: jax.Array) -> jax.Array:
        return run(layers, x, saved)[0]

    _, backward = jax.eval_shape(functools.partial(jax.vjp, out), stack(), x)
    assert [leaf.shape for leaf in jax.tree.leaves(backward)].count((L, B, D)) == kept
