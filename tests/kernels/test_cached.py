"""Attention of new tokens to those read before, against fp64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.kernels import cached
from llamajax.kernels.cached import Past
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec

B, S, K, G, H = 8, 18, 2, 3, 4
SCALE = 0.4
LENGTHS = np.array([8, 1, 5, 7, 3, 2, 6, 4], np.int32)


@pytest.mark.parametrize("window", [None, 5])
def test_attention_to_the_past_is_a_softmax_of_any_size(window: int | None):
    """Against fp64, with scores in the hundreds, whose exponentials would overflow."""
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, 1, K, G, H), (B, 1, K, H), (B, 1, K, H)))
    keys, values = rng.standard_normal((2, B, K, S, H)).astype(np.float32)
    q *= 200
    own, past = spec("batch", None, "kv_heads", None), spec("batch", "kv_heads", "seq", None)
    out, lse = jax.jit(partial(cached.attend, window=window, scale=SCALE, with_lse=True))(
        jax.device_put(q, spec("batch", None, "kv_heads", None, None)),
        jax.device_put(k, own),
        jax.device_put(v, own),
        Past(jax.device_put(keys, past), jax.device_put(values, past), jax.device_put(LENGTHS, spec("batch"))),
    )
    assert lse is not None
    assert lse.dtype == jnp.float32
    out, lse = np.asarray(out), np.asarray(lse)
    for b, head, g in np.ndindex(B, K, G):
        first = 0 if window is None else max(0, LENGTHS[b] + 1 - window)
        seen = [np.concatenate([x[b, head, first : LENGTHS[b]], new[b, :, head]]) for x, new in ((keys, k), (values, v))]
        scores = seen[0].astype(np.float64) @ q[b, 0, head, g] * SCALE
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(out[b, 0, head, g], weights @ seen[1] / weights.sum(), atol=1e-4)
        np.testing.assert_allclose(lse[b, 0, head, g], jax.nn.logsumexp(scores), rtol=1e-5)
