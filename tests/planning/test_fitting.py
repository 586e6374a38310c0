"""Changes for a plan that does not fit: the candidates by formula, and their price."""

from types import SimpleNamespace
from typing import Any

import pytest

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.estimates.formulas import flops_per_token, num_matmul_params
from llamajax.planning.cost.flops import planned_flops
from llamajax.planning.fitting import ESTIMATE_MARGIN, candidates, suggestions
from llamajax.planning.memory import estimate
from llamajax.step.resolve import resolve_planned
from tests.tiny import tiny_config

LLAMA_8B = tiny_config(
    model=ModelConfig(
        vocab_size=128256, embed_dim=4096, mlp_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        max_seq_len=8192, remat="none",
    ),
    data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=8192),
    train=TrainConfig(num_steps=100, global_batch_size=128, grad_accum_steps=4),
    optimizer=OptimizerConfig(learning_rate=1e-4),
    mesh=MeshConfig(data=2, fsdp=4),
    hardware=HardwareConfig(gpu="h100"),
)  # fmt: skip


def test_candidates_fit_by_the_formulas_and_are_valid():
    assert not estimate(resolve_planned(LLAMA_8B)).fits
    offers = list(candidates(LLAMA_8B))
    assert len(offers) >= 3
    for offer in offers:
        assert offer.config == LLAMA_8B.changed(offer.changes)
        assert offer.config.placement_problems(offer.config.hardware.num_devices) == []
        assert expected_to_fit(offer.config)
    assert len({tuple(offer.changes.items()) for offer in offers}) == len(offers)


def expected_to_fit(config) -> bool:
    expected = estimate(resolve_planned(config))
    return expected.peak_bytes <= ESTIMATE_MARGIN * expected.budget_bytes


def test_what_is_enough_alone_comes_first_and_in_no_pair():
    offers = [offer.changes for offer in candidates(LLAMA_8B)]
    assert offers[0].keys() == {"model.remat"}
    pairs = [changes for changes in offers if changes.keys() == {"model.remat", "train.grad_accum_steps"}]
    assert len(pairs) == 1
    for key, value in pairs[0].items():
        assert not expected_to_fit(LLAMA_8B.changed({key: value}))


def test_where_a_ring_does_not_fit_another_form_of_split_rows_is_tried_before_all_else():
    """The three need about the same by formula: the excess of the ring says nothing about the others."""
    ring = LLAMA_8B.changed({
        "mesh.data": 1, "mesh.fsdp": 1, "mesh.sequence": 8, "model.remat": "full", "parallel.sequence": "ring",
        "train.global_batch_size": 4,
    })  # fmt: skip
    tried = []

    def compiled(config) -> Any:
        tried.append(config.parallel.sequence)
        needed = 40 if config.parallel.sequence == "gather" else 100
        return SimpleNamespace(fits=needed <= 80, peak_bytes=needed * 2**30), 1.0

    memory, _ = compiled(ring)
    assert not memory.fits
    first, *_ = suggestions(ring, memory, compiled=compiled)
    assert first.candidate.changes == {"parallel.sequence": "gather"}
    assert tried[:3] == ["ring", "ulysses", "gather"]
    assert not any("parallel.sequence" in offer.changes for offer in candidates(LLAMA_8B))


@pytest.mark.parametrize("kernel", ["plain", "cudnn", "pallas"])
def test_recomputation_has_its_price(kernel):
    policies = ("none", "save_attention_qkv_mlp", "save_attention_qkv", "save_attention", "full")
    base = LLAMA_8B.changed({"model.attend_across_documents": True, "model.attention_kernel": kernel})
    flops = [planned_flops(resolve_planned(base.changed({"model.remat": policy}))).total for policy in policies]
    assert flops == sorted(flops)
    assert len(set(flops)) == 4  # what is added up behind attention is kept, so that no output projection is left to repeat
    # Seven products of queries with keys or of weights with values, where the formula counts six causal ones.
    tokens, weights = 128 * 8192, 6 * num_matmul_params(LLAMA_8B.model)
    attention = flops_per_token(LLAMA_8B.model, 8192, full_attention=kernel == "plain") - weights
    # llamajax's own kernels take nine, of whole tiles.
    products = 9 * (1 + 128 / 8192) if kernel == "pallas" else 7
    assert flops[0] == pytest.approx((weights + products / 6 * attention) * tokens, rel=1e-3)
    # All but the head and the last matmul of the MLP once more.
    assert 1.2 < flops[-1] / flops[0] < 4 / 3


def test_what_is_computed_follows_from_the_kernel():
    fused = LLAMA_8B.changed({"model.attend_across_documents": True, "model.sliding_window": 1024})
    model, tokens = LLAMA_8B.model, 128 * 8192
    product = 2 * model.num_layers * model.num_heads * model.head_dim * tokens
    plain = fused.changed({"model.attention_kernel": "plain"})
    of_fused, of_plain = (planned_flops(resolve_planned(config)) for config in (fused, plain))
    assert of_fused.attention == pytest.approx(7 * product * (1024 - 1024**2 / 8192 / 2))
    assert of_plain.attention == 7 * product * 8192  # as it is computed: all scores, then masked
    assert of_plain.weights == of_fused.weights == 6 * num_matmul_params(model) * tokens
