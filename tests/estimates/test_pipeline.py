"""A pipeline's stages by hand: layers, ticks, what they keep, store and send."""

import dataclasses
from typing import Any

import pytest

from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig, ParallelConfig
from llamajax.config.run import Config
from llamajax.config.stages import layers_of_stages
from llamajax.config.training import TrainConfig
from llamajax.estimates.communication import least_wire_bytes, pipeline_bytes
from llamajax.estimates.device_memory import expected_bytes
from llamajax.estimates.formulas import mesh_sizes, minimum_state_bytes, num_params, state_bytes
from llamajax.estimates.pipeline import StageWork
from llamajax.parallel.pipeline_schedule import DELAY, PipelineSchedule
from tests.tiny import tiny_config

MODEL = ModelConfig(
    vocab_size=1000, embed_dim=64, mlp_dim=256, num_layers=8, num_heads=8, num_kv_heads=8, head_dim=8, remat="full",
    compute_dtype="float32",
)  # fmt: skip
LAYER, TABLE = 4 * 64 * 64 + 3 * 64 * 256, 1000 * 64
"""Numbers of a layer's matrices and of the embedding."""


def staged(**changes: Any) -> Config:
    config = tiny_config(
        model=MODEL,
        mesh=MeshConfig(pipeline=4, fsdp=2),
        hardware=HardwareConfig(gpu="h100"),
        parallel=ParallelConfig(zero=1, pipeline="1f1b", pipeline_chunks=1, pipeline_head="last", stack="unrolled"),
        train=TrainConfig(num_steps=10, global_batch_size=32, grad_accum_steps=16),
    )
    return config.changed(changes)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(4, 16, 1), (8, 8, 1), (4, 8, 2), (2, 4, 4)])
def test_ticks_and_slots_are_those_of_the_schedule(stages, micro_batches, chunks):
    work = StageWork(stages=stages, chunks=chunks, micro_batches=micro_batches, num_layers=30)
    schedule = PipelineSchedule(stages, micro_batches, chunks)
    assert (work.units, work.fill, work.slots, work.delay) == (schedule.units, schedule.fill, schedule.slots, DELAY)
    assert work.fill + work.both + work.drain == schedule.ticks
    ticks = range(schedule.ticks)
    for stage in range(stages):
        assert sum(bool(schedule.forward(tick, stage).is_valid) for tick in ticks[: work.forward_passes]) == work.units
        assert sum(bool(schedule.backward(tick, stage).is_valid) for tick in ticks[work.fill :]) == work.units
    held = layers_of_stages(30, stages, chunks)
    assert work.layers_per_chunk == len(held[0][0])
    assert work.layers == sum(map(len, held[0]))


def test_one_stage_is_no_pipeline():
    work = StageWork(stages=1, chunks=1, micro_batches=5, num_layers=7)
    assert (work.layers, work.slots, work.fill, work.both, work.drain, work.bubble, work.exchanges) == (7, 1, 0, 5, 0, 0, 0)


def test_unequal_stages_take_as_many_layers_as_the_largest():
    work = StageWork(stages=2, chunks=1, micro_batches=4, num_layers=48, counts=(26, 22))
    held = layers_of_stages(48, 2, 1, (26, 22))
    assert work.layers == len(held[0][0]) == 26
    assert work.exchanges == 2
    assert dataclasses.replace(work, counts=(24, 24)).exchanges == 0


def test_dense_layers_before_experts_take_a_slot_of_every_stage():
    work = StageWork(stages=4, chunks=1, micro_batches=8, num_layers=28, dense=(0,))
    assert (work.slots_of("dense_layers"), work.slots_of("layers"), work.layers) == (1, 7, 8)
    assert work.exchanges == 1
    alone = dataclasses.replace(work, stages=1)
    assert (alone.slots_of("dense_layers"), alone.slots_of("layers")) == (1, 27)


def test_a_pipeline_waits_for_a_stage_less_than_it_has():
    work = StageWork(stages=35, chunks=1, micro_batches=240, num_layers=105)
    assert work.bubble == pytest.approx((34 + 36) / 2 / 240)
    half = dataclasses.replace(work, chunks=3, micro_batches=280)
    assert half.bubble == pytest.approx((34 + 36) / 2 / 840)


