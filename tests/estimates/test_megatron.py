"""Megatron-LM's formulas against FLOPs counted product by product."""

import pytest

from llamajax.estimates.megatron import hardware_flops, model_flops


def test_the_formulas_count_every_product():
    """A GPT's layer: 12 h^2 parameters and scores; forward 2 FLOPs each, backward 4; recomputed forward again."""
    B, s, L, h, v = 4, 128, 3, 64, 1000
    layer, scores, logits = 2 * B * s * 12 * h**2, 2 * 2 * B * s * s * h, 2 * B * s * h * v
    sizes = {"sequences": B, "seq_len": s, "num_layers": L, "embed_dim": h, "vocab_size": v}
    assert hardware_flops(**sizes) == pytest.approx(4 * L * (layer + scores) + 3 * logits)
    assert model_flops(**sizes) == pytest.approx(3 * L * (layer + scores) + 3 * logits)
