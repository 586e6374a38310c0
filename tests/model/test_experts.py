"""Experts compute what their definition says: choices, weights, losses, drops and gradients, on one device and on many."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from llamajax.config.experts import ExpertsConfig
from llamajax.config.layer_weights import MATRICES
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import PLAIN, MeshConfig
from llamajax.model.experts import Experts
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.float8 import E4M3
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.zero import gathered, in_float8
from tests.tiny import single_device_mesh

B, T, D = 8, 12, 16
KINDS = {
    "large": {"num_experts": 4, "top_k": 2, "mlp_dim": 24},
    "shared": {
        "num_experts": 8, "top_k": 3, "mlp_dim": 8, "shared_mlp_dim": 16, "shared_gate": True, "normalize": False,
        "balance_loss": 0.1, "z_loss": 0.1,
    },
    "grouped": {
        "num_experts": 8, "top_k": 2, "mlp_dim": 8, "scores": "sigmoid", "num_groups": 4, "top_groups": 2,
        "weight_scale": 2.5, "bias_update_rate": 0.001, "balance_loss": 0.1, "balance_over": "row",
    },
    "narrow": {"num_experts": 8, "top_k": 4, "mlp_dim": 16, "latent_dim": 8, "gated": False},
    "capacity": {"num_experts": 4, "top_k": 2, "mlp_dim": 8, "capacity_factor": 0.75, "balance_loss": 0.1},
}  # fmt: skip


def model_config(kind: str) -> ModelConfig:
    return ModelConfig(
        vocab_size=32, embed_dim=D, mlp_dim=24, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8,
        compute_dtype="float32", init_std=0.5, experts=ExpertsConfig(**KINDS[kind]),
    )  # fmt: skip


def by_definition(config: ExpertsConfig, w: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Every expert computes every token; what was not chosen gets a weight of zero."""
    logits = x @ w["router"]
    scores = jax.nn.softmax(logits) if config.scores == "softmax" else jax.nn.sigmoid(logits)
    for_choice = scores + w["bias"][None, None] if "bias" in w else scores
    groups = for_choice.reshape(B, T, config.num_groups, -1)
    of_group = jnp.sum(jnp.sort(groups, axis=-1)[..., -2:], axis=-1)
    is_best = of_group >= jnp.sort(of_group, axis=-1)[..., -config.top_groups, None]
    for_choice = jnp.where(is_best[..., None], groups, -1.0).reshape(scores.shape)
    chosen = for_choice >= jnp.sort(for_choice, axis=-1)[..., -config.top_k, None]
    weights = jnp.where(chosen, scores, 0.0)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True) if config.normalize else weights
    taken = chosen
    if config.capacity_factor:
        most = math.ceil(config.capacity_factor * T * config.top_k / config.num_experts)
        taken = chosen & (jnp.cumsum(chosen, axis=1) <= most)
    weights = config.weight_scale * jnp.where(taken, weights, 0.0)
    inner = x @ w["descend"] if "descend" in w else x
    h = jnp.einsum("BTI,EIAF->ABTEF", inner, w["w_gate_up"])
    hidden = jax.nn.silu(h[0]) * h[1] if config.gated else jax.nn.silu(h[0])
    y = jnp.einsum("BTEF,EFI,BTE->BTI", hidden, w["w_down"], weights)
    y = y @ w["ascend"].T if "ascend" in w else y
    if "shared.w_gate_up" in w:
        gate, up = jnp.moveaxis(jnp.einsum("BTD,DAF->BTAF", x, w["shared.w_gate_up"]), 2, 0)
        shared = (jax.nn.silu(gate) * up) @ w["shared.w_down"].T
        y = y + (shared * jax.nn.sigmoid(x @ w["shared_gate"]) if "shared_gate" in w else shared)
    over = (1,) if config.balance_over == "row" else (0, 1)
    shares = jnp.mean(chosen.astype(jnp.float32), over, keepdims=True) / config.top_k
    probabilities = scores / jnp.sum(scores, axis=-1, keepdims=True)
    values = {
        "balance_loss": config.num_experts * jnp.sum(shares * probabilities, axis=-1),
        "router_z_loss": jax.nn.logsumexp(logits, axis=-1) ** 2,
    }
    return y, {name: value for name, value in values.items() if getattr(config, name.removeprefix("router_"))}


@functools.cache
def expected(kind: str) -> Any:
    """Weights, tokens, and the result and gradients of the definition."""
    jax.set_mesh(single_device_mesh())
    config = model_config(kind)
    experts = jax.jit(functools.partial(Experts, config))(jax.random.key(0))
    weights = {name: np.asarray(w) for name, w in named_arrays(experts).items()}
    if "bias" in weights:
        weights["bias"] = np.linspace(-0.3, 0.3, len(weights["bias"]), dtype=np.float32)
    x, d = np.random.default_rng(0).normal(size=(2, B, T, D)).astype(np.float32)

    def loss(w: dict[str, jax.Array], x: jax.Array) -> Any:
        y, values = by_definition(config.experts, w, x)
        return jnp.sum(y * d) + sum(map(jnp.sum, values.values())), (y, values)

    with jax.set_mesh(None):
        (_, results), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(weights, x)
    return weights, x, d, jax.tree.map(np.asarray, (results, gradients))


def mesh_of(axes: dict[str, int]) -> jax.sharding.Mesh:
    """A mesh with axes of these sizes, the others of one."""
    sizes: dict[str, Any] = {"fsdp": 1} | axes
    return make_mesh(MeshConfig(**sizes))


