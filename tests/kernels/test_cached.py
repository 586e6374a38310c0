"""Attention of new tokens to those read before, against fp64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.kernels import cached, plain
from llamajax.kernels.cached import Past
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec

B, S, K, G, H = 8, 18, 2, 3, 4
SCALE = 0.4
LENGTHS = np.array([8, 1, 5, 7, 3, 2, 6, 4], np.int32)


ROWS = np.array([1, 0, 3, 3, 4, 6, 7, 7], np.int32)


@pytest.mark.parametrize(
    ("window", "T", "rows"),
    [
        pytest.param(window, T, rows, marks=() if (T > 1) == (rows is not None) else pytest.mark.slow)
        for window in (None, 3)
        for T, rows in ((1, None), (4, ROWS), (1, ROWS), (4, None))
    ],
)
def test_attention_to_the_past_is_a_softmax_of_any_size(window: int | None, T: int, rows: np.ndarray | None, monkeypatch):
    """Against fp64, with scores in the hundreds, whose exponentials would overflow; several tokens also see each other."""
    monkeypatch.setattr(plain, "MAX_CHUNK_SCORES", 300)  # so that four queries take two turns
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, T, K, G, H), (B, T, K, H), (B, T, K, H)))
    keys, values = rng.standard_normal((2, B, K, S, H)).astype(np.float32)
    q *= 200
    own, past = spec("batch", None, "kv_heads", None), spec("batch", "kv_heads", "seq", None)
    by_row = spec("batch")
    out, lse = jax.jit(partial(cached.attend, window=window, scale=SCALE, with_lse=True))(
        jax.device_put(q, spec("batch", None, "kv_heads", None, None)),
        jax.device_put(k, own),
        jax.device_put(v, own),
        Past(
            jax.device_put(keys, past),
            jax.device_put(values, past),
            jax.device_put(LENGTHS, by_row),
            None if rows is None else jax.device_put(rows, by_row),
        ),
    )
    assert lse is not None
    assert lse.dtype == jnp.float32
    out, lse = np.asarray(out), np.asarray(lse)
    for b, t, head, g in np.ndindex(B, T, K, G):
        row = b if rows is None else rows[b]
        known = [
            np.concatenate([x[row, head, : LENGTHS[row]], new[b, : t + 1, head]]) for x, new in ((keys, k), (values, v))
        ]
        seen = [x if window is None else x[-window:] for x in known]
        scores = seen[0].astype(np.float64) @ q[b, t, head, g] * SCALE
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(out[b, t, head, g], weights @ seen[1] / weights.sum(), atol=1e-4)
        np.testing.assert_allclose(lse[b, t, head, g], scores.max() + np.log(weights.sum()), rtol=1e-5, atol=1e-4)


def test_a_batch_in_bf16_runs_on_a_cpu():
    """XLA for CPUs lacks some products of bfloat16; generation with a batch must not meet one."""
    jax.set_mesh(mesh.make_mesh(MeshConfig(data=8)))
    rng = np.random.default_rng(0)
    shapes = (2 * B, 4, K, G, H), (2 * B, 4, K, H), (2 * B, K, S, H)
    q, k, keys = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    of_keys = spec("batch", None, "kv_heads", None), spec("batch", "kv_heads", "seq", None)
    specs = spec("batch", None, "kv_heads", None, None), *of_keys
    found = []
    for dtype in (jnp.bfloat16, jnp.float32):
        own = [jax.device_put(x.astype(dtype), of) for x, of in zip((q, k, keys), specs, strict=True)]
        past = Past(own[2], own[2], jax.device_put(np.full(2 * B, 7, np.int32), spec("batch")), None)
        attend = jax.jit(partial(cached.attend, window=None, scale=SCALE))
        found.append(np.asarray(attend(own[0], own[1], own[1], past)[0], np.float32))
    np.testing.assert_allclose(*found, atol=0.05)
