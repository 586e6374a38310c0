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
