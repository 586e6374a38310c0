"""Weights and moments in host memory: made, updated and completed as on the card, wherever each of them waits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.offload import OffloadConfig
from llamajax.config.parallel import MeshConfig, ParallelConfig
from llamajax.config.run import Config
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.estimates.device_memory import host_bytes
from llamajax.estimates.formulas import state_host_bytes, state_shares
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.host_memory import KIND
from llamajax.parallel.mesh import make_mesh
from llamajax.step.state import TrainState, abstract_state, init_state, with_copies
from llamajax.step.step import train_step
from tests.tiny import random_rows, resolved, tiny_config, to_device

MESHES = {
    "fsdp": MeshConfig(fsdp=8, num_cpu_devices=8),
    "hybrid": MeshConfig(data=2, fsdp=4, num_cpu_devices=8),
    "tensor": MeshConfig(data=2, fsdp=2, tensor=2, num_cpu_devices=8),
    "one": MeshConfig(num_cpu_devices=8, data=8, fsdp=1),
}
PLACES = {
    "moments": OffloadConfig(optimizer=0.5),
    "all": OffloadConfig(optimizer=1.0),
    "parameters": OffloadConfig(optimizer=1.0, parameters="all"),
}
CARD = OffloadConfig()


def host(tree):
    """The numbers of a tree, wherever they wait."""
    keys = jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
    return jax.tree.map(np.asarray, keys)


def run_config(mesh: str = "fsdp", *, steps: int = 1, offload: OffloadConfig = CARD, **changes) -> Config:
    train = TrainConfig(num_steps=10, global_batch_size=8 * steps, grad_accum_steps=steps)
    # eps: the direction of a gradient that is nearly zero would be that of its rounding.
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, grad_clip_norm=0.5, weight_decay=0.1, eps=1e-4)
    config = tiny_config(train=train, optimizer=optimizer, mesh=MESHES[mesh], parallel=ParallelConfig(stack="prefetch"))
    return config.changed({"model.num_layers": 3, "offload": offload, **changes})


def trained(config: Config, num_steps: int = 3) -> tuple[TrainState, list[dict[str, float]]]:
    """The state after some steps, of which the second has no targets and changes nothing."""
    jax.set_mesh(make_mesh(config.mesh))
    state, metrics = init_state(config), []
    for step in range(num_steps):
        rows = random_rows(config, step)
        if step == 1:
            rows["targets"][:] = -1
        state, found = train_step(resolved(config), state, to_device(config, rows))
        metrics.append({name: float(value) for name, value in found.items()})
    return state, metrics


def assert_alike(found: TrainState, expected: TrainState, *, atol: float) -> None:
    for (name, own), like in zip(named_arrays(found).items(), named_arrays(expected).values(), strict=True):
        if name != "rng":
            np.testing.assert_allclose(own, like, rtol=1e-5, atol=atol * max(1.0, float(np.abs(like).max())), err_msg=name)


def combinations():
    """Two in slow runs, all in `long`."""
    for number, (mesh, place, steps) in enumerate((m, p, s) for m in MESHES for p in PLACES for s in (1, 2)):
        marks = pytest.mark.slow if number in (2, 16) else pytest.mark.long
        yield pytest.param(mesh, place, steps, marks=marks, id=f"{mesh}-{place}-{steps}")


@pytest.mark.parametrize(("mesh", "place", "steps"), list(combinations()))
def test_steps_are_those_of_a_state_on_the_card(mesh, place, steps):
    config = run_config(mesh, steps=steps)
    expected, metrics = trained(config)
    state, found = trained(config.changed({"offload": PLACES[place]}))
    for own, like in zip(found, metrics, strict=True):
        assert own == pytest.approx(like, rel=1e-5, nan_ok=True)
    assert found[-1]["skipped_steps"] == 1
    assert found[-1]["grad_norm"] > 0.5  # so that clipping has an effect
    assert_alike(state.as_saved(), expected, atol=1e-6)
    copies = named_arrays(state.copies) if place != "moments" else {}
    masters = named_arrays(state.model)
    for name, copy in copies.items():
        np.testing.assert_array_equal(copy, masters[name].astype(copy.dtype))
    assert len(copies) == (6 if copies else 0)


@pytest.mark.parametrize("place", ["all", *(pytest.param(one, marks=pytest.mark.slow) for one in PLACES if one != "all")])
def test_it_starts_from_the_same_bits(place):
    config = run_config("tensor")
    jax.set_mesh(make_mesh(config.mesh))
    expected = host(init_state(config))
    changed = config.changed({"offload": PLACES[place]})
    state = init_state(changed)
    jax.tree.map(np.testing.assert_array_equal, host(state.as_saved()), expected)
    given = init_state(changed, dataclasses.replace(state).model)
    jax.tree.map(np.testing.assert_array_equal, host(given.as_saved()), expected)


@pytest.mark.parametrize("place", PLACES)
def test_each_array_waits_where_the_formula_says(place):
    config = run_config("fsdp", offload=PLACES[place])
    jax.set_mesh(mesh := make_mesh(config.mesh))
    state, abstract = init_state(config), abstract_state(config)
    arrays = named_arrays(state)
    for (name, array), like in zip(arrays.items(), named_arrays(abstract).values(), strict=True):
        assert (array.sharding.memory_kind == KIND) == (like.sharding.memory_kind == KIND), name
        assert array.sharding.spec == like.sharding.spec, name

    def on_host(prefixes: tuple[str, ...]) -> int:
        return sum(
            array.nbytes // 8
            for name, array in arrays.items()
            if array.sharding.memory_kind == KIND and name.startswith(prefixes)
        )

    assert on_host(("model.", "opt_state.")) == state_host_bytes(config, mesh.shape) > 0
    if place == "parameters":  # and as much for their gradients
        assert on_host(("model.", "opt_state.")) + 2 * on_host(("copies.",)) == host_bytes(config, mesh.shape)
        assert {name for name in arrays if name.startswith("copies.")} >= {"copies.layers.mlp.w_down", "copies.embedding"}
    assert not any("norm" in name for name, array in arrays.items() if array.sharding.memory_kind == KIND)


def test_copies_are_made_again_from_what_a_checkpoint_holds():
    config = run_config("fsdp", offload=PLACES["parameters"]).changed({"model.compute_dtype": "bfloat16"})
    jax.set_mesh(make_mesh(config.mesh))
    state = init_state(config)
    expected = host(state.copies)
    again = with_copies(config, state.as_saved())
    jax.tree.map(np.testing.assert_array_equal, host(again.copies), expected)
    assert {x.dtype for x in jax.tree.leaves(again.copies)} == {jnp.dtype("bfloat16")}
    places = [{x.sharding.memory_kind for x in jax.tree.leaves(part)} for part in (again.copies.layers, again.copies.head)]
    assert places == [{KIND}, {"device"}]


@pytest.mark.slow
def test_gradients_in_bfloat16_are_rounded_once():
    offload = dataclasses.replace(PLACES["all"], gradient_dtype="bfloat16")
    config = run_config("fsdp", **{"model.compute_dtype": "bfloat16", "optimizer.grad_clip_norm": None})
    _, expected = trained(config)
    _, found = trained(config.changed({"offload": offload}))
    for own, like in zip(found, expected, strict=True):
        assert own["loss"] == pytest.approx(like["loss"], rel=2e-3, nan_ok=True)
        assert own["grad_norm"] == pytest.approx(like["grad_norm"], rel=2**-8)


def test_shares_grow_array_by_array():
    config = run_config("fsdp")
    shares = state_shares(config)
    assert shares[0] == 0
    assert shares[-1] == 1
    assert len(shares) == 1 + 3 * 6  # weight and two moments of four matrices and two tables
    sizes = [
        state_host_bytes(config.changed({"offload.optimizer": share}), dict.fromkeys(make_mesh(config.mesh).shape, 1))
        for share in shares[1:]
    ]
    assert sizes == sorted(set(sizes))
    assert [size / sizes[-1] for size in sizes] == pytest.approx(shares[1:])
