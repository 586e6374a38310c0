"""Objectives of preferences: sums of answers, losses by their definitions, and the same steps on every mesh."""

import functools

import jax
import numpy as np
import pytest

from llamajax.config.data import SourceConfig
from llamajax.config.run import Config
from llamajax.data.rows.packing import Row
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.mesh import make_mesh
from llamajax.step.batch import IGNORE, fields
from llamajax.step.frozen import partition
from llamajax.step.preferences import by_answer
from llamajax.step.state import abstract_state, init_state
from llamajax.step.step import train_step
from llamajax.verification.rows import make_rows
from tests.tiny import resolved, single_device_mesh, tiny_config, to_device

BASE = tiny_config().changed(
    {
        "init_from": "model", "objective.kind": "dpo", "data.seq_len": 32, "train.num_steps": 3, "optimizer.eps": 1e-5,
        "data.sources": (SourceConfig(kind="preference", paths=("unused",)),), "optimizer.warmup_steps": 0,
        "train.global_batch_size": 16,
    }
)  # fmt: skip
ADAPTED = BASE.changed({"adapters.kind": "lora", "adapters.rank": 4, "adapters.base": "float32", "adapters.dropout": 0.1})
KINDS = {
    "base": ADAPTED.changed({"objective.nll_weight": 0.1}),
    "cached": BASE.changed({"objective.label_smoothing": 0.1, "objective.nll_weight": 0.2}),
    "orpo": BASE.changed({"objective.kind": "orpo"}),
    "kto": ADAPTED.changed({"objective.kind": "kto", "objective.undesirable_weight": 0.5}),
    "kto-cached": BASE.changed({"objective.kind": "kto"}),
    "simpo": BASE.changed({"objective.kind": "simpo"}),
    "reward": BASE.changed(
        {
            "objective.kind": "reward", "objective.center_weight": 0.3, "objective.label_smoothing": 0.1,
            "model.head": "score", "model.tie_embeddings": True, "model.num_layers": 1,
        }
    ),
}  # fmt: skip


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


def rows_of(config: Config, step: int) -> dict[str, np.ndarray]:
    """Rows [B, T] of random answers, all fields; the same on every mesh."""
    batch = make_rows(config, step)
    return {name: np.asarray(array).reshape(-1, array.shape[-1]) for name, array in batch.items()}


def history(config: Config, mesh: jax.sharding.Mesh, start: Config) -> list[dict[str, np.ndarray]]:
    """Metrics and trained weights after each step, from the first state of one device."""
    jax.set_mesh(single_device_mesh())
    first, batches = init_state(start), [rows_of(start, step) for step in range(start.train.num_steps)]
    jax.set_mesh(mesh)
    like, tree = jax.tree.flatten(abstract_state(config))  # the tree names remat, which may be another
    state = tree.unflatten([jax.device_put(x, on.sharding) for x, on in zip(jax.tree.leaves(first), like, strict=True)])
    steps = []
    for batch in batches:
        state, metrics = train_step(resolved(config), state, to_device(config, batch))
        trained, _ = partition(config, state.model)
        steps.append({name: np.asarray(x) for name, x in named_arrays({"metrics": metrics, "weights": trained}).items()})
    return steps


@functools.cache
def reference(kind: str) -> list[dict[str, np.ndarray]]:
    return history(KINDS[kind], single_device_mesh(), KINDS[kind])


@pytest.mark.parametrize(
    ("kind", "mesh", "changes"),
    [
        slow("base", {"fsdp": 2, "sequence": 2, "tensor": 2}, {"train.grad_accum_steps": 2, "parallel.sequence": "ring"}),
        slow("cached", {"fsdp": 4, "sequence": 2}, {"parallel.sequence": "ring", "train.grad_accum_steps": 2}),
        long("orpo", {"data": 2, "tensor": 4}, {"parallel.tensor": "ring", "train.grad_accum_steps": 4}),
        long("kto", {"fsdp": 2, "sequence": 2, "tensor": 2}, {"parallel.stack": "prefetch", "train.grad_accum_steps": 2}),
        long("kto-cached", {"fsdp": 8}, {"parallel.stack": "unrolled", "model.remat": "full", "parallel.zero": 2}),
        slow("reward", {"fsdp": 2, "sequence": 2, "tensor": 2}, {"train.grad_accum_steps": 2}),
        long("reward", {"fsdp": 2, "sequence": 4}, {"parallel.stack": "prefetch", "parallel.sequence": "ring"}),
        long("reward", {"data": 2, "fsdp": 4}, {"parallel.zero": 1, "train.grad_accum_steps": 2, "model.remat": "full"}),
        long("reward", {"fsdp": 2, "tensor": 4}, {"parallel.tensor": "ring", "parallel.zero": 2}),
        long("simpo", {"data": 2, "fsdp": 2, "sequence": 2}, {"parallel.sequence": "ulysses", "parallel.zero_data": 1}),
    ],
)
def test_steps_equal_those_of_one_device(kind, mesh, changes):
    config = KINDS[kind].changed({f"mesh.{axis}": size for axis, size in mesh.items()} | changes)
    for ours, theirs in zip(history(config, make_mesh(config.mesh), KINDS[kind]), reference(kind), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, atol=1e-5, err_msg=name)


