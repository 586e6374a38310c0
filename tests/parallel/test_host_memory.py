"""Arrays in host memory: passes over a stack of them give the numbers of the whole, and stay where they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel import host_memory
from llamajax.parallel.host_memory import DEVICE, HOST, added, by_layer, cast, empty_like, is_on_host, moved, total
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec

L, D, E = 3, 16, 4


@pytest.fixture(autouse=True)
def mesh():
    jax.set_mesh(make_mesh(MeshConfig(fsdp=8)))


def stack(dtype: str = "float32") -> jax.Array:
    numbers = np.random.default_rng(0).standard_normal((L, D, E), np.float32)
    return jax.device_put(jnp.asarray(numbers, dtype), spec(None, "embed", None))


def on_host(x: jax.Array) -> jax.Array:
    return jax.jit(lambda x: moved(x, HOST))(x)


def kind(x: jax.Array) -> str | None:
    return x.sharding.memory_kind


def test_an_array_is_moved_once():
    x = on_host(stack())
    assert (kind(x), kind(stack())) == ("pinned_host", "device")
    back = jax.jit(lambda x: (moved(x, HOST), moved(x, DEVICE)))(x)
    assert list(map(kind, back)) == ["pinned_host", "device"]
    np.testing.assert_array_equal(back[1], stack())
    assert "device_put" not in str(jax.make_jaxpr(lambda x: moved(x, HOST))(x))
    assert is_on_host(x)
    assert not is_on_host(stack())


@pytest.mark.parametrize("place", ["host", "card"])
def test_a_sum_over_parts_knows_where_each_begins(place):
    """In a sum of products with the position, no part can be taken for another."""
    x = on_host(stack()) if place == "host" else stack()

    def weighed(own: jax.Array, first: jax.Array | int) -> jax.Array:
        own = jax.reshard(own, jax.P(*[None] * own.ndim)).reshape(-1)
        return jnp.sum(own * (first + jnp.arange(own.size)))

    expected = np.sum(np.asarray(stack()).reshape(-1) * np.arange(L * D * E))
    np.testing.assert_allclose(jax.jit(lambda x: total(weighed, x))(x), expected, rtol=1e-5)


def test_layers_are_brought_one_by_one():
    found = jax.jit(lambda x: by_layer(lambda own: moved(2 * own, HOST), x))(on_host(stack()))
    assert kind(found) == "pinned_host"
    np.testing.assert_array_equal(found, 2 * stack())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_and_casts_stay_where_they_are(dtype):
    so_far, x = on_host(stack("float32")), on_host(stack(dtype))
    both = jax.jit(added)(so_far, x)
    assert (kind(both), both.dtype) == ("pinned_host", jnp.float32)
    np.testing.assert_array_equal(both, stack() + stack(dtype))
    narrow = jax.jit(cast, static_argnums=1)(so_far, jnp.dtype("bfloat16"))
    assert (kind(narrow), narrow.dtype) == ("pinned_host", jnp.bfloat16)
    np.testing.assert_array_equal(narrow, stack("bfloat16"))
    assert kind(jax.jit(cast, static_argnums=1)(stack(), jnp.dtype("bfloat16"))) == "device"


@pytest.mark.parametrize("internals", [host_memory.lax_internals, object()], ids=["as of loops", "of zeros"])
def test_an_empty_array_has_the_shape_and_the_place(monkeypatch, internals):
    monkeypatch.setattr(host_memory, "lax_internals", internals)
    like = stack("bfloat16")
    (found,) = jax.jit(lambda: empty_like(like, jax.typeof(like).sharding.spec)).trace().jaxpr.out_avals
    assert (found.shape, found.dtype, found.memory_space) == (like.shape, like.dtype, HOST)
    assert found.sharding.spec == jax.typeof(like).sharding.spec
