"""Schedules at their corners, AdamW against the textbook update, decay by name, bfloat16 moments, own optimizers."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.config.training import MOMENTS, Moments, OptimizerConfig
from llamajax.errors import ConfigError
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.mesh import make_mesh
from llamajax.planning import memory
from llamajax.planning.xla.parse import parse
from llamajax.step.optim import DIRECTIONS, decay_mask, learning_rate, make_optimizer, moments, register
from llamajax.step.resolve import resolve_planned
from llamajax.step.state import init_state
from llamajax.step.step import train_step
from tests.planning import compiled
from tests.tiny import random_rows, resolved, single_device_mesh, tiny_config, to_device


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant"])
def test_schedule_warms_up_to_the_peak_and_ends_with_the_run(schedule):
    decay_steps = 20 if schedule == "wsd" else None
    config = OptimizerConfig(
        learning_rate=1e-3, schedule=schedule, warmup_steps=10, decay_steps=decay_steps, min_lr_ratio=0.1
    )
    rate = learning_rate(config, num_steps=100)
    rates = np.asarray(jax.vmap(rate)(jnp.arange(100)))
    np.testing.assert_allclose(rates[:10], 1e-3 * np.arange(1, 11) / 10, rtol=1e-6)
    assert (np.diff(rates[10:]) <= 1e-12).all()
    np.testing.assert_allclose(rates[-1], 1e-3 if schedule == "constant" else 1e-4, rtol=1e-5)


def test_wsd_stays_at_the_peak_until_the_decay():
    config = OptimizerConfig(learning_rate=2.0, schedule="wsd", decay_steps=4, min_lr_ratio=0.2)
    rates = jax.vmap(learning_rate(config, num_steps=10))(jnp.arange(10))
    np.testing.assert_allclose(rates, [2.0] * 6 + [1.6, 1.2, 0.8, 0.4], atol=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_to_nothing_ends_after_the_last_update_as_in_transformers(schedule):
    """Else the last step would learn nothing."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, min_lr_ratio=0.0)
    ours = np.asarray(jax.vmap(learning_rate(config, num_steps=20))(jnp.arange(20)))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = transformers.get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=20)
    expected = []
    for _ in range(20):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert ours[-1] > 0
    assert theirs.get_last_lr()[0] == pytest.approx(0, abs=1e-12)


def test_wsd_decays_to_nothing_after_the_last_update():
    config = OptimizerConfig(learning_rate=2.0, schedule="wsd", decay_steps=4, min_lr_ratio=0.0)
    rates = jax.vmap(learning_rate(config, num_steps=10))(jnp.arange(10))
    np.testing.assert_allclose(rates, [2.0] * 6 + [1.6, 1.2, 0.8, 0.4], atol=1e-6)


def test_cosine_is_half_way_in_the_middle():
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", min_lr_ratio=0.0)
    np.testing.assert_allclose(learning_rate(config, num_steps=100)(50), 0.5, atol=1e-6)


def test_one_update_is_adamw():
    config = OptimizerConfig(learning_rate=0.1, schedule="constant", weight_decay=0.5, b1=0.9, b2=0.95, eps=1e-8)
    optimizer = make_optimizer(config, num_steps=3)
    params: Any = {"w": jnp.array([1.0, -2.0]), "norm": jnp.array([1.0, -2.0])}
    grads = {"w": jnp.array([0.3, 0.01]), "norm": jnp.array([0.3, 0.01])}
    state = optimizer.init(params)
    m, v, w = np.zeros(2), np.zeros(2), {name: np.array(p) for name, p in params.items()}
    for t in (1, 2):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        g = np.array([0.3, 0.01])
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        adam = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        w = {"w": w["w"] - 0.1 * (adam + 0.5 * w["w"]), "norm": w["norm"] - 0.1 * adam}
    np.testing.assert_allclose(params["w"], w["w"], rtol=1e-5)
    np.testing.assert_allclose(params["norm"], w["norm"], rtol=1e-5)


def test_decay_mask_goes_by_name():
    params = {"layers": {"attention_norm": 1, "wqkv": 2, "qkv_bias": 3}, "embedding": 4, "norm": 5}
    assert decay_mask(OptimizerConfig(learning_rate=1.0), params) == {
        "layers": {"attention_norm": False, "wqkv": True, "qkv_bias": False}, "embedding": True, "norm": False,
    }  # fmt: skip


def test_names_that_no_parameter_has_are_refused_but_for_the_default_ones():
    params = {"attention_norm": 1, "wqkv": 2}
    for names in (("norm", "bias"), ("bias",), ("wqkv",), ()):
        decay_mask(OptimizerConfig(learning_rate=1.0, no_weight_decay=names), params)
    for names in (("nrom",), ("norm", "biases")):
        told = rf"^optimizer\.no_weight_decay: {names[-1]} matches no parameter name; .* attention_norm, wqkv$"
        with pytest.raises(ConfigError, match=told):
            decay_mask(OptimizerConfig(learning_rate=1.0, no_weight_decay=names), params)


def test_bfloat16_moments_are_stored_narrow_and_follow_the_float32_ones():
    params = {"w": jax.random.normal(jax.random.key(0), (64,))}
    outcome = {}
    for dtype in ("float32", "bfloat16"):
        config = OptimizerConfig(learning_rate=1e-2, moment_dtype=dtype, schedule="constant")
        optimizer = make_optimizer(config, num_steps=50)
        p: Any = params
        state = optimizer.init(params)
        assert {x.dtype.name for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)} == {dtype}
        for step in range(50):
            grads = {"w": p["w"] + 0.1 * jax.random.normal(jax.random.key(step), (64,))}
            updates, state = optimizer.update(grads, state, p)
            p = optax.apply_updates(p, updates)
        outcome[dtype] = p["w"]
    assert 0 < jnp.abs(outcome["float32"] - outcome["bfloat16"]).max() < 0.02


