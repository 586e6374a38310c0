"""The same numbers on every mesh with experts: losses, gradients, weights and biases equal those of a single device, step
after step, whatever a device sends at once, in how many parts, and where layers have none."""

from typing import Any

import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel.mesh import make_mesh
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
CASES = [
    ("fine", {"expert": 4, "fsdp": 2}, {"parallel.stack": "prefetch", "model.remat": "full"} | TURNS | SLOTS, ""),
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
]


@pytest.mark.parametrize(
    ("kind", "axes", "forms"),
    [pytest.param(*case, marks=getattr(pytest.mark, mark) if mark else ()) for *case, mark in CASES],
)
def test_steps_equal_those_of_one_device(kind, axes, forms):
    own = {"model.num_layers": 4 if kind == "every other" else 2} | {
        f"model.experts.{name}": x for name, x in KINDS[kind].items()
    }
    config = tiny_config().changed(ROUNDED | own)
    mesh = make_mesh(MeshConfig(**{"fsdp": 1} | axes))
    expected = reference(config)
    placed = config.changed(forms | {f"mesh.{axis}": size for axis, size in ({"fsdp": 1} | axes).items()})
    for step, (ours, theirs) in enumerate(zip(run_steps(placed, mesh), expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-5, err_msg=f"step {step}: {name}")