def test_a_step_compares_whole_answers_with_the_reference():
    """By the definition of DPO, in numpy, from the reference's numbers and from the model before its first step."""
    config = KINDS["cached"].changed({"objective.label_smoothing": 0.0, "objective.nll_weight": None, "objective.beta": 0.5})
    jax.set_mesh(single_device_mesh())
    state, batch = init_state(config), rows_of(config, 0)
    logits = np.asarray(jax.jit(lambda model, *rows: model(*rows))(state.model, *_inputs(batch)))
    found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets, ids = batch["targets"], batch["segment_ids"]
    own = np.take_along_axis(found, np.maximum(targets, 0)[..., None], -1)[..., 0]
    margins = []
    for row in range(len(ids)):
        for chosen in range(1, ids.max() + 1, 2):
            sides = [(ids[row] == segment) & (targets[row] != IGNORE) for segment in (chosen, chosen + 1)]
            if all(side.any() for side in sides):
                scores = [(own - batch["reference"])[row][side].sum() for side in sides]
                margins.append(0.5 * (scores[0] - scores[1]))
    _, metrics = train_step(resolved(config), state, to_device(config, batch))
    assert int(metrics["pairs"]) == len(margins) > 10
    np.testing.assert_allclose(metrics["loss"], np.mean(np.log1p(np.exp(-np.array(margins)))), rtol=1e-5)
    np.testing.assert_allclose(metrics["reward_margin"], np.mean(margins), rtol=1e-4)
    np.testing.assert_allclose(metrics["reward_accuracy"], np.mean(np.array(margins) > 0), rtol=1e-5)


def test_a_reward_is_the_score_at_the_last_token():
    config = KINDS["reward"].changed({"objective.label_smoothing": 0.0})
    jax.set_mesh(single_device_mesh())
    state, batch = init_state(config), rows_of(config, 0)
    scores = np.asarray(jax.jit(lambda model, *rows: model(*rows))(state.model, *_inputs(batch)))[..., 0]
    pairs = []
    for row, ids in enumerate(batch["segment_ids"]):
        for chosen in range(1, ids.max() + 1, 2):
            sides = [ids == segment for segment in (chosen, chosen + 1)]
            if all((batch["targets"][row][side] != IGNORE).any() for side in sides):
                pairs.append([scores[row, np.flatnonzero(side)[-1]] for side in sides])
    chosen, rejected = np.array(pairs).T
    _, metrics = train_step(resolved(config), state, to_device(config, batch))
    assert not [name for name in metrics if "log_prob" in name or "nll" in name]
    assert int(metrics["pairs"]) == len(pairs) > 10
    expected = np.log1p(np.exp(rejected - chosen)) + 0.3 * (chosen + rejected) ** 2
    np.testing.assert_allclose(metrics["loss"], expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["reward_chosen"], chosen.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["reward_rejected"], rejected.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["reward_accuracy"], np.mean(chosen > rejected), rtol=1e-5)


def _inputs(batch: Row) -> tuple[np.ndarray, ...]:
    return batch["tokens"], batch["segment_ids"], batch["positions"]


def test_the_reference_is_the_model_without_its_adapters():
    """Before the first step they add nothing, so the model is the reference; later it is not."""
    first, *_, last = reference("base")
    assert abs(last["metrics.reward_chosen"]) > 1e-4
    assert first["metrics.reward_margin"] == pytest.approx(0, abs=1e-5)
    assert first["metrics.loss"] - 0.1 * first["metrics.nll"] == pytest.approx(np.log(2), abs=1e-5)


def test_sums_of_answers():
    rng = np.random.default_rng(0)
    ids = np.array([[1, 1, 2, 2, 2, 5, 5, 6, 0, 0], [2, 4, 4, 4, 5, 5, 5, 5, 5, 5], [0] * 10], np.int32)
    values = rng.standard_normal(ids.shape, np.float32)
    with jax.set_mesh(single_device_mesh()):
        found = np.asarray(jax.jit(by_answer)(values, ids))
    expected = np.zeros((3, 10, 2), np.float32)
    for row, place in zip(*np.nonzero(ids), strict=True):
        expected[row].reshape(-1)[ids[row, place] - 1] += values[row, place]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_batch_has_the_fields_of_its_objective():
    assert fields(KINDS["base"]).keys() == {"tokens", "targets", "segment_ids", "positions"}
    assert fields(KINDS["orpo"]).keys() - fields(KINDS["base"]).keys() == {"whole_targets"}
    assert fields(KINDS["cached"])["reference"] is np.float32
    assert {"other_tokens", "other_reference"} <= fields(KINDS["kto-cached"]).keys()
