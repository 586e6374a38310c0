"""The rules for stages with given numbers of layers."""

import pytest

from llamajax.config.stages import layers_of_stages
from llamajax.errors import ConfigError
from tests.tiny import tiny_config

STAGED = {"model.num_layers": 8, "mesh.pipeline": 2, "mesh.stages": (3, 5), "mesh.fsdp": 4, "parallel.zero": 1}


def test_layers_fill_the_stages_in_order():
    assert layers_of_stages(8, 2, 1, (3, 5)) == [[[0, 1, 2, -1, -1]], [[3, 4, 5, 6, 7]]]
    assert layers_of_stages(8, 2, 1) == layers_of_stages(8, 2, 1, (4, 4))
    assert layers_of_stages(6, 2, 1, (2, 4), dense=(0, 1)) == [[[0, 1, -1, -1, -1, -1]], [[-1, -1, 2, 3, 4, 5]]]


@pytest.mark.parametrize(
    ("changes", "key", "rule"),
    [
        ({"mesh.stages": (3, 4)}, "mesh.stages", "7 layers in 2 stages"),
        ({"parallel.pipeline": "interleaved", "train.grad_accum_steps": 2}, "parallel.pipeline", "set auto"),
        ({"parallel.pipeline_head": "shared"}, "parallel.pipeline_head", "set auto"),
        ({"model.embed_dim": 36}, "model.embed_dim", "stages of unequal layers"),
        (
            {"model.layer_types": ("sliding_attention", "full_attention"), "model.sliding_window": 4},
            "mesh.stages",
            "whole rounds of model.layer_types",
        ),
        ({"parallel.zero": 3}, "parallel.zero", "set 1"),
        (
            {"model.experts.num_experts": 8, "model.experts.first_dense_layers": 7},
            "mesh.pipeline",
            r"2 stages need as many layers, and model.num_layers=8 - 7 dense ones at the beginning",
        ),
        (
            {"mesh.stages": (), "model.embed_dim": 36, "model.experts.num_experts": 8, "model.experts.layer_step": 2},
            "model.embed_dim",
            "stages of layers with and without experts",
        ),
    ],
)
def test_a_broken_rule_is_one_line(changes, key, rule):
    config = tiny_config().changed(STAGED)
    with pytest.raises(ConfigError, match=rf"\A{key}: .*{rule}.*\Z"):
        config.changed(changes)
