"""One step: counts tokens once, clips, skips what is not finite, donates its state."""

import dataclasses
import hashlib
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.model import RopeScalingConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.step.batch import FIELDS
from llamajax.step.state import init_state
from llamajax.step.step import eval_step, loss_and_grads, one_behind, train_step
from tests.tiny import random_rows, resolved, tiny_config, to_device


@pytest.fixture(autouse=True)
def _mesh():
    jax.set_mesh(make_mesh(dataclasses.replace(tiny_config().mesh, fsdp=2, sequence=2, tensor=2)))


def host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_equal(left, right):
    chex.assert_trees_all_equal(left, right)


def test_state_is_sharded_and_moments_follow_the_parameters():
    state = init_state(tiny_config())
    moments = state.opt_state[0].mu
    for parameter, moment in zip(jax.tree.leaves(state.model), jax.tree.leaves(moments), strict=True):
        assert parameter.sharding == moment.sharding
    specs = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(moments)}
    assert any("fsdp" in text and "tensor" in text for text in specs)


def test_non_finite_gradients_leave_weights_and_moments_untouched():
    config = tiny_config()
    state, _ = train_step(resolved(config), init_state(config), to_device(config, random_rows(config, 0)))

    def poison(path, leaf):
        return leaf * jnp.nan if "final_norm" in jax.tree_util.keystr(path) else leaf

    poisoned = dataclasses.replace(state, model=jax.tree_util.tree_map_with_path(poison, state.model))
    before = host((poisoned.model, poisoned.opt_state))
    after, metrics = train_step(resolved(config), poisoned, to_device(config, random_rows(config, 1)))
    assert_equal(before, host((after.model, after.opt_state)))
    assert not np.isfinite(metrics["grad_norm"])
    assert (int(after.step), int(metrics["skipped_steps"]), int(metrics["skipped_in_a_row"])) == (2, 1, 1)


def test_the_skip_counter_starts_again_after_a_finite_step():
    config = tiny_config()
    state = dataclasses.replace(init_state(config), skipped_steps=jnp.int32(3), skipped_in_a_row=jnp.int32(3))
    state, metrics = train_step(resolved(config), state, to_device(config, random_rows(config, 0)))
    assert (int(metrics["skipped_steps"]), int(metrics["skipped_in_a_row"])) == (3, 0)


def test_a_batch_without_targets_changes_nothing():
    config = tiny_config()
    assert config.optimizer.weight_decay > 0
    # Moments move weights, too.
    state, _ = train_step(resolved(config), init_state(config), to_device(config, random_rows(config, 0)))
    before = host((state.model, state.opt_state))
    rows = random_rows(config, 1)
    rows["targets"][:] = -1
    state, metrics = train_step(resolved(config), state, to_device(config, rows))
    assert (int(metrics["tokens"]), float(metrics["grad_norm"])) == (0, 0.0)
    assert np.isnan(metrics["loss"])
    assert (int(metrics["skipped_steps"]), int(metrics["skipped_in_a_row"])) == (1, 0)  # which is no divergence
    assert_equal(before, host((state.model, state.opt_state)))


def test_gradients_of_micro_batches_are_summed_in_fp32():
    changes = {"train.grad_accum_steps": 2, "parallel.grad_reduce": "micro", "model.param_dtype": "bfloat16"}
    config = tiny_config().changed(changes)
    model = init_state(config).model
    rows = random_rows(config, 0)
    batch = to_device(config, rows)
    step = jax.jit(loss_and_grads, static_argnums=0)
    metrics, grads = step(resolved(config), model, batch)
    parts = [step(resolved(config), model, {name: x[i : i + 1] for name, x in batch.items()}) for i in range(2)]
    tokens = int(metrics["tokens"])

    def check(both: jax.Array, first: jax.Array, second: jax.Array) -> None:
        assert both.dtype == first.dtype == jnp.float32
        sums = [np.asarray(grad) * int(part["tokens"]) for grad, (part, _) in zip((first, second), parts, strict=True)]
        np.testing.assert_allclose(both, (sums[0] + sums[1]) / tokens, rtol=1e-5, atol=1e-9)

    jax.tree.map(check, grads, *(part for _, part in parts))


