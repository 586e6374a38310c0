"""The order in which rows lie over devices, and the hop from one to the next."""

import jax
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sequence import laid_out, pass_on, zigzag_indices
from llamajax.parallel.sharding import spec

ROWS = np.stack([np.arange(16), 100 + np.arange(16)]).astype(np.int32)
ZIGZAG = [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
"""Order of sixteen tokens over four devices, in chunks of two."""


@pytest.fixture(autouse=True)
def _mesh():
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, sequence=4)))


@pytest.mark.parametrize("form", ["auto", "gather", "ulysses"])
def test_rows_lie_in_their_own_order(form):
    x = jax.jit(laid_out, static_argnums=1)(ROWS, form)
    np.testing.assert_array_equal(x, ROWS)
    assert jax.typeof(x).sharding.spec == spec("batch", "seq")


def test_a_ring_has_an_early_and_a_late_chunk_on_every_device():
    x = jax.jit(laid_out, static_argnums=1)(jax.device_put(ROWS, spec("batch", "seq")), "ring")
    np.testing.assert_array_equal(x, ROWS[:, ZIGZAG])
    assert jax.typeof(x).sharding.spec == spec("batch", "seq")
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, tensor=4)))
    np.testing.assert_array_equal(jax.jit(laid_out, static_argnums=1)(ROWS[:, :15], "ring"), ROWS[:, :15])


def test_every_device_knows_where_its_tokens_and_others_stand():
    def indices(_: jax.Array) -> jax.Array:
        return zigzag_indices(jax.lax.axis_index("sequence"), 4)

    own = jax.shard_map(indices, in_specs=spec("seq"), out_specs=spec("seq"))(jax.device_put(np.zeros(16), spec("seq")))
    np.testing.assert_array_equal(own, ZIGZAG)


def test_what_is_passed_on_comes_from_the_device_before():
    x = jax.device_put(np.arange(4), spec("seq"))
    passed = jax.shard_map(lambda x: pass_on(x, 10 * x), in_specs=spec("seq"), out_specs=(spec("seq"),) * 2)(x)
    np.testing.assert_array_equal(passed, [[3, 0, 1, 2], [30, 0, 10, 20]])