def found(kind: str, mesh: jax.sharding.Mesh, slots: float, float8: DTypeLike | None = None, **forms: Any) -> Any:
    """Results and gradients; `float8` is the format of the matrices that are multiplied in float8."""
    weights, x, d, _ = expected(kind)
    jax.set_mesh(mesh)
    config, parallel = model_config(kind), dataclasses.replace(PLAIN, expert_slots=slots, **forms)
    experts = jax.jit(functools.partial(Experts, config))(jax.random.key(0))
    leaves, tree = jax.tree.flatten(experts)
    placed = [jax.device_put(weights[name], leaf.sharding) for name, leaf in zip(named_arrays(experts), leaves, strict=True)]
    lies = spec("batch", "residual_seq", None)
    x, d = jax.device_put(x, lies), jax.device_put(d, lies)

    @jax.jit
    def run(experts: Experts, x: jax.Array) -> Any:
        rounded = in_float8(experts, MATRICES, float8, jnp.float32, num_stacked=0) if float8 else None

        def loss(experts: Experts, x: jax.Array) -> Any:
            y, values = gathered(experts, jnp.float32, rounded)(x, parallel)
            return jnp.sum(y * d) + sum(map(jnp.sum, values.values())), (y, values)

        (_, results), (d_experts, d_x) = jax.value_and_grad(loss, (0, 1), has_aux=True)(experts, x)
        return results, (named_arrays(d_experts), d_x)

    return run(jax.tree.unflatten(tree, placed), x)


@pytest.mark.parametrize("slots", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_the_definition(kind: str, slots: float):
    same(found(kind, single_device_mesh(), slots), expected(kind)[3])


@pytest.mark.parametrize("slots", [0.5, pytest.param(1.25, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("large", {"expert": 4, "fsdp": 2}),
        ("shared", {"expert": 2, "sequence": 2, "tensor": 2}),
        ("grouped", {"expert": 4, "data": 2}),
        ("narrow", {"expert": 2, "fsdp": 2, "tensor": 2}),
        ("capacity", {"expert": 2, "sequence": 2, "fsdp": 2}),
        pytest.param("capacity", {"tensor": 4, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param("grouped", {"expert": 8, "fsdp": 1}, marks=pytest.mark.slow),
    ],
)
def test_devices_share_the_experts(kind: str, axes: dict[str, int], slots: float):
    same(found(kind, mesh_of(axes), slots), expected(kind)[3])


def ragged_on_cpus(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Does on CPUs what `jax.lax.ragged_all_to_all` does on GPUs. A device receives NaNs from a peer whose number of rows it
    expects wrongly."""
    everyone = functools.partial(jax.lax.all_gather, axis_name=axis_name)
    rows, starts, sizes, places = map(everyone, (operand, input_offsets, send_sizes, output_offsets))
    own, at = jax.lax.axis_index(axis_name), jnp.arange(len(output))
    for peer in range(jax.lax.axis_size(axis_name)):
        offset = at - places[peer, own]
        came = rows[peer, jnp.clip(starts[peer, own] + offset, 0, len(operand) - 1)]
        came = jnp.where(sizes[peer, own] == recv_sizes[peer], came, jnp.nan)
        output = jnp.where(((offset >= 0) & (offset < sizes[peer, own]))[:, None], came, output)
    return output


@pytest.mark.parametrize(
    ("kind", "axes", "slots"),
    [
        ("large", {"expert": 4, "fsdp": 2}, 0.5),
        ("narrow", {"expert": 2, "fsdp": 2, "tensor": 2}, 1.25),
        pytest.param("shared", {"expert": 8, "fsdp": 1}, 0.0, marks=pytest.mark.slow),
    ],
)
def test_filled_rows_may_travel_alone(kind: str, axes: dict[str, int], slots: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_on_cpus)
    same(found(kind, mesh_of(axes), slots, expert_exchange="ragged"), expected(kind)[3])


@pytest.mark.parametrize(
    ("kind", "axes", "slots"),
    [
        ("large", {}, 0.3),
        pytest.param("shared", {"expert": 2, "fsdp": 2, "tensor": 2}, 0.5, marks=pytest.mark.slow),
    ],
)
def test_the_program_of_float8_computes_the_same_where_nothing_is_rounded(kind: str, axes: dict[str, int], slots: float):
    mesh = mesh_of(axes) if axes else single_device_mesh()
    same(found(kind, mesh, slots, "float32"), expected(kind)[3])


@pytest.mark.slow
def test_matrices_in_float8_change_results_by_rounding_alone():
    mesh = make_mesh(MeshConfig(expert=4, fsdp=2))
    ours, truth = (jax.tree.leaves(own) for own in (found("large", mesh, 0.5, E4M3), expected("large")[3]))
    errors = [np.linalg.norm(own - true) / np.linalg.norm(true) for own, true in zip(ours, truth, strict=True)]
    assert max(errors) < 0.12
    assert min(errors) > 1e-3  # and everything is rounded, or computed from what is


def same(found: Any, expected: Any) -> None:
    paths = jax.tree_util.tree_leaves_with_path(expected)
    ours = dict(jax.tree_util.tree_leaves_with_path(found))
    assert ours.keys() == dict(paths).keys()
    for path, truth in paths:
        most = max(1e-6, np.abs(truth).max())
        np.testing.assert_allclose(ours[path], truth, rtol=0, atol=2e-5 * most, err_msg=jax.tree_util.keystr(path))
