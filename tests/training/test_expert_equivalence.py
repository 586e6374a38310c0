"""The same numbers on every mesh with experts: losses, gradients, weights and biases equal those of a single device, step
after step, whatever a device sends at once, in how many parts, and where layers have none."""

import random
from typing import Any

import numpy as np
import pytest

from llamajax.config.parallel import AXES, MeshConfig
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.parallel.mesh import make_mesh
from llamajax.step.resolve import resolve
from tests.tiny import tiny_config
from tests.training.test_mesh_equivalence import ROUNDED, reference, run_steps

KINDS: dict[str, dict[str, Any]] = {
    "fine": {"num_experts": 16, "top_k": 4, "mlp_dim": 16, "balance_loss": 0.1, "z_loss": 0.01, "bias_update_rate": 0.01},
    "large": {
        "num_experts": 8, "top_k": 2, "mlp_dim": 32, "shared_mlp_dim": 32, "shared_gate": True, "balance_loss": 0.1,
        "balance_over": "row", "scores": "sigmoid", "num_groups": 4, "top_groups": 2, "weight_scale": 2.5,
    },
    "narrow": {
        "num_experts": 16, "top_k": 4, "mlp_dim": 32, "latent_dim": 16, "gated": False, "capacity_factor": 1.0,
        "z_loss": 0.01,
    },
    "first dense": {"num_experts": 8, "top_k": 2, "mlp_dim": 32, "first_dense_layers": 1},
    "every other": {"num_experts": 8, "top_k": 2, "mlp_dim": 32, "layer_step": 2},
}  # fmt: skip
SLOTS = {"parallel.expert_slots": 0.5}
"""So few that a further round takes what the first cannot."""
TURNS = {"parallel.expert_parts": 2}
FORMS: dict[str, list[Any]] = {
    "parallel.stack": ["scan", "prefetch", "unrolled"],
    "parallel.zero": [1, 2, 3],
    "parallel.zero_data": [0, 1],
    "parallel.grad_reduce": ["micro", "step"],
    "parallel.sequence": ["gather", "ring", "ulysses"],
    "parallel.tensor": ["collective", "ring"],
    "parallel.expert_slots": [0.0, 0.3, 0.7],
    "parallel.expert_parts": [1, 2, 3, 4],
    "parallel.pipeline": ["1f1b", "interleaved"],
    "parallel.pipeline_head": ["shared", "last"],
    "train.grad_accum_steps": [1, 2, 4, 8],
    "model.remat": ["none", "full", "save_attention", "save_attention_qkv", "save_attention_qkv_mlp"],
}
CASES = [
    ("fine", {"expert": 4, "fsdp": 2}, {"parallel.stack": "prefetch", "model.remat": "full"} | TURNS | SLOTS, "slow"),
    (
        "narrow",
        {"expert": 2, "fsdp": 2, "tensor": 2},
        {"parallel.stack": "prefetch", "model.remat": "save_attention_qkv_mlp"},
        "",
    ),
    ("large", {"pipeline": 2, "expert": 2, "fsdp": 2}, {"parallel.zero": 1, "train.grad_accum_steps": 4}, "slow"),
    (
        "fine",
        {"expert": 8, "fsdp": 1},
        {"parallel.stack": "unrolled", "model.remat": "save_attention_qkv_mlp"} | TURNS,
        "slow",
    ),
    ("large", {"expert": 2, "sequence": 2, "tensor": 2}, {"parallel.stack": "prefetch"} | SLOTS, "slow"),
    ("narrow", {"expert": 2, "data": 2, "fsdp": 2}, {"parallel.zero": 2, "train.grad_accum_steps": 2}, "slow"),
    ("first dense", {"expert": 4, "fsdp": 2}, {"parallel.stack": "prefetch", "train.grad_accum_steps": 2} | TURNS, "slow"),
    (
        "every other",
        {"expert": 2, "fsdp": 2, "tensor": 2},
        {"parallel.stack": "prefetch", "model.remat": "full"} | TURNS,
        "slow",
    ),
    ("fine", {"expert": 2, "data": 4, "fsdp": 1}, {"parallel.zero_data": 1, "parallel.stack": "prefetch"} | SLOTS, "long"),
    ("narrow", {"pipeline": 2, "tensor": 2, "fsdp": 2}, {"parallel.zero": 1, "train.grad_accum_steps": 4} | TURNS, "slow"),
    (
        "large",
        {"pipeline": 2, "expert": 4, "fsdp": 1},
        {"parallel.zero": 1, "train.grad_accum_steps": 2} | SLOTS | TURNS,
        "long",
    ),
    (
        "large",
        {"expert": 4, "fsdp": 2},
        {"parallel.zero": 1, "train.grad_accum_steps": 2, "parallel.stack": "unrolled"},
        "long",
    ),
    ("narrow", {"tensor": 4, "fsdp": 2}, {"parallel.tensor": "ring", "parallel.stack": "prefetch"}, "long"),
    ("narrow", {"expert": 2, "sequence": 4, "fsdp": 1}, {"parallel.sequence": "ring", "parallel.stack": "prefetch"}, "long"),
    (
        "large",
        {"expert": 2, "sequence": 2, "fsdp": 2},
        {"parallel.sequence": "ulysses", "model.remat": "full"} | TURNS,
        "long",
    ),
    ("first dense", {"fsdp": 2, "expert": 2, "sequence": 2}, {"parallel.zero": 2, "parallel.stack": "unrolled"}, "long"),
    (
        "every other",
        {"data": 2, "fsdp": 2, "expert": 2},
        {"parallel.grad_reduce": "step", "train.grad_accum_steps": 2},
        "long",
    ),
    (
        "first dense",
        {"pipeline": 2, "expert": 2, "fsdp": 2},
        {"parallel.zero": 1, "train.grad_accum_steps": 4} | TURNS,
        "slow",
    ),
    (
        "every other",
        {"pipeline": 2, "expert": 2, "tensor": 2},
        {"parallel.zero": 1, "train.grad_accum_steps": 4, "model.remat": "full"} | SLOTS,
        "long",
    ),
    (
        "first dense",
        {"pipeline": 2, "expert": 2, "data": 2},
        {
            "parallel.zero": 1,
            "train.grad_accum_steps": 4,
            "parallel.pipeline": "interleaved",
            "parallel.pipeline_chunks": 2,
            "model.num_layers": 5,
        },
        "long",
    ),
]


