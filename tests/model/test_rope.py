"""Rotary frequencies, tables, the turn itself, and positions of packed rows."""

import dataclasses
import hashlib
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.model import ModelConfig, RopeScalingConfig
from llamajax.config.parallel import MeshConfig
from llamajax.model import Llama, attention
from llamajax.model.rope import apply_rope, inverse_frequencies, positions_from_segment_ids, rope_tables, score_factor
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec
from tests.tiny import tiny_config

CONFIG = ModelConfig(
    vocab_size=8, embed_dim=8, mlp_dim=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=128, rope_theta=5e5
)
LLAMA31 = RopeScalingConfig(kind="llama3", factor=8.0, original_max_seq_len=8192)


@pytest.fixture(autouse=True)
def _mesh():
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))


def _scaled(scaling: RopeScalingConfig) -> np.ndarray:
    return inverse_frequencies(dataclasses.replace(CONFIG, rope_scaling=scaling))


def test_plain_frequencies_are_powers_of_theta():
    exact = 5e5 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(inverse_frequencies(CONFIG), exact, rtol=1e-6)
    assert inverse_frequencies(CONFIG).dtype == np.float32


def test_frequencies_are_to_the_bit_those_of_transformers():
    """As torch computes them without vector instructions (ATEN_CPU_CAPABILITY=default), hashed; with them, torch 2.13 has
    other last bits on some CPUs."""
    yarn = RopeScalingConfig(kind="yarn", factor=4.0, original_max_seq_len=32768)
    tuned = RopeScalingConfig(kind="yarn", factor=16.0, original_max_seq_len=4096, beta_fast=24.0, beta_slow=2.0)
    fractions = RopeScalingConfig(kind="yarn", factor=1.5, original_max_seq_len=2048, truncate=False)
    dynamic = RopeScalingConfig(kind="dynamic", factor=2.5, original_max_seq_len=4096)
    stretched: dict[tuple[int, float, RopeScalingConfig], str] = {
        (128, 1e6, yarn): "fc3a149b70f4f0c5",
        (64, 1e4, tuned): "033f985a9d1b6eda",
        (80, 5e5, fractions): "ef929e6451e61353",
        (64, 1e4, dynamic): "734f9e6b629f7bac",
    }
    for (head_dim, theta, scaling), expected in stretched.items():
        config = dataclasses.replace(CONFIG, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
        assert hashlib.sha256(inverse_frequencies(config).tobytes()).hexdigest()[:16] == expected, (head_dim, scaling)
    published: dict[tuple[int, float, Literal["none", "linear", "llama3"]], str] = {
        (128, 1e4, "none"): "4b659c349432de9f",
        (128, 5e5, "none"): "dde15c3172417735",
        (64, 5e5, "llama3"): "29fc7f650b240e44",
        (128, 5e5, "llama3"): "4ae2280930816279",
        (128, 1000042.0, "none"): "7d7402e3b53aeb8b",
        (80, 1e5, "linear"): "688e8b0fd301a4e5",
    }
    for (head_dim, theta, kind), expected in published.items():
        scaling = RopeScalingConfig(kind=kind, factor=1.0 if kind == "none" else 8.0)
        config = dataclasses.replace(CONFIG, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
        assert hashlib.sha256(inverse_frequencies(config).tobytes()).hexdigest()[:16] == expected, (head_dim, theta, kind)


def test_the_score_factor_multiplies_the_scores(monkeypatch):
    """With a factor of 0 a token takes the mean of all tokens that it sees, at any position."""
    config = dataclasses.replace(tiny_config().model, num_layers=1)
    tokens, apart = jnp.arange(64).reshape(8, 8), jnp.broadcast_to(jnp.arange(0, 64, 8), (8, 8))

    def logits(factor: float) -> list[np.ndarray]:
        monkeypatch.setattr(attention, "score_factor", lambda _: factor)
        model = jax.jit(lambda: Llama(config, jax.random.key(0)))()
        return [np.asarray(jax.jit(lambda p: model(tokens, positions=p))(positions)) for positions in (None, apart)]

    assert score_factor(config) == 1.0
    yarn = dataclasses.replace(config, rope_scaling=RopeScalingConfig(kind="yarn", factor=math.e))
    assert score_factor(yarn) == pytest.approx(1.1**2)
    here, there = logits(0.0)
    np.testing.assert_array_equal(here, there)
    here, there = logits(1.0)
    assert np.abs(here - there).max() > 0.01


def test_linear_scaling_divides_every_frequency():
    scaled = _scaled(RopeScalingConfig(kind="linear", factor=4.0))
    np.testing.assert_array_equal(scaled, inverse_frequencies(CONFIG) / 4)


def test_llama3_scaling_leaves_short_wavelengths_and_stretches_long_ones():
    plain, scaled = inverse_frequencies(CONFIG), _scaled(LLAMA31)
    wavelength = 2 * np.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
    assert (short.sum(), long.sum()) == (29, 29)
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_array_equal(scaled[long], plain[long] / 8)
    between = (scaled / plain)[~short & ~long]
    assert np.all(np.diff(between) < 0)
    assert np.all((between > 1 / 8) & (between < 1))
    kept = (8192 / wavelength[29:35] - 1) / (4 - 1)
    np.testing.assert_allclose(between, kept + (1 - kept) / 8, rtol=1e-5)


def test_tables_are_exact_at_long_positions():
    positions = np.stack([np.arange(8), 131072 - np.arange(8)]).astype(np.int32)
    cos, sin = jax.jit(rope_tables, static_argnums=1)(jax.device_put(positions, spec("batch", "seq")), CONFIG)
    angles = positions.astype(np.float32)[:, :, None] * inverse_frequencies(CONFIG)[None, None, :]
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(angles.astype(np.float64)), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles.astype(np.float64)), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dim_i_and_i_plus_half_turn_as_one_complex_number(dtype: str):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 4, 3, 2, 8)), dtype)
    angles = rng.standard_normal((2, 4, 4)).astype(np.float32)
    turned = apply_rope(x, jnp.cos(angles), jnp.sin(angles))
    wide = np.asarray(x, np.float64)
    expected = (wide[..., :4] + 1j * wide[..., 4:]) * np.exp(1j * angles)[:, :, None, None, :]
    assert turned.dtype == dtype
    expected = np.concatenate([expected.real, expected.imag], axis=-1)
    np.testing.assert_allclose(
        np.asarray(turned, np.float64), expected, rtol=2**-8 if dtype == "bfloat16" else 1e-5, atol=1e-6
    )


def test_positions_restart_with_every_segment_across_devices():
    # The sequence axis cuts the rows in the middle: segment 2 of row 0 and the padding of row 1 reach over the cut.
    segment_ids = np.array([[1, 1, 2, 2, 2, 2, 3, 0], [5, 0, 0, 0, 0, 0, 4, 4]], np.int32)
    positions = jax.jit(positions_from_segment_ids)(jax.device_put(segment_ids, spec("batch", "seq")))
    np.testing.assert_array_equal(positions, [[0, 1, 0, 1, 2, 3, 0, 0], [0, 0, 1, 2, 3, 4, 0, 1]])
    assert jax.typeof(positions).sharding.spec == spec("batch", "seq")
    assert positions.dtype == jnp.int32
