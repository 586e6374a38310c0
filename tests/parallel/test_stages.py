"""Rows and weights of a pipeline's stages: reshapes that send nothing, and exchanges that reach the right stage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from llamajax.config.parallel import MeshConfig
from llamajax.config.stages import EMPTY, layers_of_stages
from llamajax.parallel.mesh import make_mesh, without_stages
from llamajax.parallel.sharding import spec
from llamajax.parallel.stages import by_stage, exchange, merge, share_tokens, shared_ids, shift, split

MESH = MeshConfig(pipeline=4, fsdp=2)


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(make_mesh(MESH)):
        yield


def rows(shape: tuple[int, ...], *dims: str | None) -> jax.Array:
    return jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), spec(*dims))


def collectives(function, *arguments) -> str:
    return str(jax.jit(function).lower(*arguments).compile().as_text())


def test_rows_of_all_stages_split_and_merge_without_communication():
    x = rows((8, 4, 3), "batch", "seq", None)
    by_stages = jax.jit(split)(x)
    assert jax.typeof(by_stages).sharding.spec == P("pipeline", ("data", "fsdp", "expert"), "sequence", None)
    np.testing.assert_array_equal(by_stages, np.asarray(x).reshape(4, 2, 4, 3))
    assert jax.typeof(jax.jit(merge)(by_stages)) == jax.typeof(x)
    hlo = collectives(lambda x: merge(split(x) * 2), x)
    assert not any(name in hlo for name in ("all-", "permute", "reduce-scatter"))


@pytest.mark.parametrize("by", [1, -1])
def test_rows_are_sent_to_the_next_stage_or_the_previous_one(by):
    x = rows((8, 4), "batch", "seq")
    sent = jax.jit(shift, static_argnums=1)([x], by)[0]
    np.testing.assert_array_equal(sent, np.roll(np.asarray(x).reshape(4, 2, 4), by, axis=0).reshape(8, 4))


def test_a_stage_sees_its_own_part_and_number():
    x = rows((8, 4), "batch", "seq")
    found = jax.jit(lambda x: by_stage(lambda stage, x: x + 100 * stage, x, out_specs=spec("batch", "seq")))(x)
    np.testing.assert_array_equal(found, np.asarray(x) + 100 * np.arange(4).repeat(2)[:, None])


@pytest.mark.parametrize(("length", "padded"), [(8, 8), (6, 8)])
def test_the_tokens_of_one_stage_are_shared_and_their_gradients_return(length, padded):
    x = rows((8, length, 3), "batch", "seq", None)
    shared = jax.jit(share_tokens, static_argnums=1)(x, 3)
    assert jax.typeof(shared).sharding.spec == P(("data", "fsdp", "expert"), ("sequence", "pipeline"), None)
    last = np.asarray(x)[6:]
    np.testing.assert_array_equal(shared, np.pad(last, ((0, 0), (0, padded - length), (0, 0))))
    ids = jax.device_put(np.arange(2 * length, dtype=np.int32).reshape(2, length), spec("micro_batch", "seq"))
    parts = jax.jit(shared_ids, static_argnums=(1, 2))(ids, 1, -1)
    np.testing.assert_array_equal(parts, np.pad(np.asarray(ids), ((0, 0), (0, padded - length)), constant_values=-1))

    weights = np.arange(shared.size, dtype=np.float32).reshape(shared.shape)
    gradient = jax.jit(
        jax.grad(lambda x: jnp.sum(share_tokens(x, 3) * jax.reshard(weights, jax.typeof(shared).sharding.spec)))
    )(x)
    np.testing.assert_array_equal(np.asarray(gradient)[6:], weights[:, :length])
    assert not np.asarray(gradient)[:6].any()


@pytest.mark.parametrize(
    ("num_layers", "stages", "chunks", "layers"),
    [
        (8, 4, 1, [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]),
        (8, 2, 2, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (6, 4, 1, [[[0, EMPTY]], [[1, 2]], [[3, 4]], [[5, EMPTY]]]),
        (7, 4, 1, [[[0, EMPTY]], [[1, 2]], [[3, 4]], [[5, 6]]]),
        (7, 2, 2, [[[0, EMPTY], [3, 4]], [[1, 2], [5, 6]]]),
    ],
)
def test_layers_fill_the_slots_in_order(num_layers, stages, chunks, layers):
    assert layers_of_stages(num_layers, stages, chunks) == layers


@pytest.mark.parametrize(
    ("num_layers", "stages", "chunks", "dense", "layers"),
    [
        (5, 2, 1, [0], [[[0, 1, 2]], [[EMPTY, 3, 4]]]),
        (4, 2, 1, [0], [[[0, 1, EMPTY]], [[EMPTY, 2, 3]]]),
        (6, 2, 1, [0, 1], [[[0, 1, 2, 3]], [[EMPTY, EMPTY, 4, 5]]]),
        (5, 2, 2, [0], [[[0, 1], [EMPTY, 3]], [[EMPTY, 2], [EMPTY, 4]]]),
        (8, 2, 1, [0, 2, 4, 6], [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
        (6, 2, 1, [0, 2, 4], [[[0, 1, 2, EMPTY]], [[EMPTY, 3, 4, 5]]]),
        (6, 2, 1, [0, 1, 3, 4], [[[0, 1, 2]], [[3, 4, 5]]]),
        (7, 2, 1, [0, 1, 2, 4, 5], [[[0, 1, 2, 3]], [[4, 5, EMPTY, 6]]]),
    ],
)
def test_dense_layers_have_slots_of_their_own(num_layers, stages, chunks, dense, layers):
    assert layers_of_stages(num_layers, stages, chunks, dense=dense) == layers


def test_the_ends_of_405b_have_the_empty_slots():
    by_stage = layers_of_stages(126, 16, 1)
    assert [sum(layer != EMPTY for layer in stage[0]) for stage in by_stage] == [7, *[8] * 14, 7]
    assert [layer for stage in by_stage for layer in stage[0] if layer != EMPTY] == list(range(126))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(
    ("lies", "shape"),
    [
        (P("pipeline", ("fsdp", "sequence"), None), (8, 16, 3)),
        (P(None, ("fsdp", "sequence", "pipeline"), None), (8, 16, 3)),
        (P(None, ("fsdp", "sequence", "pipeline"), None), (7, 16, 3)),
        (P("pipeline", None, None), (8, 16, 3)),
        (P(None, None, None), (7, 16, 3)),
        (P("pipeline", "fsdp", ("sequence", "expert")), (8, 2, 12)),
        (P("pipeline", "fsdp", ("sequence", "expert")), (8, 2, 3)),
    ],
    ids=str,
)
def test_every_stage_gets_its_layers_and_returns_their_gradients(lies, shape, chunks):
    num_layers, *_ = shape
    stacked = jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), lies)
    table = np.array(layers_of_stages(num_layers, 4, chunks))
    slots = jax.jit(lambda x: exchange(x, table))(stacked)
    kept = [np.where(layers == EMPTY, 0, 1)[..., None, None] for layers in np.moveaxis(table, 2, 0)]
    for own, layers, keep in zip(slots, np.moveaxis(table, 2, 0), kept, strict=True):
        assert jax.typeof(own).sharding.spec.partitions[0] == "pipeline"
        expected = np.asarray(stacked)[np.maximum(layers, 0)] * keep
        np.testing.assert_array_equal(np.asarray(own).reshape(expected.shape) * keep, expected)

    def total(x: jax.Array) -> jax.Array:
        """Adds up every layer, times its index."""
        factors = [
            np.where(layers == EMPTY, 0, layers + 1).reshape(4, *[chunks] * (chunks > 1))
            for layers in np.moveaxis(table, 2, 0)
        ]
        totals = [
            jnp.sum(own * jnp.asarray(factor, jnp.float32)[..., None, None])
            for own, factor in zip(exchange(x, table), factors, strict=True)
        ]
        return jnp.sum(jnp.stack(totals))

    gradient = jax.jit(jax.grad(total))(stacked)
    assert jax.typeof(gradient) == jax.typeof(stacked)
    np.testing.assert_array_equal(gradient, np.broadcast_to(np.arange(1, num_layers + 1)[:, None, None], stacked.shape))


def test_a_mesh_without_stages_has_the_same_devices():
    mesh = make_mesh(MeshConfig(pipeline=2, data=2, fsdp=1, tensor=2))
    for axis in ("data", "fsdp"):
        other = without_stages(mesh, axis)
        assert other.shape["pipeline"] == 1
        assert other.shape[axis] == 2 * mesh.shape[axis]
        assert set(other.devices.flat) == set(mesh.devices.flat)
        assert other.devices.reshape(-1, 2).tolist() == [list(pair) for pair in other.devices.reshape(-1, 2)]
        pairs = {tuple(pair) for pair in mesh.devices.reshape(-1, 2)}
        assert {tuple(pair) for pair in other.devices.reshape(-1, 2)} == pairs, "the inner axis is as it was"
