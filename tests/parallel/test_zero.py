"""A weight is stored and gathered as it says, and its gradient comes back as it is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.zero import gathered, weight


class Parts(nnx.Module):
    """Two weights, one of which is read as it is stored."""

    def __init__(self):
        def count(shape: tuple[int, ...], dtype: str, out_sharding: jax.P) -> jax.Array:
            return jax.reshard(jnp.arange(np.prod(shape), dtype=dtype).reshape(shape), out_sharding)

        self.matrix = weight((8, 4), "float32", stored=("mlp", "embed"), compute=("mlp", None), init=count)
        self.scale = weight((4,), "float32", stored=(None,), compute=None, init=jnp.ones)


MESHES = [MeshConfig(fsdp=4, tensor=2), MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(fsdp=2, sequence=4)]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_module_is_gathered_whole_and_its_gradient_is_scattered(sizes):
    jax.set_mesh(mesh.make_mesh(sizes))
    parts = Parts()
    assert jax.typeof(parts.matrix[...]).sharding.spec == spec("mlp", "embed")
    x = jax.device_put(np.ones((8, 8, 4), np.float32), spec("batch", "seq", None))

    def total(parts: Parts, x: jax.Array) -> tuple[jax.Array, Parts]:
        ready = gathered(parts, "bfloat16")
        out = jnp.einsum("BTD,FD->BTF", x, ready.matrix[...].astype("float32"))
        return jnp.sum(out), ready

    gradients, ready = jax.jit(jax.grad(total, has_aux=True))(parts, x)
    assert ready.matrix.dtype == jnp.bfloat16
    assert jax.typeof(ready.matrix[...]).sharding.spec == jax.P(
        "tensor", None, reduced=frozenset({"data", "fsdp", "sequence"})
    )
    assert ready.scale.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(ready.matrix[...], np.float32), np.arange(32).reshape(8, 4))
    assert jax.typeof(gradients.matrix[...]) == jax.typeof(parts.matrix[...])
    np.testing.assert_array_equal(gradients.matrix[...], np.full((8, 4), 64))
