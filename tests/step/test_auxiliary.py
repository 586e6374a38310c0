"""Auxiliary values of layers reach loss, gradients and metrics, the same in every form in which a step is computed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.model import Llama
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.zero import DATA, split_over
from llamajax.step.state import init_state
from llamajax.step.step import eval_step, loss_and_grads, train_step
from tests.step.penalized import by_definition, penalized
from tests.tiny import random_rows, resolved, single_device_mesh, tiny_config, to_device

CONFIG = tiny_config().changed({"model.num_layers": 3, "train.z_loss_weight": 0.0})
PREFETCH, UNROLLED = {"parallel.stack": "prefetch"}, {"parallel.stack": "unrolled"}
STEP = {"parallel.grad_reduce": "step"}


@functools.cache
def expected() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Metrics and gradients by their definition and jax's own derivative."""
    jax.set_mesh(single_device_mesh())
    batch = jax.tree.map(jnp.asarray, random_rows(CONFIG, 0))
    definition = functools.partial(by_definition, CONFIG, batch=batch)
    model = jax.jit(penalized, static_argnums=0)(CONFIG)
    gradients, metrics = jax.jit(jax.grad(definition, has_aux=True))(model)
    return jax.tree.map(np.asarray, (metrics, named_arrays(gradients)))


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((1, 2, 2, 2), {"model.remat": "save_attention", "train.grad_accum_steps": 2}),
        *(
            pytest.param(sizes, changes, marks=pytest.mark.slow)
            for sizes, changes in [
                (
                    (1, 2, 2, 2),
                    PREFETCH | {"model.remat": "save_attention_qkv", "parallel.sequence": "ring", "parallel.zero": 2},
                ),
                ((1, 4, 1, 2), UNROLLED | {"model.remat": "full", "train.grad_accum_steps": 4}),
                ((2, 4, 1, 1), {"parallel.zero": 1, "parallel.zero_data": 1, "train.grad_accum_steps": 2} | STEP),
                ((1, 2, 1, 4), PREFETCH | {"model.remat": "none", "parallel.tensor": "ring"}),
            ]
        ),
        *(
            pytest.param(sizes, changes, marks=pytest.mark.long)
            for sizes, changes in [
                ((1, 1, 1, 1), {"model.remat": "none"}),
                ((1, 1, 4, 2), {"parallel.sequence": "ulysses", "parallel.zero": 2}),
                ((2, 2, 1, 2), PREFETCH | STEP | {"model.remat": "full", "train.grad_accum_steps": 2}),
                ((2, 4, 1, 1), PREFETCH | STEP | {"model.remat": "save_attention_qkv_mlp", "parallel.zero_data": 1}),
                ((1, 8, 1, 1), PREFETCH | {"model.remat": "full", "model.matmul_dtype": "float8_unrounded"}),
                ((1, 1, 1, 1), PREFETCH | {"model.remat": "full"}),
                ((8, 1, 1, 1), {"model.remat": "full"}),
                ((2, 2, 1, 2), UNROLLED | {"model.remat": "full", "parallel.zero": 2}),
                ((2, 2, 2, 1), PREFETCH | STEP | {"model.remat": "full", "parallel.zero": 1}),
                ((1, 1, 1, 1), UNROLLED | {"model.remat": "none"}),
                ((1, 2, 2, 2), UNROLLED | STEP | {"model.remat": "save_attention", "train.grad_accum_steps": 2}),
            ]
        ),
    ],
)
def test_loss_gradients_and_metrics_are_those_of_the_definition(sizes: tuple[int, ...], changes: dict[str, Any]):
    metrics, gradients = expected()
    config, axes = CONFIG.changed(changes), dict(zip(("data", "fsdp", "sequence", "tensor"), sizes, strict=True))
    jax.set_mesh(make_mesh(MeshConfig(**axes), jax.devices()[: np.prod(sizes)]))
    model = jax.jit(penalized, static_argnums=0)(config)
    model = jax.jit(functools.partial(split_over, further=DATA))(model) if config.parallel.zero_data else model
    found, grads = jax.jit(loss_and_grads, static_argnums=0)(
        resolved(config), model, to_device(config, random_rows(config, 0))
    )
    assert found.keys() == metrics.keys() | {"tokens"}
    for name in metrics:
        np.testing.assert_allclose(found[name], metrics[name], rtol=1e-5, err_msg=name)
        assert metrics[name] > 0.1
    ours = named_arrays(grads)
    assert ours.keys() == gradients.keys()
    for name, truth in gradients.items():
        np.testing.assert_allclose(ours[name], truth, rtol=0, atol=1e-5 * np.abs(truth).max(), err_msg=name)


@pytest.mark.slow
def test_they_count_in_the_gradients_alone():
    """Not in the loss that is reported, nor in evaluation."""
    jax.set_mesh(make_mesh(MeshConfig(fsdp=4, tensor=2)))
    batch = to_device(CONFIG, random_rows(CONFIG, 0))
    models = jax.jit(lambda: (penalized(CONFIG), Llama(CONFIG.model, jax.random.key(CONFIG.seed))))()
    states = [init_state(CONFIG, model) for model in models]
    token_bytes = np.ones(CONFIG.model.vocab_size, np.int32)
    held_out = [eval_step(state.model, batch, token_bytes)[0] for state in states]
    np.testing.assert_array_equal(*(sums.cross_entropy for sums in held_out))
    metrics, plain = (train_step(resolved(CONFIG), state, batch)[1] for state in states)
    assert metrics.keys() - plain.keys() == {"penalty", "positive"}
    np.testing.assert_allclose(metrics["loss"], plain["loss"], rtol=1e-6)
    assert abs(float(metrics["grad_norm"]) - float(plain["grad_norm"])) > 1e-2
