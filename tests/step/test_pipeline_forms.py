"""Forms of a pipeline are chosen by times, and each choice says which."""

from typing import Any

import pytest

from llamajax.config.machine import HardwareConfig
from llamajax.config.run import Config
from llamajax.step.resolve import resolve_planned
from tests.tiny import tiny_config

LARGE = tiny_config(hardware=HardwareConfig(gpu="a100-80gb", nodes=8)).changed(
    {
        "model.num_layers": 32, "model.embed_dim": 4096, "model.mlp_dim": 14336, "model.num_heads": 32,
        "model.head_dim": 128, "model.vocab_size": 128256, "model.compute_dtype": "bfloat16", "model.max_seq_len": 8192,
        "data.seq_len": 8192, "mesh.num_cpu_devices": None, "mesh.pipeline": 8, "mesh.tensor": 8, "parallel.zero": 1,
        "train.global_batch_size": 64, "train.grad_accum_steps": 64,
    }
)  # fmt: skip


def resolved(changes: dict[str, Any]) -> tuple[Config, dict[str, str]]:
    run = resolve_planned(LARGE.changed(changes))
    return run.config, dict(run.reasons)


@pytest.mark.parametrize(
    ("changes", "form", "chunks", "reason"),
    [
        ({}, "1f1b", 1, "1f1b: 7 of 71 ticks fill or drain; "),
        ({"parallel.pipeline": "1f1b"}, "1f1b", 1, "1f1b: parallel.pipeline says so"),
        ({"parallel.pipeline": "interleaved"}, "interleaved", 2, "interleaved: parallel.pipeline says so"),
        ({"parallel.pipeline": "interleaved", "parallel.pipeline_chunks": 4}, "interleaved", 4, "interleaved: parallel"),
        ({"parallel.pipeline": "interleaved", "model.num_layers": 24}, "interleaved", 3, "interleaved: parallel.pipeline"),
        ({"parallel.pipeline": "interleaved", "model.num_layers": 17}, "interleaved", 2, "interleaved: parallel.pipeline"),
    ],
)
def test_a_run_has_chunks_only_where_it_asks_for_them(changes, form, chunks, reason):
    config, reasons = resolved(changes)
    assert (config.parallel.pipeline, config.parallel.pipeline_chunks) == (form, chunks)
    assert reasons["pipeline"].startswith(reason)


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, "shared"),
        ({"hardware.node_bandwidth": 5e9}, "last"),
        ({"model.vocab_size": 8192}, "last"),
        ({"model.vocab_size": 8192, "parallel.pipeline_head": "shared"}, "shared"),
    ],
)
def test_the_head_is_shared_where_that_saves_more_than_it_sends(changes, form):
    config, reasons = resolved(changes)
    assert config.parallel.pipeline_head == form
    assert reasons["pipeline_head"].startswith(f"{form}: ")


def test_a_run_without_stages_has_no_choice():
    config, reasons = resolved({"mesh.pipeline": 1, "parallel.zero": 3, "train.grad_accum_steps": 8})
    assert not {"pipeline", "pipeline_head"} & reasons.keys()
    assert (config.parallel.pipeline, config.parallel.pipeline_head) == ("1f1b", "last")
