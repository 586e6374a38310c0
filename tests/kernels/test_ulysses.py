"""Ulysses: what one device computes, on every mesh, with kv heads that devices must share; and what is asked of cuDNN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.kernels import ulysses
from llamajax.kernels.choice import Kernel
from llamajax.kernels.plain import Mask
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from tests.kernels.split_rows import SCALE, check, check_bf16


@pytest.mark.parametrize(
    ("axes", "case"),
    [
        ({"sequence": 2}, {}),
        ({"sequence": 4}, {"window": 7, "packed": False}),  # two heads for four devices
        ({"sequence": 4}, {"K": 1, "G": 4}),
        ({"sequence": 4}, {"K": 6, "G": 2}),  # six heads for four devices: twelve of which each has three
        pytest.param({"sequence": 8}, {"K": 8, "G": 1}, marks=pytest.mark.slow),
        ({"sequence": 3, "fsdp": 2}, {"T": 15, "K": 3, "window": 4}),
        ({"fsdp": 2, "sequence": 2, "tensor": 2}, {"window": 20}),
        ({"sequence": 4, "tensor": 2}, {"G": 4, "packed": False}),
        pytest.param({"data": 2, "sequence": 2}, {"packed": False}, marks=pytest.mark.slow),
    ],
)
def test_equals_one_device(axes, case):
    check("ulysses", axes, **case)


def test_bf16_is_as_near_as_gathered_keys_and_values():
    check_bf16("ulysses")


@pytest.mark.parametrize(("K", "own_heads"), [(2, (1, 2)), (8, (2, 1)), (1, (1, 1))])
def test_a_fused_kernel_gets_whole_rows_of_its_heads(monkeypatch, K, own_heads):
    """jax's own plain form stands in for cuDNN's, which cannot run here."""
    told, shapes = jax.nn.dot_product_attention, []

    def stand_in(q, k, v, *, implementation, **how):
        shapes.append((q.shape, k.shape))
        return told(q, k, v, **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, sequence=4)))
    G, rng = max(1, 8 // K) if K > 1 else 4, np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((2, 16, K, G, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((2, 16, K, 8)), jnp.float32) for _ in range(2))
    q = jax.device_put(q, spec("batch", "seq", "kv_heads", None, "head_dim"))
    k, v = jax.device_put((k, v), spec("batch", "seq", "kv_heads", "head_dim"))

    def results(kernel: Kernel) -> list[jax.Array]:
        def weighted(q, k, v):
            out, _ = ulysses.attend(q, k, v, Mask(window=5), SCALE, kernel=kernel)
            return jnp.sum(out * jnp.cos(jnp.arange(8.0)).reshape(1, 1, 1, 1, 8)), out

        gradients, out = jax.jit(jax.grad(weighted, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        return [out, *gradients]

    kv_heads, group = own_heads
    for ours, theirs in zip(results("cudnn"), results("plain"), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert set(shapes) == {((1, 16, kv_heads * group, 8), (1, 16, kv_heads, 8))}
