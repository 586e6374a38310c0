"""Frozen weights: told by name, without gradients and moments, and the same to the bit from the first step to the last."""

import jax
import numpy as np
import pytest

from llamajax.checkpoint.read import restore
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import CheckpointConfig
from llamajax.errors import CheckpointError, ConfigError
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.mesh import make_mesh
from llamajax.planning import memory
from llamajax.planning.xla.parse import parse
from llamajax.step.frozen import combine, partition
from llamajax.step.optim import moments
from llamajax.step.resolve import resolve_planned
from llamajax.step.state import TrainState, abstract_state, init_state
from llamajax.step.step import loss_and_grads, train_step
from llamajax.verification.differences import differences, first_difference
from llamajax.verification.reference_run import run_side
from llamajax.verification.scaling import on_one_device
from tests.planning import compiled
from tests.tiny import random_rows, resolved, tiny_config, to_device

CONFIG = tiny_config().changed({"train.frozen": ("embedding", "layers.mlp."), "train.grad_accum_steps": 2})
FROZEN = {"embedding", "layers.mlp.w_gate_up", "layers.mlp.w_down"}


@pytest.fixture(autouse=True)
def _mesh():
    jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))


def batch(step: int) -> dict[str, jax.Array]:
    return to_device(CONFIG, random_rows(CONFIG, step))


def trained(state: TrainState, *steps: int) -> TrainState:
    for step in steps:
        state, _ = train_step(resolved(CONFIG), state, batch(step))
    return state


def host(state: TrainState) -> dict[str, np.ndarray]:
    arrays = named_arrays(state)
    return {name: np.asarray(jax.random.key_data(x) if name == "rng" else x) for name, x in arrays.items()}


def test_frozen_weights_stay_to_the_bit_and_have_neither_moments_nor_gradients():
    state = init_state(CONFIG)
    names = named_arrays(state.model).keys()
    assert [kept.keys() for kept in moments(state.opt_state, state.model)] == 2 * [names - FROZEN]
    assert not [name for name in named_arrays(state.opt_state) if any(frozen in name for frozen in FROZEN)]
    _, grads = loss_and_grads(resolved(CONFIG), state.model, batch(0))
    assert named_arrays(grads).keys() == names - FROZEN
    before = host(state)
    after = host(trained(state, 0, 1, 2))
    assert before.keys() == after.keys()
    same = {name for name in names if np.array_equal(before[f"model.{name}"], after[f"model.{name}"])}
    assert same == FROZEN


@pytest.mark.slow
def test_the_norm_of_gradients_is_that_of_trained_weights():
    _, metrics = train_step(resolved(CONFIG), init_state(CONFIG), batch(0))
    _, grads = loss_and_grads(resolved(CONFIG), init_state(CONFIG).model, batch(0))
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(grads)))
    np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-5)


def test_a_saved_state_goes_on_to_the_bit_and_only_with_the_same_frozen_weights(tmp_path):
    state = trained(init_state(CONFIG), 0, 1)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(2, state, {})
        checkpointer.wait()
    restored = restore(tmp_path, abstract_state(CONFIG)).state
    unbroken, resumed = (host(trained(some, 2, 3)) for some in (state, restored))
    for name, array in unbroken.items():
        np.testing.assert_array_equal(resumed[name], array, err_msg=name)
    with pytest.raises(CheckpointError, match=r"opt_state\.0\.mu\.embedding is missing from it"):
        restore(tmp_path, abstract_state(CONFIG.changed({"train.frozen": ("layers.mlp.",)})))


@pytest.mark.slow
def test_plans_know_that_frozen_weights_have_neither_moments_nor_gradients():
    config = compiled.CONFIG.changed({"train.frozen": ("embedding", "w_gate_up")})
    plans = []
    for some in (compiled.CONFIG, config):
        step = compiled.compiled_step(some)
        plans.append(memory.memory_plan(step, parse(step.hlo)))
    whole, frozen = plans
    saved = (64 * 32 + 2 * 32 * 2 * 64) // 8  # weights on a device
    assert whole.by_kind["optimizer"] - frozen.by_kind["optimizer"] == 2 * 4 * saved
    assert whole.by_kind["parameters"] == frozen.by_kind["parameters"]
    assert frozen.peak_bytes < whole.peak_bytes
    assert "gradient of layers/mlp/w_gate_up" in {tensor.name for tensor in whole.tensors}
    assert "gradient of layers/mlp/w_gate_up" not in {tensor.name for tensor in frozen.tensors}
    by_formulas, without = (
        memory.estimate(resolve_planned(config)).by_kind,
        memory.estimate(resolve_planned(compiled.CONFIG)).by_kind,
    )
    assert by_formulas["optimizer"] == frozen.by_kind["optimizer"]
    assert by_formulas["parameters"] == frozen.by_kind["parameters"]
    assert by_formulas["gradients"] < without["gradients"]


@pytest.mark.slow
def test_a_verification_compares_what_there_is():
    config = CONFIG.changed({"mesh": MeshConfig(fsdp=4, tensor=2, num_cpu_devices=8), "optimizer.eps": 0.03})
    ours, truth = (run_side(some, 2, lambda _: None) for some in (config, on_one_device(config)))
    assert first_difference(ours, truth) is None
    found = {(difference.kind, difference.name) for difference in differences(ours, truth)}
    assert {kind for kind, name in found if name == "embedding"} == {"weight"}
    assert {kind for kind, name in found if name == "head"} == {"gradient", "first moment", "second moment", "weight"}


def test_partition_gives_each_weight_to_one_side_and_combine_puts_them_together():
    model = init_state(CONFIG).model
    kept, frozen = partition(CONFIG, model)
    assert named_arrays(frozen).keys() == FROZEN
    assert kept.embedding is None
    assert kept.head is model.head
    again = combine(kept, frozen)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert jax.tree.leaves(again) == jax.tree.leaves(model)


def test_names_that_freeze_nothing_or_all_are_refused():
    model = init_state(CONFIG).model

    def refused(*frozen: str) -> str:
        with pytest.raises(ConfigError) as error:
            partition(CONFIG.changed({"train.frozen": frozen}), model)
        return str(error.value)

    assert refused("head", "embeding").startswith("train.frozen: embeding matches no parameter name; correct or remove it")
    assert refused("e") == "train.frozen: e leaves no parameter to train; remove some of it"
