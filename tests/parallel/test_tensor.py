"""The residual stream is split over the devices that share a matmul, where it can be, and comes back whole before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.tensor import gather_tokens, is_shared, partial_spec, residual_spec, scatter_tokens

B, T, D, F = 2, 8, 4, 16


@pytest.mark.parametrize(
    ("sizes", "length", "tokens", "residual", "shared"),
    [
        (MeshConfig(sequence=2, tensor=4), 16, "seq", "residual_seq", True),
        (MeshConfig(sequence=2, tensor=4), 12, "seq", "seq", False),
        (MeshConfig(sequence=2, tensor=4), 16, None, None, False),
        (MeshConfig(fsdp=8), 3, "seq", "residual_seq", False),
    ],
    ids=["divides", "does not divide", "whole rows", "nobody shares"],
)
def test_where_tokens_lie_between_matmuls(sizes, length, tokens, residual, shared):
    jax.set_mesh(mesh.make_mesh(sizes))
    assert residual_spec((8, length), spec("batch", tokens)) == spec("batch", residual, None)
    assert is_shared(jax.device_put(np.zeros((8, length, D)), spec("batch", residual, None))) == shared


@pytest.mark.parametrize("residual", ["residual_seq", "seq"])
def test_a_pair_of_shared_matmuls_and_its_gradients(residual):
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=1, sequence=2, tensor=4)))
    rng = np.random.default_rng(0)
    x, up, down, cotangent = (rng.standard_normal(s).astype(np.float32) for s in ((B, T, D), (D, F), (F, D), (B, T, D)))

    def shared(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        lies = jax.typeof(x).sharding.spec
        tokens = frozenset({"pipeline", "data", "fsdp", "expert", "sequence"})
        up, down = (jax.reshard(w, jax.P(*jax.typeof(w).sharding.spec, reduced=tokens)) for w in (up, down))
        wide = jnp.einsum("BTD,DF->BTF", gather_tokens(x), up)
        return scatter_tokens(jnp.einsum("BTF,FD->BTD", wide, down, out_sharding=partial_spec(lies)), lies)

    placed = [
        jax.device_put(a, spec(*dims))
        for a, dims in ((x, ("batch", residual, None)), (up, (None, "mlp")), (down, ("mlp", None)))
    ]
    out, backward = jax.vjp(jax.jit(shared), *placed)
    gradients = backward(jax.device_put(cotangent, spec("batch", residual, None)))
    expected, dense = jax.vjp(lambda x, up, down: x @ up @ down, x, up, down)
    np.testing.assert_allclose(out, expected, atol=1e-4)
    for ours, theirs, like in zip(gradients, dense(cotangent), placed, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        assert jax.typeof(ours) == jax.typeof(like)
