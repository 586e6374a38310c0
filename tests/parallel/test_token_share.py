"""A share of each device's tokens, and the rest, run apart: joined in their order, with nothing sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.offload import saved_tokens
from llamajax.config.parallel import MeshConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.token_share import by_share

B, T, D = 8, 32, 4
MESHES = [MeshConfig(fsdp=8), MeshConfig(fsdp=2, sequence=4), MeshConfig(fsdp=2, sequence=2, tensor=2)]


def rows(mesh: MeshConfig, dim: str) -> jax.Array:
    jax.set_mesh(make_mesh(mesh))
    return jax.device_put(np.arange(B * T * D, dtype=np.float32).reshape(B, T, D), spec("batch", dim, None))


@pytest.mark.parametrize("dim", ["seq", "residual_seq"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("share", [0.0, 0.4, 0.5, 1.0])
def test_the_first_tokens_of_every_device_are_the_saved_ones(mesh, dim, share):
    x = rows(mesh, dim)
    parts = mesh.sequence * (mesh.tensor if dim == "residual_seq" else 1)
    length, calls = T // parts, []

    def run(x, is_saved):
        calls.append((x.shape[1], is_saved))
        return x, jnp.full_like(x[:, :, 0], is_saved)

    out, is_saved = jax.jit(lambda x: by_share(run, x, share))(x)
    np.testing.assert_array_equal(out, x)
    assert jax.typeof(out).sharding.spec == jax.typeof(x).sharding.spec
    first = int(share * length)
    np.testing.assert_array_equal(np.asarray(is_saved)[0], np.tile(np.arange(length) < first, parts))
    expected = [(first * parts, True), ((length - first) * parts, False)]
    assert calls == [(count, kind) for count, kind in expected if count]


@pytest.mark.parametrize("mesh", MESHES)
def test_nothing_is_sent(mesh):
    x = rows(mesh, "seq")
    program = jax.jit(lambda x: by_share(lambda x, is_saved: x + is_saved, x, 0.5)).lower(x).compile().as_text()
    assert program is not None
    assert "concatenate" in program
    assert not [name for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce") if name in program]


def test_a_share_is_in_whole_tiles_where_there_are_enough_tokens():
    assert saved_tokens(0.5, 16) == 8
    assert saved_tokens(0.3, 16) == 4
    assert saved_tokens(0.999, 1023) == 1021
    assert saved_tokens(0.5, 4096) == 2048
    assert saved_tokens(0.3, 4096) == 1152  # of 1228
    assert saved_tokens(1.0, 4095) == 4095
    assert saved_tokens(0.01, 4096) == 0
