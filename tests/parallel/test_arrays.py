"""Tests of llamajax.parallel.arrays."""

import jax
import jax.numpy as jnp

from llamajax.config.parallel import MeshConfig
from llamajax.parallel.arrays import concretise, named_arrays
from llamajax.parallel.mesh import make_mesh
from llamajax.step.state import init_state
from tests.tiny import tiny_config


def test_concretise_names_devices_for_every_leaf():
    jax.set_mesh(make_mesh(MeshConfig(fsdp=4, tensor=2)))
    abstract = jax.eval_shape(lambda: init_state(tiny_config()))
    assert abstract.step.sharding is None
    leaves = jax.tree.leaves(concretise(abstract))
    assert all(isinstance(leaf.sharding.mesh, jax.sharding.Mesh) for leaf in leaves)
    elsewhere = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[3]))
    assert concretise(elsewhere).sharding == elsewhere.sharding


def test_names_are_paths_in_the_order_of_the_leaves():
    state = init_state(tiny_config())
    named = named_arrays({"model": state.model})
    assert {"model.embedding", "model.layers.attention.wqkv"} <= named.keys()
    assert all(one is other for one, other in zip(named.values(), jax.tree.leaves(state.model), strict=True))
