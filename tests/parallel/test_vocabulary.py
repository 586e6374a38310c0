"""A table that is split by rows: looked up wherever a row lies, and a softmax over all of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.vocabulary import logits, look_up, row_ids, split_softmax, table
from llamajax.parallel.zero import gathered


def stored_table(values: np.ndarray) -> nnx.Param:
    def init(shape: tuple[int, ...], dtype: str, out_sharding: jax.P) -> jax.Array:
        assert shape == values.shape
        return jnp.asarray(values, dtype, device=jax.NamedSharding(jax.sharding.get_mesh(), out_sharding))

    num_rows, num_columns = values.shape
    return table(num_rows, num_columns, "float32", init)


@pytest.fixture(autouse=True)
def _mesh():
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))


@pytest.mark.parametrize("num_rows", [32, 27])
@pytest.mark.parametrize("axes", [MeshConfig(fsdp=2, sequence=2, tensor=2), MeshConfig(data=2, tensor=4)])
def test_embedding_looks_up_every_token_wherever_its_row_lies(axes: MeshConfig, num_rows: int):
    jax.set_mesh(mesh.make_mesh(axes))
    rng = np.random.default_rng(0)
    values, tokens = (
        rng.standard_normal((num_rows, 8)).astype(np.float32),
        rng.integers(0, num_rows, (4, 8)).astype(np.int32),
    )
    cotangent = rng.standard_normal((4, 8, 8)).astype(np.float32)
    stored = stored_table(values)
    tokens_on_mesh = jax.device_put(tokens, spec("batch", "seq"))

    @jax.jit
    def look_up_and_back(stored: nnx.Param) -> tuple[jax.Array, nnx.Param]:
        x, backward = jax.vjp(lambda stored: look_up(gathered(stored, "float32")[...], tokens_on_mesh), stored)
        return x, backward(jax.reshard(cotangent, jax.typeof(x).sharding.spec))[0]

    x, gradient = look_up_and_back(stored)
    assert jax.typeof(x).sharding.spec == spec("batch", "residual_seq", None)
    expected = np.zeros_like(values)
    np.add.at(expected, tokens, cotangent)
    np.testing.assert_array_equal(x, values[tokens])
    np.testing.assert_allclose(gradient[...], expected, atol=1e-5)
    assert jax.typeof(gradient[...]) == jax.typeof(stored[...])


def test_embedding_gradient_of_a_frequent_token_is_summed_in_fp32():
    tokens = jax.device_put(np.zeros((2, 2048), np.int32), spec("batch", "seq"))

    def total(stored: nnx.Param) -> jax.Array:
        return jnp.sum(look_up(gathered(stored, "bfloat16")[...], tokens).astype(jnp.float32))

    gradient = np.asarray(jax.jit(jax.grad(total))(stored_table(np.ones((32, 4), np.float32)))[...])
    np.testing.assert_array_equal(gradient[0], 4096)  # a bf16 sum stops growing at 256
    np.testing.assert_array_equal(gradient[1:], 0)


def test_embedding_gradient_adds_up_more_tokens_than_one_product_takes():
    """2,500 tokens on each device: two whole products and a part of one; ids that come once, often and never."""
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.3, (2, 5000)), 900).astype(np.int32)
    cotangent = rng.integers(-8, 9, (2, 5000, 4)).astype(np.float32)  # whose sums are exact in any order
    stored = stored_table(np.zeros((1000, 4), np.float32))

    @jax.jit
    def gradient(stored: nnx.Param) -> nnx.Param:
        x, backward = jax.vjp(lambda stored: look_up(gathered(stored, "float32")[...], ids), stored)
        return backward(jax.reshard(cotangent, jax.typeof(x).sharding.spec))[0]

    ids = jax.device_put(tokens, spec("batch", "seq"))
    expected = np.zeros((1000, 4), np.float32)
    np.add.at(expected, tokens, cotangent)
    assert len(np.unique(tokens)) > 100
    np.testing.assert_array_equal(gradient(stored)[...], expected)


@pytest.mark.parametrize("num_rows", [32, 13, 2])
def test_a_softmax_over_all_rows(num_rows):
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, tensor=4)))
    rng = np.random.default_rng(0)
    values, targets = rng.standard_normal((num_rows, 8)).astype(np.float32), np.array([0, num_rows - 1, num_rows // 2, -1])
    rows = gathered(stored_table(values), "float32")[...]

    def on_device(rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        softmax, is_target = split_softmax(100 * rows.T[:4], row_ids(rows, num_rows), jnp.asarray(targets))
        own_sums = jnp.sum(softmax.exps, axis=-1), jnp.sum(is_target, axis=-1)
        return jnp.log(softmax.total) + softmax.largest, softmax.target, jax.lax.psum(own_sums, "tensor")

    in_parts = jax.shard_map(on_device, in_specs=spec("vocab", None), out_specs=spec(None), check_vma=False)
    lse, target, (total, found) = jax.jit(in_parts)(jax.reshard(rows, spec("vocab", None)))
    scores = 100 * values[:, :4]
    np.testing.assert_allclose(lse, jax.nn.logsumexp(scores, axis=0), rtol=1e-6)
    np.testing.assert_array_equal(target, [*(scores[targets[:3], range(3)]), 0.0])
    np.testing.assert_allclose(total, np.exp(scores - scores.max(axis=0)).sum(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(found, [1, 1, 1, 0])


@pytest.mark.parametrize(("num_rows", "own", "computed"), [(32, (8, 4), 32), (13, (13, 1), 16)])
def test_rows_are_stored_by_those_that_share_them_and_their_gradient_comes_back_there(num_rows, own, computed):
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, tensor=4)))
    values = np.random.default_rng(0).standard_normal((num_rows, 8)).astype(np.float32)
    stored = stored_table(values)
    assert stored[...].sharding.shard_shape(values.shape) == own
    copy, backward = jax.jit(lambda stored: jax.vjp(lambda stored: gathered(stored, "float32")[...], stored))(stored)
    assert copy.shape == (computed, 8)
    np.testing.assert_array_equal(np.asarray(copy)[:num_rows], values)
    copy_spec = jax.typeof(copy).sharding.spec
    unsummed = jnp.ones(copy.shape, copy.dtype, out_sharding=jax.P(*copy_spec.partitions, unreduced=copy_spec.reduced))
    (gradient,) = backward(unsummed)
    np.testing.assert_array_equal(gradient[...], np.full_like(values, 2))  # the sum over fsdp
    assert jax.typeof(gradient[...]) == jax.typeof(stored[...])


@pytest.mark.parametrize("num_rows", [32, 13])
def test_logits_are_of_all_rows_and_no_others(num_rows):
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, tensor=4)))
    rng = np.random.default_rng(0)
    values, x = rng.standard_normal((num_rows, 8)).astype(np.float32), rng.standard_normal((4, 8)).astype(np.float32)
    stored, x_on_mesh = stored_table(values), jax.device_put(x, spec("batch", None))

    @jax.jit
    def scores(x: jax.Array, stored: nnx.Param) -> jax.Array:
        return logits(x, gathered(stored, x.dtype)[...], num_rows)

    out, backward = jax.vjp(scores, x_on_mesh, stored)
    np.testing.assert_allclose(out, x @ values.T, rtol=1e-5, atol=1e-5)
    cotangent = rng.standard_normal((4, num_rows)).astype(np.float32)
    d_x, d_table = backward(jax.device_put(cotangent, jax.typeof(out).sharding.spec))
    np.testing.assert_allclose(d_x, cotangent @ values, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_table[...], cotangent.T @ x, rtol=1e-5, atol=1e-5)
    assert jax.typeof(d_table[...]) == jax.typeof(stored[...])
