"""A weight is stored and gathered as it says, and its gradient comes back as it is stored."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh
from llamajax.parallel.sharding import as_tuple, spec
from llamajax.parallel.zero import DATA, gathered, no_gradient, scaled, split_over, token_axes, weight, whole_over_data


def ones(shape: tuple[int, ...], dtype: str, out_sharding: jax.P) -> jax.Array:
    return jnp.ones(shape, dtype, out_sharding=out_sharding)


class Parts(nnx.Module):
    """Two weights, one of which is read as it is stored."""

    def __init__(self):
        def count(shape: tuple[int, ...], dtype: str, out_sharding: jax.P) -> jax.Array:
            return jax.reshard(jnp.arange(np.prod(shape), dtype=dtype).reshape(shape), out_sharding)

        self.matrix = weight((8, 8), "float32", stored=("mlp", "embed"), compute=("mlp", None), init=count)
        self.scale = weight((4,), "float32", stored=(None,), compute=None, init=jnp.ones)


MESHES = [MeshConfig(fsdp=4, tensor=2), MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(fsdp=2, sequence=4)]


@pytest.mark.parametrize("sizes", MESHES)
def test_a_module_is_gathered_whole_and_its_gradient_is_scattered(sizes):
    jax.set_mesh(mesh.make_mesh(sizes))
    parts = Parts()
    assert jax.typeof(parts.matrix[...]).sharding.spec == spec("mlp", "embed")
    x = jax.device_put(np.ones((8, 8, 8), np.float32), spec("batch", "seq", None))

    def total(parts: Parts, x: jax.Array) -> tuple[jax.Array, Parts]:
        ready = gathered(parts, "bfloat16")
        out = jnp.einsum("BTD,FD->BTF", x, ready.matrix[...].astype("float32"))
        return jnp.sum(out), ready

    gradients, ready = jax.jit(jax.grad(total, has_aux=True))(parts, x)
    assert ready.matrix.dtype == jnp.bfloat16
    assert jax.typeof(ready.matrix[...]).sharding.spec == jax.P(
        "tensor", None, reduced=frozenset({"pipeline", "data", "fsdp", "expert", "sequence"})
    )
    assert ready.scale.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(ready.matrix[...], np.float32), np.arange(64).reshape(8, 8))
    assert jax.typeof(gradients.matrix[...]) == jax.typeof(parts.matrix[...])
    np.testing.assert_array_equal(gradients.matrix[...], np.full((8, 8), 64))


def test_copies_made_before_serve_as_well_and_the_weights_get_their_gradient():
    jax.set_mesh(mesh.make_mesh(MESHES[1]))
    parts = Parts()
    x = jax.device_put(np.arange(128, dtype=np.float32).reshape(8, 2, 8), spec("batch", "seq", None))

    def total(parts: Parts, copies: Parts | None) -> jax.Array:
        ready = gathered(parts, "float32", copies)
        return jnp.sum(jnp.sin(jnp.einsum("BTD,FD->BTF", x, ready.matrix[...])) * ready.scale[...].sum())

    copies = jax.jit(gathered, static_argnums=1)(parts, "float32")
    expected = jax.jit(jax.grad(total))(parts, None)
    found = jax.jit(jax.grad(total))(parts, copies)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert jax.typeof(ours) == jax.typeof(theirs)
    others = jax.tree.map(lambda x: 2 * x, copies)
    assert float(jax.jit(total)(parts, others)) != float(jax.jit(total)(parts, copies))  # they are what is computed with


def test_what_is_split_over_data_too_comes_back_and_waits_for_its_gradient():
    jax.set_mesh(mesh.make_mesh(MESHES[1]))
    parts = Parts()
    split = jax.jit(partial(split_over, further=DATA))(parts)
    assert split.matrix[...].sharding.shard_shape((8, 8)) == (4, 2)
    assert split.scale[...].sharding.is_fully_replicated

    def join(parts: Parts, left_open: tuple[str, ...]) -> Parts:
        return whole_over_data(parts, "bfloat16", left_open=left_open)

    joined = jax.jit(join, static_argnums=1)(split, ())
    assert joined.matrix.dtype == jnp.bfloat16
    assert jax.typeof(joined.matrix[...]).sharding.spec == spec("mlp", "embed")
    np.testing.assert_array_equal(joined.matrix[...], np.arange(64).reshape(8, 8))
    same = jax.jit(join, static_argnums=1)(parts, ())
    assert same.matrix.dtype == jnp.float32  # nothing to do

    waiting, back = jax.jit(lambda parts: jax.vjp(lambda parts: join(parts, ("data", "sequence")), parts))(split)
    lies = jax.typeof(waiting.matrix[...]).sharding.spec
    assert (lies.partitions, lies.reduced) == (tuple(spec("mlp", "embed")), {"data"})

    def ones(x: jax.Array) -> jax.Array:
        return jnp.ones(x.shape, x.dtype, out_sharding=jax.typeof(no_gradient(x, jnp.zeros((), x.dtype))).sharding.spec)

    (gradient,) = jax.jit(back)(jax.tree.map(ones, waiting))
    assert jax.typeof(gradient.matrix[...]) == jax.typeof(split.matrix[...])
    np.testing.assert_array_equal(gradient.matrix[...], np.full((8, 8), 2))  # one of each device along data


@pytest.mark.parametrize(
    ("shape", "entries"),
    [
        ((8, 6, 4), (("fsdp", "data"), None, None)),
        ((4, 6, 4), ("fsdp", "data", None)),  # a matrix of each expert, as many experts as shards
        ((4, 3, 4), ("fsdp", None, "data")),
        ((4, 3, 5), ("fsdp", None, None)),
    ],
)
def test_a_later_dim_is_split_where_experts_are_too_few(shape, entries):
    jax.set_mesh(mesh.make_mesh(MeshConfig(data=2, fsdp=4)))
    own = jax.jit(
        lambda: weight(shape, "float32", stored=("expert_shards", None, None), compute=("experts", None, None), init=ones)
    )()
    split = jax.jit(partial(split_over, further=DATA))(own)
    kept = [
        tuple(axis for axis in as_tuple(entry) if axis in ("data", "fsdp")) for entry in jax.typeof(split[...]).sharding.spec
    ]
    assert kept == [as_tuple(entry) for entry in entries]
    np.testing.assert_array_equal(split[...], own[...])


@pytest.mark.parametrize("late", [True, False])
def test_a_scaled_dim_is_a_product_whose_gradient_may_wait(late):
    jax.set_mesh(mesh.make_mesh(MESHES[1]))
    rng = np.random.default_rng(0)
    values, scale = rng.standard_normal((8, 2, 4), np.float32), rng.standard_normal(4, np.float32)
    x = jax.device_put(values, spec("batch", "seq", None))
    reduced = token_axes() if late else frozenset()
    weight = jax.jit(lambda: jax.reshard(jnp.asarray(scale), jax.P(None, reduced=reduced)))()

    def total(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(scaled(x, weight)))

    d_x, d_weight = jax.jit(jax.grad(total, (0, 1)))(x, weight)
    np.testing.assert_allclose(d_x, np.cos(values * scale) * scale, rtol=1e-5)
    assert jax.typeof(d_weight).sharding.spec.unreduced == reduced
    summed = jax.jit(lambda g: jax.reshard(g, jax.P(None)))(d_weight)
    np.testing.assert_allclose(summed, (np.cos(values * scale) * values).sum((0, 1)), rtol=1e-5)