OWN = {
    "lion": (lambda config: optax.scale_by_lion(config.b1, config.b2), Moments(1, 1)),
    "momentum": (lambda config: optax.trace(config.b1), Moments(1, 1)),
    "signs": (lambda config: optax.scale_by_sign(), Moments(0, 0)),
    "lion_of_layer_matrices": (
        lambda config: optax.partition(
            {True: optax.scale_by_lion(config.b1, config.b2), False: optax.scale_by_adam(config.b1, config.b2)},
            lambda params: jax.tree.map(lambda weight: weight.ndim > 2, params),
        ),
        Moments(1, 2),
    ),
}


@pytest.fixture(
    params=[
        pytest.param("lion", marks=pytest.mark.long),
        pytest.param("momentum", marks=pytest.mark.long),
        pytest.param("signs", marks=pytest.mark.long),
        pytest.param("lion_of_layer_matrices", marks=pytest.mark.slow),
    ]
)
def own(request, monkeypatch) -> str:
    """The name of an optimizer that llamajax does not have."""
    for table in (DIRECTIONS, MOMENTS):
        monkeypatch.setitem(table, request.param, None)  # so that it goes with the test
    register(request.param, *OWN[request.param])
    return request.param


def losses(config) -> list[float]:
    state, found = init_state(config), []
    for step in range(5):
        state, metrics = train_step(resolved(config), state, to_device(config, random_rows(config, step)))
        found.append(float(metrics["loss"]))
    weights = named_arrays(state.model)
    for kept in moments(state.opt_state, state.model):
        for name, moment in kept.items():
            assert moment.sharding == weights[name].sharding
    return found


@functools.cache
def losses_alone(name: str) -> list[float]:
    jax.set_mesh(single_device_mesh())
    return losses(tiny_config(optimizer=OptimizerConfig(name=name, learning_rate=1e-3)))


def test_an_optimizer_of_one_s_own_is_trained_on_every_mesh(own):
    config = tiny_config(optimizer=OptimizerConfig(name=own, learning_rate=1e-3))
    alone = losses_alone(own)
    assert not np.allclose(alone, losses_alone("adamw"), rtol=1e-5)
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, data=2, tensor=2)))
    np.testing.assert_allclose(losses(config), alone, rtol=1e-5)


def test_plans_count_what_an_optimizer_of_one_s_own_keeps(own):
    config = compiled.CONFIG.changed({"optimizer.name": own})
    step = compiled.compiled_step(config)
    planned = memory.memory_plan(step, parse(step.hlo)).by_kind["optimizer"]
    of_layers, of_others = OWN[own][1]
    model, shards = config.model, 8
    layers, norms = model.num_layers * (32 * (32 * 4) + 16 * 4 * 32 + 3 * 32 * 64), (2 * model.num_layers + 1) * 32
    assert planned == 4 * (of_layers * layers // shards + of_others * (2 * 64 * 32 // shards + norms))
    assert memory.estimate(resolve_planned(config)).by_kind["optimizer"] == planned


def test_moment_dtype_is_that_of_moments_alone(monkeypatch):
    """Muon keeps the coefficients of its iteration, too."""

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)

    muon = optax.contrib.scale_by_muon(weight_dimension_numbers=matrices)
    monkeypatch.setitem(DIRECTIONS, "muon", lambda _: muon)
    monkeypatch.setitem(MOMENTS, "muon", Moments(1, 1))
    config = OptimizerConfig(name="muon", learning_rate=1.0, moment_dtype="bfloat16", weight_decay=0.0)
    params: Any = {"w": jnp.eye(3)}
    optimizer = make_optimizer(config, num_steps=3)
    state: Any = optimizer.init(params)
    updates, after = cast("tuple[Any, Any]", optimizer.update(params, state, params))
    assert updates["w"].dtype == jnp.float32
    for kept in (state, after):
        dtypes = {name: x.dtype.name for name, x in named_arrays(kept[0]).items()}
        assert dtypes == {"count": "int32", "mu.w": "bfloat16", "ns_coeffs": "float32"}


def test_moments_are_found_by_shape_and_path():
    params = {"a": jnp.ones(4), "w": jnp.ones((2, 3)), "layers": {"w": jnp.ones(4)}}
    adam = optax.scale_by_adam()
    grads = {"a": 2 * params["a"], "w": params["w"], "layers": {"w": 5 * params["layers"]["w"]}}
    first, second = moments(adam.update(grads, adam.init(params))[1], params)
    for kept, power in ((first, 1), (second, 2)):
        expected = {"a": 2**power, "w": 1, "layers.w": 5**power}
        found = {name: float(moment.mean() / kept["w"].mean()) for name, moment in kept.items()}
        assert found == pytest.approx(expected)
    assert first["layers.w"].shape == (4,)
    assert moments(optax.scale_by_sign().init(params), params) == []
    with pytest.raises(ConfigError, match=r"^name: adam must be one of adamw.*; llamajax\.step\.optim\.register adds"):
        OptimizerConfig(learning_rate=1.0, name="adam")
