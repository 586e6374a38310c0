"""Ring attention: what one device computes, on every ring; what it keeps and what it sends."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.kernels import plain
from llamajax.kernels.attention import Mask, attend
from llamajax.kernels.ring import attend as ring_attend
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from tests.kernels.split_rows import SCALE, check, check_bf16, results, zigzag


@pytest.mark.parametrize(
    ("axes", "case"),
    [
        ({"sequence": 2}, {}),
        ({"sequence": 4}, {"window": 7, "packed": False}),
        ({"sequence": 3, "fsdp": 2}, {"T": 18, "window": 2}),  # a chunk is 3, a device's part 6
        ({"sequence": 4}, {"T": 40, "window": 12, "K": 1, "G": 4}),  # 5 and 10
        ({"fsdp": 2, "sequence": 2, "tensor": 2}, {"window": 20}),
        pytest.param({"sequence": 8}, {}, marks=pytest.mark.long),
        pytest.param({"data": 2, "sequence": 4}, {"K": 4, "G": 1, "packed": False}, marks=pytest.mark.long),
        pytest.param({"sequence": 4, "tensor": 2}, {"window": 1}, marks=pytest.mark.slow),
        pytest.param({"sequence": 6}, {"T": 36, "packed": False}, marks=pytest.mark.slow),
        pytest.param({"sequence": 8}, {"T": 48, "window": 25, "packed": False}, marks=pytest.mark.long),
        pytest.param({"sequence": 7}, {"T": 14, "window": 5}, marks=pytest.mark.long),
    ],
)
def test_equals_one_device(axes, case):
    check("ring", axes, **case)


def test_bf16_is_as_near_as_gathered_keys_and_values():
    check_bf16("ring")


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.long), True])
def test_chunks_of_queries_change_nothing(monkeypatch, packed):
    whole = results("ring", sequence=4, packed=packed)
    monkeypatch.setattr(plain, "MAX_CHUNK_SCORES", 2 * 2 * 2 * 4)  # one query of the four in a chunk, or of eight
    results.cache_clear()
    chunked = results("ring", sequence=4, packed=packed)
    results.cache_clear()
    for name, values in whole.items():
        np.testing.assert_allclose(values, chunked[name], atol=1e-6, err_msg=name)


def _arguments(T: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    jax.set_mesh(make_mesh(MeshConfig(fsdp=1, sequence=4), jax.devices()[:4]))
    rng = np.random.default_rng(0)
    q, *kv = (rng.standard_normal((1, T, *heads), np.float32) for heads in ((1, 2, 4), (1, 4), (1, 4)))
    heads = spec("batch", "seq", "kv_heads", None)
    return jax.device_put(q, spec("batch", "seq", "kv_heads", None, None)), *(jax.device_put(x, heads) for x in kv)


def test_nothing_of_scores_is_kept():
    T = 32
    q, k, v = _arguments(T)
    _, backward = jax.eval_shape(partial(jax.vjp, lambda q, k, v: ring_attend(q, k, v, Mask(), SCALE)[0]), q, k, v)
    kept = [leaf.shape for leaf in jax.tree.leaves(backward)]
    assert max(np.prod(shape) for shape in kept) == q.size


def test_no_gradient_comes_from_the_future():
    T = 16
    q, k, v = _arguments(T)
    order = zigzag(4, T)

    @jax.jit
    def seen(k: jax.Array, v: jax.Array) -> jax.Array:
        """[T, T]: how much each output depends on each key and value."""

        def out(k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.reshard(attend(q, k, v, Mask(window=6), SCALE, sequence="ring")[0], jax.P()).sum((0, 2, 3, 4))

        d_k, d_v = jax.jacrev(out, argnums=(0, 1))(k, v)
        return jnp.abs(jax.reshard(d_k, jax.P())).sum((1, 3, 4)) + jnp.abs(jax.reshard(d_v, jax.P())).sum((1, 3, 4))

    back = np.argsort(order)
    depends = np.asarray(seen(k, v))[back][:, back] > 0
    index = np.arange(T)
    distance = index[:, None] - index[None, :]
    np.testing.assert_array_equal(depends, (distance >= 0) & (distance < 6))


def test_blocks_that_no_window_reaches_are_not_computed():
    """Values that are no numbers would show there, though no token sees them; chunks are of four tokens."""
    T, window = 32, 4
    q, k, v = _arguments(T)
    order = zigzag(4, T)
    first = order < 4
    v = jax.device_put(jnp.where(first[None, :, None, None], jnp.nan, v), jax.typeof(v).sharding.spec)

    @jax.jit
    def there_and_back(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, backward = jax.vjp(lambda q: ring_attend(q, k, v, Mask(window=window), SCALE)[0], q)
        return out, backward(jnp.ones_like(out))[0]

    for values in there_and_back(q):
        clean = np.isfinite(np.asarray(values)).all((0, 2, 3, 4))
        # The second chunk still sees the first; its device's late one takes a share of zero of the same numbers.
        np.testing.assert_array_equal(clean, (order >= 8) & (order // 4 != 6))


def test_keys_travel_once_around_and_their_gradients_once(monkeypatch):
    """Counted in the program of four devices: three hops forward, three backward, and three of the gradients."""
    q, k, v = _arguments(16)
    hops = []
    permute = jax.lax.ppermute
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, *ring: (hops.append(x.shape[0]), permute(x, *ring))[1])
    jax.make_jaxpr(jax.grad(lambda q, k, v: jnp.sum(ring_attend(q, k, v, Mask(), SCALE)[0]), argnums=(0, 1, 2)))(q, k, v)
    # Forward: the first hop, and the loop's body, which runs twice. Backward: the first, the second, the loop's body, which
    # runs once, of keys, values and their gradients; and the last two of the gradients.
    assert hops == [2, 2, 2, 2, 4, 2, 2]


@pytest.mark.parametrize(("saved", "rings"), [((), 2), (("attention",), 1)])
def test_who_keeps_attention_turns_the_ring_forward_once(saved, rings):
    q, k, v = _arguments(16)
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    layer = jax.checkpoint(lambda q: jnp.sin(attend(q, k, v, Mask(), SCALE, sequence="ring")[0]), policy=policy)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda q: jnp.sum(layer(q))))(q))
    backward_hops = 5
    assert jaxpr.count("ppermute[") == 2 * rings + backward_hops
