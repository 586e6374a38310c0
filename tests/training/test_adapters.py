"""Adapters in training: the same numbers in every form, a base that never changes, checkpoints of adapters alone."""

import functools
import re
from collections import Counter

import jax
import numpy as np
import pytest

from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.estimates.formulas import state_bytes, stored_state_bytes
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.mesh import make_mesh
from llamajax.step.checksum import fingerprint, held_bytes
from llamajax.step.frozen import partition
from llamajax.step.state import abstract_state, init_state
from llamajax.step.step import train_step
from tests.tiny import random_rows, resolved, single_device_mesh, tiny_config, to_device

BASE = tiny_config().changed(
    {
        "init_from": "model", "adapters.kind": "lora", "adapters.rank": 4, "adapters.base": "float32",
        "train.num_steps": 3, "optimizer.eps": 1e-5, "optimizer.learning_rate": 1e-3, "optimizer.warmup_steps": 0,
    }
)  # fmt: skip
KINDS = {
    "lora": BASE,
    "dropout": BASE.changed({"adapters.dropout": 0.2, "adapters.targets": ("q", "v", "up", "down")}),
    "whole": BASE.changed({"adapters.targets": ("q", "v", "up", "down")}),
    "dora": BASE.changed({"adapters.kind": "dora", "adapters.targets": ("k", "o", "gate", "down")}),
    # Weights, blocks and groups of 64 divide over two devices.
    "nf4": BASE.changed(
        {
            "adapters.base": "nf4", "model.embed_dim": 128, "model.mlp_dim": 128, "model.num_layers": 1,
            "mesh.fsdp": 2, "mesh.data": 4,
        }
    ),
    "biased": BASE.changed({"model.qkv_bias": True, "model.output_bias": True, "model.mlp_bias": True, "adapters.rank": 3}),
}  # fmt: skip
"""Configurations, each compared with one device."""


def first_state(kind: str):
    jax.set_mesh(single_device_mesh())
    return init_state(KINDS[kind])


def history(kind: str, mesh: jax.sharding.Mesh, config: Config) -> list[dict[str, np.ndarray]]:
    """Losses and trained weights after each step, from the first state of one device."""
    first = first_state(kind)
    jax.set_mesh(mesh)
    like, tree = jax.tree.flatten(abstract_state(config))  # the tree names remat, which may be another
    state = tree.unflatten([jax.device_put(x, on.sharding) for x, on in zip(jax.tree.leaves(first), like, strict=True)])
    steps = []
    for step in range(config.train.num_steps):
        state, metrics = train_step(resolved(config), state, to_device(config, random_rows(config, step)))
        trained, _ = partition(config, state.model)
        steps.append({name: np.asarray(x) for name, x in named_arrays({"metrics": metrics, "weights": trained}).items()})
    return steps


@functools.cache
def reference(kind: str) -> list[dict[str, np.ndarray]]:
    return history(kind, single_device_mesh(), KINDS[kind])


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("kind", "mesh", "changes"),
    [
        slow(
            "dropout", {"fsdp": 2, "sequence": 2, "tensor": 2}, {"train.grad_accum_steps": 2, "parallel.stack": "prefetch"}
        ),
        long("lora", {"fsdp": 8}, {"parallel.stack": "unrolled", "model.remat": "full"}),
        long("lora", {"tensor": 8, "fsdp": 1}, {"model.remat": "save_attention"}),
        slow("nf4", {"fsdp": 2, "tensor": 2, "data": 2}, {"parallel.stack": "prefetch", "model.remat": "full"}),
        long("dora", {"fsdp": 2, "sequence": 2, "tensor": 2}, {"parallel.tensor": "ring", "parallel.sequence": "ring"}),
        long("biased", {"fsdp": 2, "tensor": 4}, {}),
        long("dropout", {"pipeline": 2, "fsdp": 2, "tensor": 2}, {"train.grad_accum_steps": 4, "parallel.zero": 1}),
        long("lora", {"data": 4, "fsdp": 2}, {"parallel.zero_data": 1, "parallel.stack": "prefetch"}),
        long("lora", {"fsdp": 4, "sequence": 2}, {"parallel.sequence": "ulysses", "model.remat": "save_attention_qkv"}),
        long("dora", {"fsdp": 4, "tensor": 2}, {"parallel.zero": 2, "train.grad_accum_steps": 2}),
        long("dora", {"pipeline": 2, "fsdp": 2, "tensor": 2}, {"train.grad_accum_steps": 2, "parallel.zero": 1}),
        long("nf4", {"fsdp": 2, "tensor": 2, "data": 2}, {"parallel.zero": 1, "parallel.stack": "unrolled"}),
        long("biased", {"fsdp": 2, "tensor": 4}, {"parallel.tensor": "ring", "model.remat": "full"}),
    ],
)
def test_steps_equal_those_of_one_device(kind, mesh, changes):
    config = KINDS[kind].changed({f"mesh.{axis}": size for axis, size in mesh.items()} | changes)
    for ours, theirs in zip(history(kind, make_mesh(config.mesh), config), reference(kind), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, atol=1e-5, err_msg=name)


