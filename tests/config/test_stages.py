"""Rules for the stages of a pipeline, each broken on its own and reported in one line."""

from typing import Any

import pytest

from llamajax.errors import ConfigError
from tests.tiny import tiny_config

PIPELINE = {"mesh.pipeline": 2, "mesh.fsdp": 2, "parallel.zero": 1, "mesh.num_cpu_devices": 4}
CONFIG = tiny_config().changed({"model.num_layers": 8, "train.grad_accum_steps": 4} | PIPELINE)
INTERLEAVED = {"parallel.pipeline": "interleaved"}
RULES: list[tuple[dict[str, Any], str]] = [
    (
        {"parallel.zero": 3},
        "parallel.zero: 3 would gather each stage's weights in all 5 ticks of a step (train.grad_accum_steps=4 +"
        " mesh.pipeline=2 - 1) instead of once; set 1, which still splits weights and optimizer state between steps",
    ),
    ({"parallel.zero": 2}, "parallel.zero: 2 would gather"),
    ({"parallel.stack": "scan"}, "parallel.stack: scan is not a form of a stage's layers; set auto or unrolled"),
    ({"model.num_layers": 1}, "mesh.pipeline: 2 stages need as many layers, and model.num_layers=1; set fewer stages"),
    (
        {"model.num_layers": 3} | INTERLEAVED,
        "mesh.pipeline: 2 stages x 2 chunks per stage need as many layers, and model.num_layers=3; set fewer stages, or",
    ),
    (
        {"parallel.pipeline_chunks": 5} | INTERLEAVED,
        "mesh.pipeline: 2 stages x 5 chunks per stage need as many layers, and model.num_layers=8",
    ),
    (
        {"train.grad_accum_steps": 1} | INTERLEAVED,
        "train.grad_accum_steps: 1 must be a multiple of mesh.pipeline=2 for parallel.pipeline: interleaved; set 2, or 1f1b",
    ),
    (
        {"model.num_layers": 7, "model.embed_dim": 34},
        "model.embed_dim: 34 must be divisible by mesh.pipeline=2 x mesh.fsdp=2 for 2 stages that do not divide 7 layers",
    ),
    (
        {"model.num_layers": 6, "model.sliding_window": 4, "model.layer_types": ("sliding_attention", "full_attention")},
        "mesh.pipeline: 2 stages of 3 layers do not hold whole rounds of model.layer_types, which repeat every 2 layers",
    ),
    ({"parallel.pipeline": "1f1b", "parallel.pipeline_chunks": 2}, "parallel.pipeline_chunks: 2 has no effect with"),
    ({"parallel.pipeline_chunks": 1} | INTERLEAVED, "parallel.pipeline_chunks: 1 is not interleaved; set 2 or more"),
]


@pytest.mark.parametrize(("changes", "line"), RULES, ids=[line.partition(" for ")[0][:40] for _, line in RULES])
def test_a_broken_rule_is_one_line(changes, line):
    with pytest.raises(ConfigError) as error_info:
        CONFIG.changed(changes)
    (told,) = str(error_info.value).splitlines()
    assert told.startswith(line)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.num_layers": 7},
        {"model.num_layers": 5} | INTERLEAVED,
        {"parallel.pipeline_chunks": 4} | INTERLEAVED,
        {"train.grad_accum_steps": 1},
        {"model.sliding_window": 4, "model.layer_types": ("sliding_attention", "full_attention")},
        {"mesh.pipeline": 1, "mesh.fsdp": 4, "parallel.zero": 3} | INTERLEAVED,
    ],
    ids=str,
)
def test_what_the_rules_allow(changes):
    assert not CONFIG.changed(changes).problems()
