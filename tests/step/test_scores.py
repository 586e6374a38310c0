"""A reward model has the same losses, metrics and weights on every mesh."""

import functools

import jax
import numpy as np
import pytest

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.run import Config
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.mesh import make_mesh
from llamajax.step.state import abstract_state, init_state
from llamajax.step.step import train_step
from llamajax.verification.rows import make_rows
from tests.tiny import resolved, single_device_mesh, tiny_config

BASE = tiny_config(data=DataConfig(sources=(SourceConfig(kind="preference", paths=("unused",)),), seq_len=16)).changed(
    {
        "objective.kind": "reward", "objective.center_weight": 0.3, "objective.label_smoothing": 0.1, "model.head": "score",
        "model.tie_embeddings": True, "train.num_steps": 2, "optimizer.eps": 1e-5, "optimizer.warmup_steps": 0,
    }
)  # fmt: skip
METRICS = ("loss", "pairs", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")


def history(mesh: jax.sharding.Mesh, config: Config) -> list[dict[str, np.ndarray]]:
    """Metrics and weights after each step, from the first state of one device."""
    jax.set_mesh(single_device_mesh())
    first = init_state(BASE)
    jax.set_mesh(mesh)
    like, tree = jax.tree.flatten(abstract_state(config))  # the tree names remat, which may be another
    state = tree.unflatten([jax.device_put(x, on.sharding) for x, on in zip(jax.tree.leaves(first), like, strict=True)])
    steps = []
    for step in range(config.train.num_steps):
        state, metrics = train_step(resolved(config), state, make_rows(config, step))
        seen = named_arrays({"metrics": metrics, "weights": state.model})
        steps.append({name: np.asarray(x) for name, x in seen.items()})
    return steps


@functools.cache
def reference() -> list[dict[str, np.ndarray]]:
    return history(single_device_mesh(), BASE)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"fsdp": 2, "sequence": 2, "tensor": 2}, {"train.grad_accum_steps": 2}),
        slow({"fsdp": 2, "sequence": 4}, {"parallel.stack": "prefetch", "parallel.sequence": "ring"}),
        slow({"data": 2, "fsdp": 4}, {"parallel.zero": 1, "train.grad_accum_steps": 2, "model.remat": "full"}),
        slow({"fsdp": 2, "tensor": 4}, {"parallel.tensor": "ring", "parallel.grad_reduce": "micro_batch"}),
        slow({"fsdp": 4, "sequence": 2}, {"parallel.zero": 2, "parallel.sequence": "ulysses"}),
    ],
)
def test_steps_equal_those_of_one_device(mesh, changes):
    config = BASE.changed({f"mesh.{axis}": size for axis, size in mesh.items()} | changes)
    for ours, theirs in zip(history(make_mesh(config.mesh), config), reference(), strict=True):
        assert ours.keys() == theirs.keys()
        assert ours.keys() >= {f"metrics.{name}" for name in METRICS}
        assert not [name for name in ours if "log_prob" in name or "nll" in name]
        assert ours["metrics.pairs"] > 10
        assert np.isfinite(ours["metrics.loss"])
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, atol=1e-5, err_msg=name)
