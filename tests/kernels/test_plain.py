"""The plain form against a loop over queries, with and without a window, and what its backward pass keeps."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.kernels import plain
from llamajax.kernels.plain import Mask
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec

B, T, K, G, H = 2, 8, 2, 3, 4
SCALE = 0.4
SEGMENT_IDS = np.array([[1, 1, 1, 2, 2, 2, 2, 3], [1, 1, 1, 1, 1, 0, 0, 0]], np.int32)


@pytest.fixture(autouse=True)
def _mesh():
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))


def _inputs(dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((B, T, K, G, H), (B, T, K, H), (B, T, K, H)))
    sharded = spec("batch", "seq", "kv_heads", None)
    return jax.device_put(q, spec("batch", "seq", "kv_heads", None, None)), *jax.device_put((k, v), sharded)


def _segments() -> jax.Array:
    return jax.device_put(SEGMENT_IDS, spec("batch", "seq"))


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, window: int | None = None
) -> tuple[jax.Array, jax.Array]:
    out, lse = plain.attend(q, k, v, Mask(window=window, segment_ids=segment_ids), SCALE, with_lse=True)
    assert lse is not None
    return out, lse


def _attend_by_loop(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, segment_ids: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray]:
    q, k, v = q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:-1])
    for b, t, head, g in np.ndindex(B, T, K, G):
        keys = [s for s in range(max(0, t + 1 - window), t + 1) if segment_ids[b, s] == segment_ids[b, t]]
        scores = SCALE * k[b, keys, head] @ q[b, t, head, g]
        weights = np.exp(scores)
        out[b, t, head, g] = weights @ v[b, keys, head] / weights.sum()
        lse[b, t, head, g] = jax.nn.logsumexp(scores)
    return out, lse


@pytest.mark.parametrize(
    ("dtype", "packed", "window"),
    [
        ("float32", True, None),
        ("float32", False, None),
        ("bfloat16", True, None),
        ("bfloat16", False, None),
        ("float32", True, 3),
        ("float32", False, 1),
        ("float32", False, T),
    ],
)
def test_equals_a_loop_over_queries(dtype: str, packed: bool, window: int | None):
    q, k, v = _inputs(dtype)
    out, lse = jax.jit(attend, static_argnums=4)(q, k, v, _segments() if packed else None, window)
    ids = SEGMENT_IDS if packed else np.ones_like(SEGMENT_IDS)
    expected, expected_lse = _attend_by_loop(np.asarray(q), np.asarray(k), np.asarray(v), ids, window or T)
    assert out.dtype == dtype
    assert jax.typeof(out).sharding.spec == spec("batch", "seq", "kv_heads", None, None)
    assert lse.dtype == jnp.float32
    assert jax.typeof(lse).sharding.spec == spec("batch", "seq", "kv_heads", None)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-6 if dtype == "float32" else 0.02)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=1e-6 if dtype == "float32" else 0.02)


def test_scores_and_softmax_are_fp32_for_bf16_inputs():
    # Read in the program: on the CPU, XLA may leave out a rounding to bf16, so the values cannot tell.
    jaxpr = str(jax.make_jaxpr(lambda *args: attend(*args)[0])(*_inputs("bfloat16"), _segments()))
    exps = [line for line in jaxpr.splitlines() if "= exp" in line]
    assert exps
    assert all(":f32[" in line for line in exps)
    assert jaxpr.count("preferred_element_type=float32") == 1


def test_scores_are_recomputed_not_kept():
    def out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, _segments())[0]

    _, backward = jax.eval_shape(partial(jax.vjp, out), *_inputs("float32"))
    kept = [leaf.shape for leaf in jax.tree.leaves(backward)]
    assert (B, T, K, G, H) in kept
    assert not [shape for shape in kept if shape[-2:] == (T, T)]


@pytest.mark.parametrize("window", [None, 3])
def test_chunks_of_queries_change_nothing(monkeypatch, window: int | None):
    """Two queries at a time instead of all four that a device has; gradients add up in fp32 over the chunks."""

    def out_and_gradients(chunk_scores: int) -> list[np.ndarray]:
        monkeypatch.setattr(plain, "MAX_CHUNK_SCORES", chunk_scores)

        def summed(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            out, lse = attend(q, k, v, _segments(), window)
            return jnp.sum(out**2) + jnp.sum(jnp.sin(lse)), (out, lse)

        (_, outs), gradients = jax.jit(jax.value_and_grad(summed, argnums=(0, 1, 2), has_aux=True))(*_inputs("float32"))
        return [np.asarray(x) for x in (*outs, *gradients)]

    whole, chunked = out_and_gradients(2**20), out_and_gradients(G * 2 * T)
    for left, right in zip(whole, chunked, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)
