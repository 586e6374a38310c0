"""Arrays on the whole mesh and their parts on the meshes of the stages."""

import contextlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from llamajax.config.parallel import MeshConfig
from llamajax.errors import EnvironmentMismatchError
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.stage_meshes import check_transfers, join_stages, send, split_by_stage, stage_meshes


@pytest.fixture
def mesh():
    mesh = make_mesh(MeshConfig(pipeline=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        yield mesh


def test_parts_are_the_stages_of_the_whole(mesh):
    whole = jax.device_put(np.arange(48.0).reshape(2, 4, 6), P("pipeline", "fsdp", "tensor"))
    parts = split_by_stage(whole, stage_meshes(mesh))
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert [part.sharding.device_set for part in parts] == [set(jax.devices()[:4]), set(jax.devices()[4:])]
    np.testing.assert_array_equal(join_stages(parts, whole), whole)


def test_a_sum_over_stages_stays_open(mesh):
    lies = P(None, "tensor", unreduced=frozenset({"pipeline", "fsdp"}))
    zeros = jax.jit(lambda: jax.lax.broadcast(jnp.zeros(()), (4, 6), out_sharding=lies))()
    meshes, parts = stage_meshes(mesh), split_by_stage(zeros, stage_meshes(mesh))
    ones = jax.jit(lambda x: jax.lax.broadcast(jnp.ones(()), x.shape, out_sharding=jax.typeof(x).sharding.spec))
    for stage, own in enumerate(meshes):
        with jax.set_mesh(own):
            parts[stage] = ones(parts[stage])
    whole = jax.jit(lambda x: jax.reshard(x, P(None, "tensor")))(join_stages(parts, zeros))
    np.testing.assert_array_equal(whole, np.full((4, 6), 4.0))


def test_sends_to_the_devices_of_another_stage(mesh):
    first, last = stage_meshes(mesh)
    with jax.set_mesh(first):
        x = jax.device_put(np.arange(8.0).reshape(4, 2), P("fsdp", "tensor"))
    arrived = send(x, first, last)
    assert arrived.sharding.device_set == set(jax.devices()[4:])
    np.testing.assert_array_equal(arrived, x)


@pytest.mark.parametrize(
    ("processes", "possible"),
    [([0] * 8, True), ([0] * 4 + [1] * 4, True), ([0, 0, 1, 1, 2, 2, 3, 3], True), ([0, 0, 0, 1, 1, 1, 2, 2], False),
     ([0, 1] * 4, False), ([0, 1, 0, 1, 1, 0, 1, 0], False)],
)  # fmt: skip
def test_stages_share_whole_processes_or_none(processes, possible):
    devices = [SimpleNamespace(process_index=process) for process in processes]
    meshes: Any = [SimpleNamespace(devices=np.array(devices[:4])), SimpleNamespace(devices=np.array(devices[4:]))]
    with contextlib.nullcontext() if possible else pytest.raises(EnvironmentMismatchError, match=r"^mesh\.stages: stages 0"):
        check_transfers(meshes)
