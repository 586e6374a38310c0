"""Adapters compute and learn what peft's do: logits of random factors, and 50 steps of training on the same batches."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.zero import trained_only
from llamajax.step.state import init_state, with_adapters
from llamajax.step.step import train_step
from llamajax.weights import names
from llamajax.weights.loading import load_adapters, load_model
from llamajax.weights.open_model import open_pretrained
from tests.adapters import ALL, KINDS, base, logits_of, torch, write_adapters, write_base
from tests.converters.models import tiny
from tests.tiny import resolved, single_device_mesh, tiny_config, to_device

MODELS = {
    "grouped": {"num_kv_heads": 2},
    "tied": {"num_kv_heads": 1, "tie_embeddings": True},
    "qwen2": {"num_kv_heads": 2, "qkv_bias": True},
    "mlp-biases": {"num_kv_heads": 2, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
}
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads of torch wait for each other longer than they multiply such small matrices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("variant", "kind", "targets"),
    [
        ("grouped", "dora", ALL),
        pytest.param("tied", "rslora", ("q_proj", "v_proj"), marks=SLOW),
        pytest.param("qwen2", "dora", ALL, marks=SLOW),
        pytest.param("mlp-biases", "dora", ("o_proj", "k_proj", "up_proj"), marks=SLOW),
    ],
)
def test_logits_are_those_of_peft(variant, kind, targets, tmp_path):
    write_base(tmp_path / "base", tiny(**MODELS[variant], num_layers=2))
    theirs = write_adapters(tmp_path / "base", tmp_path / "peft", targets, **KINDS[kind])
    tokens = np.random.default_rng(0).integers(0, 96, (2, 12), dtype=np.int32)
    with jax.set_mesh(single_device_mesh()):
        found = open_pretrained(tmp_path / "peft")
        model = load_model(found, dataclasses.replace(found.config, compute_dtype="float32", remat="none"))
        ours = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens))
    expected = logits_of(theirs, tokens)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(expected - logits_of(base(tmp_path / "base"), tokens)).max() > 0.1 * np.abs(expected).max()


NUM_STEPS, B, T = 50, 4, 16


@SLOW
@pytest.mark.parametrize(
    ("kind", "targets", "variant"),
    [("lora", ALL, "grouped"), ("rslora", ("q_proj", "v_proj"), "qwen2"), ("dora", ALL, "tied")],
)
def test_training_has_the_losses_of_peft_and_changes_adapters_alone(kind, targets, variant, tmp_path):
    """From the same first factors, on the same batches, with the same AdamW."""
    write_base(tmp_path / "base", tiny(**MODELS[variant], num_layers=2))
    theirs = write_adapters(tmp_path / "base", tmp_path / "peft", targets, **KINDS[kind], seed=None).train()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 96, (NUM_STEPS, B, T), dtype=np.int32)
    targets_of = np.where(rng.random((NUM_STEPS, B, T)) < 0.1, -1, rng.integers(0, 96, (NUM_STEPS, B, T), dtype=np.int32))

    with jax.set_mesh(single_device_mesh()):
        found = open_pretrained(tmp_path / "peft")
        assert found.adapters is not None
        config = tiny_config(
            model=dataclasses.replace(found.config, compute_dtype="float32", remat="none"),
            adapters=dataclasses.replace(found.adapters, base="float32"),
            init_from="unused",
            optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant", grad_clip_norm=None),
            train=TrainConfig(num_steps=NUM_STEPS, global_batch_size=B),
            mesh=MeshConfig(),
        )
        assert found.base is not None
        state = init_state(config, load_model(found.base, config.model))
        state = with_adapters(state, load_adapters(found, trained_only(state.model)))
        before = {name: np.asarray(array) for name, array in named_arrays(state.model).items()}
        step, ours = jax.jit(partial(train_step, resolved(config))), []
        for of_step, wanted in zip(tokens, targets_of, strict=True):
            ones, places = np.ones_like(of_step), np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
            rows = {"tokens": of_step, "targets": wanted, "segment_ids": ones, "positions": places}
            state, metrics = step(state, to_device(config, rows))
            ours.append(float(metrics["loss"]))
        after = named_arrays(state.model)
    expected = _trained(theirs, tokens, targets_of, config.optimizer)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
    assert abs(expected[-1] - expected[0]) > 1e-3
    for name, array in before.items():
        changed = not np.array_equal(array, np.asarray(after[name]))
        assert changed == names.is_adapter(name), name


def _trained(model: Any, tokens: np.ndarray, targets: np.ndarray, optimizer: OptimizerConfig) -> list[float]:
    """The losses of peft's model while torch trains it."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    betas, decay = (optimizer.b1, optimizer.b2), optimizer.weight_decay
    adamw = torch.optim.AdamW(trained, optimizer.learning_rate, betas, optimizer.eps, decay)
    losses = []
    for of_step, wanted in zip(tokens, targets, strict=True):
        logits = model(torch.from_numpy(of_step).long(), use_cache=False).logits
        wanted = torch.from_numpy(wanted).long().flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted, ignore_index=-1)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return losses
