"""GRPO's loss: by its definition, its clipped and its divergent part, and the same steps on every mesh."""

import functools
import math

import jax
import numpy as np
import pytest

from llamajax.config.data import SourceConfig
from llamajax.config.run import Config
from llamajax.parallel.mesh import make_mesh
from llamajax.step.batch import FIELDS, IGNORE, fields
from llamajax.step.policy import completion_log_probs
from llamajax.step.state import init_state
from llamajax.step.step import train_step
from tests.step.test_preferences import history, rows_of
from tests.tiny import resolved, single_device_mesh, tiny_config, to_device

BASE = tiny_config().changed(
    {
        "init_from": "model", "objective.kind": "grpo", "objective.rollout.max_tokens": 8, "objective.rollout.steps": 2,
        "data.sources": (SourceConfig(kind="prompt", paths=("unused",)),), "data.seq_len": 16, "train.num_steps": 3,
        "optimizer.eps": 1e-5, "optimizer.warmup_steps": 0, "train.global_batch_size": 16, "objective.clip_high": 0.28,
    }
)  # fmt: skip
KINDS = {
    "tokens": BASE,
    "completions": BASE.changed({"objective.length_normalized": True, "objective.rollout.temperature": 0.7}),
    "adapters": BASE.changed(
        {"adapters.kind": "lora", "adapters.rank": 4, "adapters.base": "float32", "objective.kl_weight": 0.0}
    ),
}


@functools.cache
def reference(kind: str) -> list[dict[str, np.ndarray]]:
    return history(KINDS[kind], single_device_mesh(), KINDS[kind])


@pytest.mark.parametrize(
    ("kind", "mesh", "changes"),
    [
        ("tokens", {"fsdp": 2, "sequence": 2, "tensor": 2}, {"train.grad_accum_steps": 2, "parallel.sequence": "ring"}),
        pytest.param(
            "completions", {"data": 2, "tensor": 4}, {"parallel.tensor": "ring", "parallel.zero": 1}, marks=pytest.mark.slow
        ),
        pytest.param(
            "adapters", {"fsdp": 4, "sequence": 2}, {"parallel.stack": "prefetch", "train.grad_accum_steps": 2},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_steps_equal_those_of_one_device(kind, mesh, changes):
    config = KINDS[kind].changed({f"mesh.{axis}": size for axis, size in mesh.items()} | changes)
    for ours, theirs in zip(history(config, make_mesh(config.mesh), KINDS[kind]), reference(kind), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def in_numpy(config: Config, batch: dict[str, np.ndarray], own: np.ndarray) -> dict[str, float]:
    """Metrics of a step by the papers' equations, token by token."""
    objective, losses, clipped, divergences, rows = config.objective, [], 0, [], []
    high = objective.clip_low if objective.clip_high is None else objective.clip_high
    for b in range(len(own)):
        of_row = []
        for t in np.flatnonzero(batch["targets"][b] != IGNORE):
            advantage = float(batch["advantages"][b, t])
            ratio = math.exp(own[b, t] - batch["old"][b, t]) if "old" in batch else 1.0
            bounded = min(max(ratio, 1 - objective.clip_low), 1 + high)
            log_q = float(batch["reference"][b, t] - own[b, t])
            divergences.append(math.exp(log_q) - log_q - 1)
            clipped += ratio * advantage > bounded * advantage
            of_row.append(-min(ratio * advantage, bounded * advantage) + objective.kl_weight * ratio * divergences[-1])
        losses += of_row
        rows += [sum(of_row) / len(of_row)] if of_row else []
    per = rows if objective.length_normalized else losses
    mean: dict[str, float] = {
        "loss": sum(per) / len(per),
        "clipped": clipped / len(losses),
        "divergence": float(np.mean(divergences)),
    }
    return mean | {"completions" if objective.length_normalized else "tokens": float(len(per))}


@pytest.mark.parametrize("kind", ["tokens", "completions"])
def test_the_loss_is_that_of_the_paper(kind):
    config = KINDS[kind]
    jax.set_mesh(single_device_mesh())
    state, batch = init_state(config), rows_of(config, 0)
    plain = {name: batch[name] for name in FIELDS}
    own = np.asarray(completion_log_probs(config, state.model, to_device(config, plain)))
    _, metrics = train_step(resolved(config), state, to_device(config, batch))
    wanted = in_numpy(config, batch, own)
    assert wanted["tokens" if kind == "tokens" else "completions"] > 10
    assert wanted["clipped"] > 0.1
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_log_probs_are_those_that_completions_are_drawn_with():
    """The temperature divides the logits, as before a draw."""
    config = KINDS["completions"]
    jax.set_mesh(single_device_mesh())
    model, batch = init_state(config).model, {name: array for name, array in rows_of(config, 0).items() if name in FIELDS}
    rows = [batch[name] for name in ("tokens", "segment_ids", "positions")]
    logits = np.asarray(jax.jit(lambda model, *rows: model(*rows))(model, *rows)) / 0.7
    found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = np.take_along_axis(found, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    own = np.asarray(completion_log_probs(config, model, to_device(config, batch)))
    np.testing.assert_allclose(own, np.where(batch["targets"] == IGNORE, 0, wanted), atol=1e-5)


def test_the_first_step_of_a_rollout_has_ratios_of_one():
    """Its gradient is that of the advantages times the log-probabilities, so positive advantages raise those."""
    config = BASE.changed({"objective.rollout.steps": 1, "objective.kl_weight": 0.0})
    assert fields(config).keys() == {*FIELDS, "advantages"}
    jax.set_mesh(single_device_mesh())
    state, batch = init_state(config), rows_of(config, 0)
    batch["advantages"] = np.where(batch["targets"] != IGNORE, np.float32(1), np.float32(0))
    _, before = train_step(resolved(config), state, to_device(config, batch))
    assert before["clipped"] == 0
    np.testing.assert_allclose(before["loss"], -1.0, rtol=1e-6)
    state, after = init_state(config), before
    for _ in range(3):
        state, after = train_step(resolved(config), state, to_device(config, batch))
    assert after["log_prob"] > before["log_prob"]
    assert "divergence" not in after
