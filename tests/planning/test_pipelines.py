"""Plans of pipelines: the bytes and the memory of a compiled step, against formulas."""

import dataclasses
from typing import Any

import pytest

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig, ParallelConfig
from llamajax.config.training import TrainConfig
from llamajax.estimates.communication import least_wire_bytes, pipeline_bytes
from llamajax.estimates.formulas import minimum_state_bytes
from llamajax.planning.memory import estimate
from llamajax.planning.plan import planned
from llamajax.step.resolve import resolve_planned
from tests.tiny import tiny_config

CONFIG = tiny_config(
    model=ModelConfig(
        vocab_size=32000, embed_dim=2048, mlp_dim=5632, num_layers=8, num_heads=16, num_kv_heads=8, head_dim=128,
        attend_across_documents=True, remat="save_attention_qkv",
    ),
    data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=2048),
    train=TrainConfig(num_steps=100, global_batch_size=16, grad_accum_steps=8),
    mesh=MeshConfig(pipeline=4, fsdp=2, tensor=2),
    parallel=ParallelConfig(zero=1),
    hardware=HardwareConfig(gpu="a100-80gb", nodes=2),
)  # fmt: skip
"""Eight layers of 1B on two nodes."""

FORMS: dict[str, dict[str, Any]] = {
    "stages": {},
    "the last stage computes the head": {"parallel.pipeline_head": "last"},
    "seven layers": {"model.num_layers": 7},
    "chunks": {"parallel.pipeline": "interleaved", "parallel.pipeline_chunks": 2},
    "replicas": {"mesh.data": 2, "mesh.fsdp": 1},
    "whole inputs": {"model.remat": "full"},
}


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("form", FORMS)
def test_it_sends_and_keeps_what_the_formulas_say(form):
    config = CONFIG.changed(FORMS[form])
    run = resolve_planned(config)
    schedule = planned(config)
    sent: dict[str, float] = {}
    for use in schedule.timeline.collectives:
        of = use.collective
        for axis in {of.axis, "all"}:
            sent[f"{of.kind} {axis}"] = sent.get(f"{of.kind} {axis}", 0) + use.count * sum(of.wire_bytes.values())
    expected = pipeline_bytes(run.config, run.mesh)
    print(form, schedule.step.compile_s)
    for k, v in sent.items():
        print("  ", k, v)
    print(expected)
    print(sum(schedule.timeline.wire_bytes.values()) / least_wire_bytes(run.config, run.mesh))
    print(schedule.memory.argument_bytes / minimum_state_bytes(config))
    e = estimate(run)
    print(
        {k: (round(v / 2**20, 1), round(schedule.memory.by_kind[k] / 2**20, 1)) for k, v in e.by_kind.items()},
        e.peak_bytes / schedule.memory.peak_bytes,
    )
