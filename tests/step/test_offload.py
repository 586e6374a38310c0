"""A step whose saved values wait in host memory gives the numbers of one whose values stay on the card."""

import itertools

import jax
import jax.extend.core
import numpy as np
import pytest

from llamajax.config.offload import OffloadConfig
from llamajax.config.parallel import MeshConfig, ParallelConfig
from llamajax.config.training import TrainConfig
from llamajax.parallel.host_memory import HOST
from llamajax.parallel.mesh import make_mesh
from llamajax.step.compile import abstract_batch
from llamajax.step.state import abstract_state, init_state
from llamajax.step.step import loss_and_grads
from tests.tiny import random_rows, resolved, tiny_config, to_device

MESHES = {
    "fsdp": MeshConfig(fsdp=8, num_cpu_devices=8),
    "mixed": MeshConfig(data=2, fsdp=2, tensor=2, num_cpu_devices=8),
    "rows": MeshConfig(fsdp=2, sequence=2, tensor=2, num_cpu_devices=8),
}
FORMS = ("prefetch", "unrolled")
SAVED = {
    "full": ("input",),
    "save_attention": ("input", "residual", "attention"),
    "save_attention_qkv": ("input", "attention", "qkv"),
    "save_attention_qkv_mlp": ("input", "residual", "attention", "qkv", "gate_up"),
    "none": ("input", "residual", "attention", "gate_up"),
}
EXPERTS = {"num_experts": 8, "mlp_dim": 32, "bias_update_rate": 0.01}
"""Settings of experts that move a bias."""

SAMPLED = (5, 18, 26, 43, 51)
"""Combinations that have each mesh, form, policy and accumulation."""


def combinations():
    """Every combination of mesh, form, policy and accumulation: each value in a slow run, all in `long`."""
    for number, (mesh, form, remat, steps) in enumerate(itertools.product(MESHES, FORMS, SAVED, (1, 2))):
        marks = pytest.mark.slow if number in SAMPLED else pytest.mark.long
        yield pytest.param(mesh, form, remat, steps, marks=marks, id=f"{mesh}-{form}-{remat}-{steps}")


def run_config(mesh, form, remat, steps):
    base = tiny_config(
        train=TrainConfig(num_steps=10, global_batch_size=16, grad_accum_steps=steps),
        mesh=MESHES[mesh],
        parallel=ParallelConfig(stack=form),
    )
    return base.changed({"model.remat": remat, "model.num_layers": 4})


def gradients(config):
    """The loss and gradients of a step."""
    jax.set_mesh(make_mesh(config.mesh))
    model, batch = init_state(config).model, to_device(config, random_rows(config, 0))
    metrics, grads = jax.jit(loss_and_grads, static_argnums=0)(resolved(config), model, batch)
    return metrics["loss"], *jax.tree.leaves(grads)


@pytest.mark.parametrize(("mesh", "form", "remat", "steps"), list(combinations()))
def test_gradients_are_the_same_to_the_last_bit(mesh, form, remat, steps):
    config = run_config(mesh, form, remat, steps)
    expected = gradients(config)
    found = gradients(config.changed({"offload.activations": SAVED[remat]}))
    for own, like in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, like)
    assert all(np.abs(like).max() > 0 for like in expected)


@pytest.mark.parametrize(
    ("mesh", "form", "fraction"),
    [
        ("mixed", "prefetch", 0.3),
        pytest.param("rows", "unrolled", 0.0, marks=pytest.mark.long),
        pytest.param("fsdp", "unrolled", 0.75, marks=pytest.mark.long),
    ],
)
def test_gradients_with_parted_tokens_are_the_same(mesh, form, fraction):
    """Smaller products add up in another order."""
    config = run_config(mesh, form, "save_attention_qkv_mlp", 1)
    offload = OffloadConfig(activations=SAVED["save_attention_qkv_mlp"], fraction=fraction)
    for own, like in zip(gradients(config.changed({"offload": offload})), gradients(config), strict=True):
        np.testing.assert_allclose(own, like, rtol=1e-5, atol=1e-6 * np.abs(like).max())


def with_experts(**changes):
    base = run_config("fsdp", "prefetch", "save_attention_qkv_mlp", 1)
    own = {f"model.experts.{name}": x for name, x in EXPERTS.items()} | {"mesh.fsdp": 2, "mesh.expert": 4}
    return base.changed(own | changes)


def values_on_host(config):
    """Dims of the values that a layer in the loop sends to the host, without the devices' rows or slots."""
    jax.set_mesh(make_mesh(config.mesh))
    model, batch = abstract_state(config).model, abstract_batch(config)
    traced = jax.jit(loss_and_grads, static_argnums=0).trace(resolved(config), model, batch)
    values = (x.aval for equation in equations(traced.jaxpr.jaxpr, "device_put") for x in equation.outvars)
    return sorted(value.shape[2:] for value in values if value.memory_space == HOST)


def equations(jaxpr, primitive):
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner, primitive)


@pytest.mark.parametrize(
    ("name", "dims", "parts"),
    [("gate_up", (64,), 1), ("gate_up", (64,), 2), ("qkv", (8, 4, 4), 2), ("attention", (8, 2, 4), 2)],
)
def test_values_of_experts_wait_on_the_host(name, dims, parts):
    assert values_on_host(with_experts(**{"parallel.expert_parts": parts, "offload.activations": (name,)})) == [dims] * parts


@pytest.mark.slow
@pytest.mark.parametrize(("form", "parts"), [("prefetch", 2), ("unrolled", 1)])
def test_gradients_of_experts_are_the_same_to_the_last_bit(form, parts):
    config = with_experts(**{"parallel.stack": form, "parallel.expert_parts": parts})
    expected = gradients(config)
    found = gradients(config.changed({"offload.activations": SAVED["save_attention_qkv_mlp"]}))
    for own, like in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, like)
