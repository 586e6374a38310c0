"""A table that is split by rows: looked up wherever a row lies, and a softmax over all of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.vocabulary import look_up, split_softmax, whole_rows


@pytest.fixture(autouse=True)
def _mesh():
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))


@pytest.mark.parametrize("axes", [MeshConfig(fsdp=2, sequence=2, tensor=2), MeshConfig(data=2, tensor=4)], ids=str)
def test_embedding_looks_up_every_token_wherever_its_row_lies(axes: MeshConfig):
    jax.set_mesh(mesh.make_mesh(axes))
    rng = np.random.default_rng(0)
    values, tokens = rng.standard_normal((32, 4)).astype(np.float32), rng.integers(0, 32, (4, 8)).astype(np.int32)
    cotangent = rng.standard_normal((4, 8, 4)).astype(np.float32)
    table, tokens_on_mesh = jax.device_put(values, spec("vocab", "embed")), jax.device_put(tokens, spec("batch", "seq"))

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


def test_a_softmax_over_all_rows():
    rng = np.random.default_rng(0)
    values, targets = rng.standard_normal((32, 4)).astype(np.float32), np.array([0, 31, 17, -1])

    def on_device(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, ids = whole_rows(part, "float32")
        softmax = split_softmax(100 * rows.T, ids[None] == targets[:, None])
        return jnp.log(softmax.total) + softmax.largest, softmax.target

    in_parts = jax.shard_map(on_device, in_specs=spec("vocab", "embed"), out_specs=spec(None), check_vma=False)
    lse, target = jax.jit(in_parts)(jax.device_put(values, spec("vocab", "embed")))
    np.testing.assert_allclose(lse, jax.nn.logsumexp(100 * values, axis=0), rtol=1e-6)
    np.testing.assert_array_equal(target, [*(100 * values[targets[:3], range(3)]), 0.0])
