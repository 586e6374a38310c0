"""RMSNorm, the MLP and how parameters are drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.model.layers import MLP, RMSNorm, normal, residual_std
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.zero import gathered

CONFIG = ModelConfig(vocab_size=8, embed_dim=16, mlp_dim=24, num_layers=8, num_heads=1, num_kv_heads=1, head_dim=2)


@pytest.fixture(autouse=True)
def _mesh():
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))


def _activations(seed: int, dtype: str) -> jax.Array:
    x = np.random.default_rng(seed).standard_normal((2, 4, CONFIG.embed_dim))
    return jax.device_put(jnp.asarray(x, dtype), spec("batch", "seq", None))


def test_rms_norm_is_computed_in_fp32_whatever_its_input():
    norm = RMSNorm(CONFIG.embed_dim, CONFIG)
    scale = np.random.default_rng(0).standard_normal(CONFIG.embed_dim).astype(np.float32)
    norm.scale[...] = jax.device_put(scale, spec(None))
    x = _activations(1, "bfloat16")
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + CONFIG.norm_eps) * scale
    normed = jax.jit(lambda norm, x: norm(x))(norm, x)
    # bit-equal to the exact result rounded once: nothing in between was bf16
    np.testing.assert_array_equal(np.asarray(normed, np.float32), np.asarray(jnp.asarray(expected, "bfloat16"), np.float32))


def test_mlp_is_swiglu():
    mlp = MLP(CONFIG, jax.random.key(0))
    x = _activations(2, "float32")
    out, _ = jax.jit(lambda mlp, x: gathered(mlp, x.dtype)(x))(mlp, x)
    w_gate_up, w_down = np.asarray(mlp.w_gate_up[...], np.float64), np.asarray(mlp.w_down[...], np.float64)
    gate, up = np.asarray(x) @ w_gate_up[:, 0], np.asarray(x) @ w_gate_up[:, 1]
    np.testing.assert_allclose(out, (gate / (1 + np.exp(-gate)) * up) @ w_down.T, atol=1e-8)
    assert jax.typeof(out).sharding.spec == spec("batch", "seq", None)


def test_initial_values_are_normal():
    values = normal(jax.random.key(3), 0.5)((256, 64), "float32", out_sharding=spec("mlp", "embed"))
    np.testing.assert_allclose(np.std(values), 0.5, rtol=0.02)
    np.testing.assert_allclose(np.mean(values), 0.0, atol=0.02)
    assert residual_std(CONFIG) == CONFIG.init_std / 4