def test_dropout_changes_what_is_learnt_and_nothing_without_a_step():
    dropped, whole = reference("dropout"), reference("whole")
    assert dropped[0]["metrics.loss"] == pytest.approx(whole[0]["metrics.loss"], abs=1e-6)  # b is zero
    name = "weights.layers.attention.q_adapter.b"
    assert np.abs(dropped[0][name] - whole[0][name]).max() > 1e-4


@pytest.mark.parametrize("base", ["bfloat16", slow("nf4"), long("int8")])
def test_the_base_stays_to_the_bit_without_gradients_and_moments(base):
    config = KINDS["nf4"].changed({"adapters.base": base, "adapters.kind": "dora"})
    jax.set_mesh(single_device_mesh())
    state = init_state(config)
    before, size = fingerprint(partition(config, state.model)[1]), sum(x.size for x in jax.tree.leaves(state.opt_state))
    trained, _ = partition(config, state.model)
    assert size == 2 * sum(x.size for x in jax.tree.leaves(trained)) + 2, "two moments, two counters"
    assert all("_adapter." in name for name in named_arrays(trained))
    after, _ = train_step(resolved(config), state, to_device(config, random_rows(config, 0)))
    assert fingerprint(partition(config, after.model)[1]) == before
    assert named_arrays(after.as_saved()).keys() == {
        name for name in named_arrays(after) if not name.startswith("model.") or "_adapter." in name
    }


@pytest.mark.parametrize("base", ["float32", "nf4"])
@pytest.mark.parametrize(("devices", "mesh"), [(1, {"fsdp": 1, "data": 1}), (8, {"fsdp": 2, "tensor": 2, "data": 2})])
def test_state_and_checkpoint_take_the_bytes_of_the_formula(base, devices, mesh):
    changes = {"adapters.base": base, "adapters.kind": "dora", "model.num_layers": 2, "mesh.num_cpu_devices": devices}
    config = KINDS["nf4"].changed(changes | {f"mesh.{axis}": size for axis, size in mesh.items()})
    jax.set_mesh(make_mesh(config.mesh, jax.devices()[:devices]))
    state, sizes = abstract_state(config), config.mesh.axis_sizes(devices)
    assert held_bytes((state.model, state.opt_state)) == pytest.approx(stored_state_bytes(config, sizes), rel=0.02)
    saved = state.as_saved()
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((saved.model, saved.opt_state)))
    assert whole == pytest.approx(state_bytes(config), rel=0.001)


def flops(config: Config) -> float:
    """FLOPs of the matrix products of a compiled step, loops counted by their trips."""
    jax.set_mesh(single_device_mesh())
    step = train_step.lower(resolved(config), abstract_state(config), to_device(config, random_rows(config, 0)))
    counted = step.compile().cost_analysis()
    assert counted is not None
    return counted["flops"]


@pytest.mark.parametrize(("remat", "most"), [slow("none", 0.70), long("full", 0.78)])
def test_no_gradient_of_a_frozen_matrix_is_computed(remat, most):
    full = tiny_config().changed(
        {
            "model.remat": remat, "parallel.stack": "unrolled", "model.embed_dim": 256, "model.mlp_dim": 1024,
            "model.num_layers": 3, "model.head_dim": 16, "train.global_batch_size": 4, "mesh.num_cpu_devices": 1,
            "data.seq_len": 32,
        }
    )  # fmt: skip
    adapted = full.changed({"init_from": "model", "adapters.kind": "lora", "adapters.rank": 2, "adapters.base": "float32"})
    assert flops(adapted) <= most * flops(full)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_from": None}, "adapters.kind: needs init_from"),
        ({"train.frozen": ("norm",)}, "train.frozen: has no effect with adapters"),
        ({"adapters.targets": ()}, "adapters.targets: must name at least one"),
        ({"adapters.targets": ("q", "q")}, "names a projection twice"),
        ({"offload.optimizer": 1.0}, "offload.optimizer: adapters have a small state"),
        ({"adapters.base": "int8", "model.matmul_dtype": "float8"}, "rounds weights again"),
        ({"adapters.base": "nf4", "mesh.fsdp": 8}, "must be divisible by 32 x mesh.fsdp=8 with nf4"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        BASE.changed(changes)


def test_adapters_are_named_once_each():
    jax.set_mesh(single_device_mesh())
    counts = Counter(name.rpartition(".")[2] for name in named_arrays(partition(BASE, abstract_state(BASE).model)[0]))
    assert counts == {"a": 7, "b": 7}