@pytest.mark.parametrize(
    ("kind", "axes", "forms"),
    [pytest.param(*case, marks=getattr(pytest.mark, mark) if mark else ()) for *case, mark in CASES],
)
def test_steps_equal_those_of_one_device(kind, axes, forms):
    check(kind, {"fsdp": 1} | axes, forms)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_drawn_forms_equal_one_device(seed):
    """Meshes of eight devices, each with settings that nobody chose."""
    check(*drawn(random.Random(seed)))


def check(kind: str, axes: dict[str, int], forms: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {**axes}
    config, mesh = config_of(kind), make_mesh(MeshConfig(**sizes))
    # The balance loss of "fine" counts the choices of a micro-batch.
    of_model = "model.num_layers", *(["train.grad_accum_steps"] if kind == "fine" else [])
    expected = reference(config.changed({key: forms[key] for key in of_model if key in forms}))
    placed = placed_on(config, axes, forms)
    for step, (ours, theirs) in enumerate(zip(run_steps(placed, mesh), expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(
                ours[name], theirs[name], rtol=1e-6, atol=1e-5, err_msg=f"{kind} {axes} {forms}, step {step}: {name}"
            )


def config_of(kind: str) -> Config:
    own = {f"model.experts.{name}": x for name, x in KINDS[kind].items()}
    return tiny_config().changed(ROUNDED | own | {"model.num_layers": {"first dense": 3, "every other": 4}.get(kind, 2)})


def placed_on(config: Config, axes: dict[str, int], forms: dict[str, Any]) -> Config:
    return config.changed(forms | {f"mesh.{axis}": size for axis, size in axes.items()})


def drawn(rng: random.Random) -> tuple[str, dict[str, int], dict[str, Any]]:
    """A model, a mesh with tokens that travel, and forms that the two allow."""
    while True:
        kind, axes = rng.choice(list(KINDS)), dict.fromkeys(AXES, 1)
        for _ in range(3):
            axes[rng.choice(("expert", "pipeline", *AXES))] *= 2
        forms = {key: rng.choice(values) for key, values in FORMS.items() if rng.random() < 0.7}
        try:
            resolve(placed_on(config_of(kind), axes, forms), axes)
        except ConfigError:
            continue
        if axes["expert"] > 1:
            return kind, axes, forms
