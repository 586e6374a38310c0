"""Loads of experts in a step, and the biases that follow them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamajax.config.experts import ExpertsConfig
from llamajax.config.parallel import MeshConfig
from llamajax.model.experts import STATISTICS
from llamajax.parallel.mesh import make_mesh
from llamajax.step.balance import balanced, expert_metrics
from llamajax.step.state import abstract_state, init_state
from llamajax.step.step import loss_and_grads, train_step
from tests.tiny import random_rows, resolved, single_device_mesh, tiny_config, to_device

CONFIG = tiny_config().changed(
    {
        "model.experts.num_experts": 8, "model.experts.top_k": 2, "model.experts.mlp_dim": 16,
        "model.experts.capacity_factor": 1.0, "model.experts.bias_update_rate": 0.01, "optimizer.warmup_steps": 0,
    }
)  # fmt: skip


def results_on(mesh: jax.sharding.Mesh, changes: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Statistics and the router's gradients of a batch, and of the same tokens where the loss counts none of them."""
    jax.set_mesh(single_device_mesh())
    first = jax.tree.map(np.asarray, init_state(CONFIG).model)
    jax.set_mesh(mesh)
    config = CONFIG.changed(changes)
    model = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), first, abstract_state(config).model)
    run, rows = resolved(config), random_rows(config, 0)
    batches = [to_device(config, own) for own in (rows, rows | {"targets": np.full_like(rows["targets"], -1)})]
    compiled = jax.jit(lambda model, batch: loss_and_grads(run, model, batch))
    results = [compiled(model, batch) for batch in batches]
    return [
        (np.asarray(metrics["expert_statistics"]), np.asarray(grads.layers.mlp.router[...])) for metrics, grads in results
    ]


@functools.cache
def expected_results() -> list[tuple[np.ndarray, np.ndarray]]:
    return results_on(single_device_mesh(), {"parallel.expert_slots": 0.0})


def test_loads_and_drops_count_every_token_once_on_every_mesh():
    (expected, _), (of_none, _) = expected_results()
    assert expected.shape == (2, len(STATISTICS), 8)
    np.testing.assert_array_equal(of_none, expected)
    load, dropped, late, score = np.moveaxis(expected, 1, 0)
    tokens = CONFIG.train.global_batch_size * CONFIG.data.seq_len
    np.testing.assert_array_equal(load.sum(axis=-1), 2 * tokens)
    np.testing.assert_allclose(score.sum(axis=-1), tokens, rtol=1e-5)
    assert 0 < dropped.sum() < load.sum()
    np.testing.assert_array_equal(late, 0)
    changes = {"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2, "parallel.expert_slots": 0.5}
    (found, _), _ = results_on(make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2)), changes)
    np.testing.assert_allclose(found[:, [0, 1, 3]], expected[:, [0, 1, 3]], rtol=1e-5)
    assert (found[:, 2].sum(axis=-1) > 0).all()


def test_stages_without_a_micro_batch_add_nothing():
    changes = {
        "mesh.pipeline": 2,
        "mesh.fsdp": 1,
        "mesh.num_cpu_devices": 2,
        "train.grad_accum_steps": 2,
        "parallel.zero": 1,
        "model.remat": "none",
    }
    found = results_on(make_mesh(MeshConfig(pipeline=2, fsdp=1), jax.devices()[:2]), changes)
    for (statistics, gradients), (like, own) in zip(found, expected_results(), strict=True):
        np.testing.assert_allclose(statistics[:, [0, 1, 3]], like[:, [0, 1, 3]], rtol=1e-5)
        np.testing.assert_allclose(gradients, own, rtol=0, atol=1e-6)


def test_biases_move_against_the_load_and_the_optimizer_has_no_state_for_them():
    jax.set_mesh(single_device_mesh())
    state = init_state(CONFIG)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)]
    assert any("router" in path for path in paths)
    assert not any("bias" in path for path in paths)
    run, batch = resolved(CONFIG), to_device(CONFIG, random_rows(CONFIG, 0))
    load = np.asarray(loss_and_grads(run, state.model, batch)[0]["expert_statistics"])[:, 0]
    state, metrics = jax.jit(train_step, static_argnums=0)(run, state, batch)
    expected = 0.01 * np.sign(load.mean(axis=-1, keepdims=True) - load)
    np.testing.assert_allclose(state.model.layers.mlp.bias[...], expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["expert_max_load_by_layer"], 8 * load.max(-1) / load.sum(-1), rtol=1e-5)
    # Gradients that are not applied move no bias.
    unmoved = balanced(state.model, jnp.asarray(np.random.default_rng(0).random((2, 4, 8), np.float32)), jnp.array(False))
    np.testing.assert_array_equal(unmoved.layers.mlp.bias[...], state.model.layers.mlp.bias[...])


def test_metrics_of_known_loads():
    load = np.array([[4, 4, 4, 4], [16, 0, 0, 0]], np.float32)
    statistics = jnp.stack([load, load / 4, load / 2, load], axis=1)
    found = expert_metrics(statistics, ExpertsConfig(num_experts=4))
    for name, by_layer in {
        "expert_max_load": [1, 4], "expert_min_load": [1, 0], "expert_entropy": [1, 0], "expert_dropped": [0.25, 0.25],
        "expert_late": [0.5, 0.5],
    }.items():  # fmt: skip
        np.testing.assert_allclose(found[f"{name}_by_layer"], by_layer, atol=1e-6)
        np.testing.assert_allclose(found[name], np.mean(by_layer), atol=1e-6)