@pytest.mark.slow
def test_a_sum_in_16_bits_loses_what_is_small_beside_it():
    config = tiny_config().changed({"train.grad_accum_steps": 2})
    batch, model = to_device(config, random_rows(config, 0)), init_state(config).model
    step = jax.jit(loss_and_grads, static_argnums=0)
    _, exact = step(resolved(config), model, batch)
    _, narrow = step(resolved(config.changed({"train.grad_accum_dtype": "bfloat16"})), model, batch)
    for ours, theirs in zip(jax.tree.leaves(narrow), jax.tree.leaves(exact), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=2**-6, atol=2**-6 * float(np.abs(theirs).max()))
        assert np.any(np.asarray(ours) != np.asarray(theirs))


def test_clipping_scales_the_gradients_to_the_norm():
    config = tiny_config()
    batch = to_device(config, random_rows(config, 0))
    state = init_state(config)
    _, grads = jax.jit(loss_and_grads, static_argnums=0)(resolved(config), state.model, batch)
    norm = float(jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads))))
    limit = norm / 3
    state, metrics = train_step(resolved(config.changed({"optimizer.grad_clip_norm": limit})), state, batch)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    # After one step the first moment is (1 - b1) times the gradient that the optimizer saw.
    jax.tree.map(lambda m, g: np.testing.assert_allclose(m, 0.1 * g / 3, rtol=1e-4, atol=1e-9), state.opt_state[0].mu, grads)


def test_the_state_is_donated():
    config = tiny_config()
    state = init_state(config)
    train_step(resolved(config), state, to_device(config, random_rows(config, 0)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.model))


def test_evaluation_sums_what_training_averages():
    config = tiny_config()
    state, batch = init_state(config), to_device(config, random_rows(config, 0))
    token_bytes = np.arange(config.model.vocab_size, dtype=np.int32)
    totals, num_bytes = eval_step(state.model, batch, token_bytes)
    targets = np.asarray(batch["targets"])
    assert int(num_bytes) == targets[targets >= 0].sum()
    _, metrics = train_step(resolved(config), state, batch)
    np.testing.assert_allclose(totals.cross_entropy / totals.num_counted, metrics["loss"], rtol=1e-6)
    assert int(totals.num_counted) == int(metrics["tokens"])


@pytest.mark.slow
def test_ten_steps_learn_one_batch():
    config = tiny_config().changed({"optimizer.learning_rate": 3e-2})
    state, batch = init_state(config), to_device(config, random_rows(config, 0))
    losses = []
    for _ in range(10):
        state, metrics = train_step(resolved(config), state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]


def hash_of_program() -> str:
    """Hash of a step, with all its constants, of a model with 64 stretched rotary frequencies."""
    jax.set_mesh(make_mesh(tiny_config().mesh))
    stretch = RopeScalingConfig(kind="llama3", factor=8.0)
    model = dataclasses.replace(tiny_config().model, head_dim=128, rope_theta=5e5, rope_scaling=stretch, max_seq_len=131072)
    config = tiny_config(model=model)
    state = jax.eval_shape(lambda: init_state(config))
    batch = dict.fromkeys(FIELDS, jax.ShapeDtypeStruct((1, 32, 16), np.int32))
    return hashlib.sha256(train_step.lower(resolved(config), state, batch).as_text().encode()).hexdigest()


@pytest.mark.slow
def test_programs_do_not_depend_on_the_hosts_cpu():
    found = np.show_config(mode="dicts")["SIMD Extensions"]["found"]  # pyright: ignore[reportOptionalSubscript, reportArgumentType]
    command = [
        sys.executable,
        "-c",
        "from tests import conftest; from tests.step import test_step; print(test_step.hash_of_program())",
    ]
    old_cpu = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(found)}
    there = subprocess.run(command, env=old_cpu, capture_output=True, text=True, check=True).stdout.strip()
    assert there == hash_of_program()


def test_one_behind():
    taken = []

    def results():
        for number in range(4):
            taken.append(number)
            yield number

    late = one_behind(results())
    assert [(number, taken[-1]) for number in late] == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert list(one_behind([])) == []
    assert list(one_behind([7])) == [7]
