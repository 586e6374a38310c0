"""A table that is split by rows: looked up wherever a row lies, and a softmax over all of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.vocabulary import logits, look_up, scattered_rows, split_softmax, stored_dims, whole_rows


@pytest.fixture(autouse=True)
def _mesh():
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))


@pytest.mark.parametrize("num_rows", [32, 27])
@pytest.mark.parametrize("axes", [MeshConfig(fsdp=2, sequence=2, tensor=2), MeshConfig(data=2, tensor=4)], ids=str)
def test_embedding_looks_up_every_token_wherever_its_row_lies(axes: MeshConfig, num_rows: int):
    jax.set_mesh(mesh.make_mesh(axes))
    rng = np.random.default_rng(0)
    values, tokens = (
        rng.standard_normal((num_rows, 4)).astype(np.float32),
        rng.integers(0, num_rows, (4, 8)).astype(np.int32),
    )
    cotangent = rng.standard_normal((4, 8, 4)).astype(np.float32)
    table = jax.device_put(values, spec(*stored_dims(num_rows)))
    tokens_on_mesh = jax.device_put(tokens, spec("batch", "seq"))

    @jax.jit
    def look_up_and_back(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, backward = jax.vjp(lambda table: look_up(table, tokens_on_mesh, "float32"), table)
        return x, backward(jax.reshard(cotangent, jax.typeof(x).sharding.spec))[0]

    x, gradient = look_up_and_back(table)
    assert jax.typeof(x).sharding.spec == spec("batch", "residual_seq", None)
    expected = np.zeros_like(values)
    np.add.at(expected, tokens, cotangent)
    np.testing.assert_array_equal(x, values[tokens])
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    assert jax.typeof(gradient) == jax.typeof(table)


def test_embedding_gradient_of_a_frequent_token_is_summed_in_fp32():
    table = jax.device_put(np.ones((32, 4), np.float32), spec("vocab", "embed"))
    tokens = jax.device_put(np.zeros((2, 2048), np.int32), spec("batch", "seq"))
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(look_up(table, tokens, "bfloat16").astype(jnp.float32))))(table)
    gradient = np.asarray(gradient)
    np.testing.assert_array_equal(gradient[0], 4096)  # a bf16 sum stops growing at 256
    np.testing.assert_array_equal(gradient[1:], 0)


@pytest.mark.parametrize("num_rows", [32, 13, 2])
def test_a_softmax_over_all_rows(num_rows):
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, tensor=4)))
    rng = np.random.default_rng(0)
    values, targets = rng.standard_normal((num_rows, 8)).astype(np.float32), np.array([0, num_rows - 1, num_rows // 2, -1])
    table = jax.device_put(values, spec(*stored_dims(num_rows)))
    whole = jax.typeof(table)

    def on_device(part: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        rows, ids = whole_rows(part, whole, "float32")
        softmax, is_target = split_softmax(100 * rows.T[:4], ids, jnp.asarray(targets))
        own_sums = jnp.sum(softmax.exps, axis=-1), jnp.sum(is_target, axis=-1)
        return jnp.log(softmax.total) + softmax.largest, softmax.target, jax.lax.psum(own_sums, "tensor")

    in_parts = jax.shard_map(on_device, in_specs=whole.sharding.spec, out_specs=spec(None), check_vma=False)
    lse, target, (total, found) = jax.jit(in_parts)(table)
    scores = 100 * values[:, :4]
    np.testing.assert_allclose(lse, jax.nn.logsumexp(scores, axis=0), rtol=1e-6)
    np.testing.assert_array_equal(target, [*(scores[targets[:3], range(3)]), 0.0])
    np.testing.assert_allclose(total, np.exp(scores - scores.max(axis=0)).sum(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(found, [1, 1, 1, 0])


@pytest.mark.parametrize("num_rows", [32, 13])
def test_rows_are_stored_by_those_that_share_them_and_come_back_there(num_rows):
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, tensor=4)))
    values = np.random.default_rng(0).standard_normal((num_rows, 8)).astype(np.float32)
    table = jax.device_put(values, spec(*stored_dims(num_rows)))
    whole = jax.typeof(table)
    assert whole.sharding.shard_shape(values.shape) == ((8, 4) if num_rows == 32 else (13, 1))

    def there_and_back(part: jax.Array) -> jax.Array:
        return scattered_rows(whole_rows(part, whole, "float32")[0], whole)

    both = jax.shard_map(there_and_back, in_specs=whole.sharding.spec, out_specs=whole.sharding.spec)
    np.testing.assert_array_equal(jax.jit(both)(table), 2 * values)  # the sum over fsdp


@pytest.mark.parametrize("num_rows", [32, 13])
def test_logits_are_of_all_rows_and_no_others(num_rows):
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, tensor=4)))
    rng = np.random.default_rng(0)
    values, x = rng.standard_normal((num_rows, 8)).astype(np.float32), rng.standard_normal((4, 8)).astype(np.float32)
    table, x_on_mesh = jax.device_put(values, spec(*stored_dims(num_rows))), jax.device_put(x, spec("batch", None))
    out, backward = jax.vjp(jax.jit(logits), x_on_mesh, table)
    np.testing.assert_allclose(out, x @ values.T, rtol=1e-5, atol=1e-5)
    cotangent = rng.standard_normal((4, num_rows)).astype(np.float32)
    d_x, d_table = backward(jax.device_put(cotangent, jax.typeof(out).sharding.spec))
    np.testing.assert_allclose(d_x, cotangent @ values, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_table, cotangent.T @ x, rtol=1e-5, atol=1e-5)
    assert jax.typeof(d_table) == jax.typeof(table)
