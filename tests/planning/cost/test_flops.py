"""FLOPs of a step; the golden plans contain them too."""

import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.kernels import choice
from llamajax.planning.cost.flops import planned_flops
from llamajax.step.resolve import resolve_planned
from tests.planning.plans import CONFIG


def test_a_ring_computes_hardly_more_than_half_of_the_scores():
    run = CONFIG.changed({"mesh": MeshConfig(fsdp=-1, sequence=4), "model.attention_kernel": "plain"})
    whole, in_ring = (
        planned_flops(resolve_planned(run.changed({"parallel.sequence": form}))).attention for form in ("gather", "ring")
    )
    assert in_ring == whole * (4 * 4 - (4 * 3) // 2 - 1) / (4 * 4)


@pytest.mark.parametrize("kernel", ["cudnn", "pallas", "tokamax"])
def test_only_full_attends_again(monkeypatch, kernel):
    """A forward pass is two products, of 7 of cuDNN's and 9 of llamajax's own and of tokamax's."""
    monkeypatch.setattr(choice, "_missing", lambda: None)
    run = CONFIG.changed({"model.attend_across_documents": True, "model.attention_kernel": kernel, "mesh": MeshConfig()})
    none, kept, full = (
        planned_flops(resolve_planned(run.changed({"model.remat": policy}))).attention
        for policy in ("none", "save_attention", "full")
    )
    assert kept == none
    assert full == pytest.approx(none * {"cudnn": 9 / 7, "pallas": 11 / 9, "tokamax": 11 / 9}[kernel], rel=0.01)


def test_idle_stages_compute_what_nobody_counts():
    """Four stages of two layers, eight micro-batches: 11 ticks forward and 13 backward, 9 of the head; it on all stages."""
    base = CONFIG.changed({"mesh": MeshConfig(pipeline=4, fsdp=-1), "parallel.zero": 1, "model.num_layers": 8})
    base = base.changed({"model.remat": "none", "train.grad_accum_steps": 8, "parallel.pipeline": "1f1b"})
    model, tokens = base.model, 32 * 1024
    head = 6 * model.vocab_size * model.embed_dim * tokens
    run = resolve_planned(base.changed({"parallel.pipeline_head": "last"}))
    flops = planned_flops(run)
    layers = flops.weights - head
    attention = flops.attention * (2 / 7 * 11 + 5 / 7 * 13) / 8
    executed = layers * (1 / 3 * 11 + 2 / 3 * 13) / 8 + attention
    assert flops.idle == pytest.approx(executed - layers - flops.attention + (4 * 9 / 8 - 1) * head)
    shared = planned_flops(resolve_planned(base.changed({"parallel.pipeline_head": "shared"})))
    assert shared.idle == pytest.approx(flops.idle - 3 * 9 / 8 * head)
    assert shared.total == flops.total
    uneven = planned_flops(resolve_planned(base.changed({"parallel.pipeline_head": "shared", "model.num_layers": 7})))
    assert uneven.idle > shared.idle
    assert planned_flops(resolve_planned(CONFIG)).idle == 0