def test_stages_share_the_state():
    """Layers by stage, or by columns; embedding and head where stages and shards divide their width."""
    run = staged()
    norms = 2 * 64
    assert minimum_state_bytes(run) == 12 * ((8 * LAYER + 2 * TABLE) // 8 + 8 * norms // 4 + 64)
    assert minimum_state_bytes(run.changed({"model.num_layers": 7})) == 12 * ((7 * LAYER + 2 * TABLE) // 8 + 7 * norms + 64)
    assert state_bytes(run) == 12 * num_params(run.model)
    wide = staged(**{"model.embed_dim": 68, "mesh.fsdp": 4, "mesh.pipeline": 2, "train.grad_accum_steps": 8})
    tables = 2 * 1000 * 68
    layers = 8 * (4 * 68 * 64 + 3 * 68 * 256)
    assert minimum_state_bytes(wide) == 12 * (layers // 8 + tables // 4 + 8 * 2 * 68 // 2 + 68)


def test_a_stage_keeps_slots_and_sums_whatever_the_micro_batches():
    bounds = {"max_chunk_scores": 1, "max_chunk_logits": 1}

    def of(**changes: Any) -> dict[str, int]:
        config = staged(**changes)
        return expected_bytes(config, mesh_sizes(config), **bounds)

    base = of()
    assert base["activations"] == 9 * 2 * (1 * 16) * 64 * 4  # slots, layers, tokens, width of the residual, float32
    whole = 2 * LAYER + 2 * TABLE
    norms = 2 * 2 * 64 + 64
    assert base["collectives"] == 4 * (whole + norms)
    largest = LAYER + 2 * 64 + 64 // 8  # a layer, with its part of the final norm
    assert base["gradients"] == 4 * whole + 4 * largest + (4 + 4) * norms  # sums, and those of one micro-batch in one layer
    longer = of(**{"train.grad_accum_steps": 64, "train.global_batch_size": 128})
    assert {kind for kind in base if base[kind] != longer[kind]} == {"batch"}
    uneven = of(**{"model.num_layers": 9})
    assert uneven["activations"] == base["activations"] * 3 // 2
    chunked = of(**{"parallel.pipeline": "interleaved", "parallel.pipeline_chunks": 2})
    assert chunked["activations"] == base["activations"] * (2 * 7 + 3) // (2 * 3 + 3) // 2


def test_what_stages_send():
    """Sixteen micro-batches of one row of 16 tokens: 19 ticks forward, 21 backward, 17 of the head."""
    config = staged()
    mesh = mesh_sizes(config)
    row = 4 * 16 * 64
    sent = pipeline_bytes(config, mesh)
    ends = 2 * 4 * 2 * TABLE / 2 * 3 / 4
    assert sent == {"permutes": (19 + 21) * row, "head": 0, "ends": ends, "layers": 0}
    assert pipeline_bytes(config, mesh | {"pipeline": 1}) == {"permutes": 0, "head": 0, "ends": 0, "layers": 0}
    gathered = 2 * 4 * (2 * LAYER + 2 * TABLE + 2 * 2 * 64 + 64) / 2
    assert least_wire_bytes(config, mesh) == pytest.approx(gathered + sum(sent.values()))
    shared = staged(**{"parallel.pipeline_head": "shared", "data.seq_len": 18})
    assert pipeline_bytes(shared, mesh)["head"] == 2 * 17 * 4 * 20 * 64 * 3 / 4  # 18 tokens, padded to 20
    halved = staged(**{"mesh.fsdp": 1, "mesh.tensor": 2})
    mesh = mesh_sizes(halved)
    assert pipeline_bytes(halved, mesh)["permutes"] == (19 + 21) * 2 * row / 2  # two rows, half of the tokens each
    passed = 2 * (19 * 4 + 21 * 6) + 19 + 21 + 2 * 17  # in two layers, by the embedding, by the head
    inside = least_wire_bytes(halved, mesh) - sum(pipeline_bytes(halved, mesh).values())
    assert inside == pytest.approx(passed * 2 * row / 2)


def test_layers_that_change_devices_are_sent():
    for changes, times in (
        ({"model.num_layers": 7}, 1),
        ({"parallel.pipeline": "interleaved", "parallel.pipeline_chunks": 2}, 2),
    ):
        config = staged(**changes)
        assert pipeline_bytes(config, mesh_sizes(config))["layers"] == times * 2 * 4 * 2 * LAYER / 2 * 3 / 4
