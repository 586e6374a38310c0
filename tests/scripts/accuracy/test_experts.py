"""The models that the comparison trains have the sizes that it says."""

import argparse

import pytest

from llamajax.estimates.formulas import num_active_params, num_params
from scripts.accuracy import experts


@pytest.mark.parametrize(("num_experts", "top_k"), [(16, 4), (64, 8)])
def test_experts_are_of_one_size_and_bigmac_and_the_dense_model_have_equal_active_parameters(tmp_path, num_experts, top_k):
    """But for routers, with their biases, and for less than one number of the dense model's hidden layers."""
    args = argparse.Namespace(
        experts=num_experts, top_k=top_k, steps=200, rows=16, learning_rate=1e-3, warmup=20, init_std=0.02
    )
    models = {name: experts.config_of(name, args, 0, tmp_path).model for name in experts.MODELS}
    active = {name: num_active_params(model) for name, model in models.items()}
    layers, routers = models["dense"].num_layers, (experts.WIDTH + 1) * num_experts
    assert active["BigMac"] == active["fine-grained"] + layers * 2 * experts.WIDTH * experts.LATENT
    assert 0 <= active["BigMac"] - active["dense"] - layers * routers < layers * 3 * experts.WIDTH
    assert num_params(models["fine-grained"]) > 2 * active["fine-grained"]


def test_a_table_has_a_row_for_every_run():
    rows = [{"model": "dense", "seed": 1, "parameters": 1205184, "active": 1205184, "loss": 4.3087, "held_out_loss": 4.69}]
    assert experts.table(rows).splitlines()[1] == "dense             1   1,205,184  1,205,184   4.3087    4.6900"
