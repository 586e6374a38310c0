"""Plans of pipelines: the bytes, memory and FLOPs of a compiled step, against formulas; ticks in the report."""

import io
from collections import Counter
from typing import Any

import pytest
from rich.console import Console

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig, ParallelConfig
from llamajax.config.training import TrainConfig
from llamajax.estimates.communication import least_wire_bytes, pipeline_bytes
from llamajax.estimates.formulas import minimum_state_bytes
from llamajax.estimates.pipeline import StageWork
from llamajax.planning.memory import estimate
from llamajax.planning.plan import Plan, planned
from llamajax.planning.report import figures, picture, text
from llamajax.step.resolve import resolve_planned
from llamajax.watch import console
from tests.tiny import tiny_config

CONFIG = tiny_config(
    model=ModelConfig(
        vocab_size=32000, embed_dim=2048, mlp_dim=5632, num_layers=4, num_heads=16, num_kv_heads=8, head_dim=128,
        attend_across_documents=True, remat="save_attention_qkv",
    ),
    data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=2048),
    train=TrainConfig(num_steps=100, global_batch_size=16, grad_accum_steps=8),
    mesh=MeshConfig(pipeline=4, fsdp=2, tensor=2),
    parallel=ParallelConfig(zero=1),
    hardware=HardwareConfig(gpu="a100-80gb", nodes=2),
)  # fmt: skip
"""Four layers of 1B on two nodes."""

DENSE = "a dense layer before experts"
FORMS: dict[str, dict[str, Any]] = {
    "shared head": {"parallel.pipeline_head": "shared"},
    "the last stage's head": {"parallel.pipeline_head": "last"},
    "seven layers": {"model.num_layers": 7},
    "chunks": {"parallel.pipeline": "interleaved", "parallel.pipeline_chunks": 2, "model.num_layers": 8},
    "replicas": {"mesh.data": 2, "mesh.fsdp": 1},
    "layers' inputs kept": {"model.remat": "full"},
    DENSE: {
        "model.num_layers": 5, "model.experts.num_experts": 8, "model.experts.mlp_dim": 1536,
        "model.experts.first_dense_layers": 1, "mesh.expert": 2, "mesh.fsdp": 1, "model.remat": "full",
    },
}  # fmt: skip


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow if form == "shared head" else pytest.mark.long) for form in FORMS]
)
def test_it_sends_keeps_and_computes_what_the_formulas_say(form, monkeypatch):
    config = CONFIG.changed(FORMS[form] | {"xla.latency_profile": None})
    run, schedule = resolve_planned(config), planned(config)
    timeline, memory = schedule.timeline, schedule.memory
    work, expected = StageWork.of(run.config, run.mesh), pipeline_bytes(run.config, run.mesh)
    sent: Counter[str] = Counter()
    for use in timeline.collectives:
        sent[f"{use.collective.kind} {use.collective.axis}"] += int(use.count * sum(use.collective.wire_bytes.values()))
    assert not timeline.not_understood
    assert sent["collective-permute pipeline"] == expected["permutes"]
    # Routers stay in float32, and no dense layer has one.
    assert sent["all-to-all pipeline"] == pytest.approx(expected["layers"], rel=2e-4 if form == DENSE else 0)
    if form == "shared head":
        assert sent["all-gather pipeline"] + sent["reduce-scatter pipeline"] == expected["head"]
    # In this small model the gradients of embedding and head weigh more, and XLA reduces them to all stages.
    assert 0.99 < sum(timeline.wire_bytes.values()) / least_wire_bytes(run.config, run.mesh) < 1.12
    for use in timeline.collectives:
        assert (use.collective.link == "inter_node") == ("pipeline" in use.collective.axis)

    assert memory.argument_bytes == pytest.approx(minimum_state_bytes(config), rel=0.01)
    assert memory.peak_bytes == pytest.approx(estimate(run).peak_bytes, rel=0.25)
    names = {tensor.name for tensor in memory.tensors}
    assert f"hidden states of {work.slots} micro-batches" in names
    assert any("gradient of layers/mlp/w_gate_up" in name for name in names)  # sums; replicas store what they compute with
    assert "step while" not in {tensor.name for tensor, _ in memory.largest(8)}

    told = figures.figures(Plan(config=config, guessed=schedule, informed=None))
    # A replay takes every condition as true: with chunks also of ticks without a loss.
    assert told["flops_factor"] == pytest.approx(1, abs=0.12 if form == "chunks" else 0.03)
    assert told["pipeline"]["ticks"] == {"fill": work.fill, "both": work.both, "drain": work.drain}
    seconds = told["pipeline"]["tick_s"]
    assert seconds["fill"] < seconds["drain"] < seconds["both"]
    assert sum(count * seconds[name] for name, count in told["pipeline"]["ticks"].items()) < told["step_time_s"]
    file = io.StringIO()
    monkeypatch.setattr(console, "CONSOLE", Console(file=file, width=200, highlight=False))
    plan = Plan(config=config, guessed=schedule, informed=None)
    text.print_plan(plan, told)
    assert f"ticks      {work.fill} fill the pipeline (" in file.getvalue()
    assert f"{work.layers} layers, values of {work.slots} micro-batches; waits for" in file.getvalue()
    page = picture.page(plan, told)
    assert f"One tick that fills the pipeline: {seconds['fill'] * 1e3:.3g} ms, {work.fill} times" in page
    assert '<rect class="collective-permute"' in page


@pytest.mark.long
@pytest.mark.usefixtures("gpu_compiler")
def test_memory_does_not_grow_with_the_micro_batches():
    few, many = (
        planned(CONFIG.changed({"train.grad_accum_steps": m, "train.global_batch_size": 2 * m})).memory.peak_bytes
        for m in (32, 128)
    )
    assert many == pytest.approx(few, rel=0.01)
