"""The program that compares plans with published runs: what it says of the runs, and its arithmetic, by hand."""

import dataclasses

import pytest

from llamajax.config.formulas import num_params
from llamajax.planning.cost.timeline import Timeline
from scripts import plan_accuracy

RUNS = {run.name: run for run in plan_accuracy.RUNS}
TIMELINE = Timeline(
    step_time_s=12.0, compute_s=8.0, slowdown_s=1.0, comm_s=5.0, exposed_comm_s=3.0, exposed_copy_s=0.0,
    wire_bytes={"intra_node": 0.0, "inter_node": 0.0}, flops=0, rematerialized_flops=0,
    compute_by_kind={"matmul": 7.0, "attention": 1.0}, elementwise_bytes=0, num_kernels=0,
    collectives=(), sync_collectives_in_loops=0, not_understood={}, events=(), latencies={},
)  # fmt: skip


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_run_can_be_laid_over_its_cluster(run):
    config = run.config
    assert not config.problems()
    assert run.tokens * config.hardware.num_devices == config.train.global_batch_size * run.seq_len


def test_megatron_llama_has_the_batch_of_its_script_on_every_cluster():
    batches = {run.config.train.global_batch_size for name, run in RUNS.items() if name.startswith("Megatron-LLaMA")}
    assert batches == {2048}


def test_our_own_schedule_counts_as_it_is():
    assert plan_accuracy.step_seconds(RUNS["MaxText Llama-2-70B, 64 H100"], TIMELINE) == 12.0


def test_in_turn_nothing_is_hidden():
    """512 GPUs in pairs: fp32 gradients and bf16 weights of half the model, by rings of 256 over 64 nodes."""
    run = RUNS["Megatron-LLaMA 13B, 512 A100, plain"]
    compute = plan_accuracy.their_compute(run, TIMELINE)
    inter = 6 * num_params(run.model) / 2 * 255 / 256 / 4 / run.machine.node_link
    assert plan_accuracy.step_seconds(run, TIMELINE) - compute == pytest.approx(inter, rel=0.1)  # and latencies


def test_hidden_exchange_slows_what_hides_it():
    run = dataclasses.replace(RUNS["NeMo Llama-3.1-8B, 8 H100"], grad_accum_steps=1)
    exchange = 6 * num_params(run.model) * 7 / 8 / run.machine.gpu_link
    slowdown = run.machine.calibration.compute_slowdown
    edges = exchange / run.model.num_layers
    assert plan_accuracy.step_seconds(run, TIMELINE) == pytest.approx(
        8.0 + exchange * slowdown / (1 + slowdown) + edges, rel=1e-3
    )


def test_their_attention_replaces_ours():
    """Seven products of half a square each, by FlashAttention-2's rate at 4,096 tokens."""
    run = RUNS["fms-fsdp Llama-2-7B, 128 A100"]
    flops = 7 * 8192 * 32 * 4096 * 4096
    assert plan_accuracy.their_compute(run, TIMELINE) == pytest.approx(7.0 + flops / 173e12)


def test_tables_have_all_runs_and_their_marks():
    exact = {name: run.published for name, run in RUNS.items()}
    tables = plan_accuracy.tables(exact)
    document = plan_accuracy.DOCUMENT.read_text(encoding="utf-8")
    for mark in tables:
        assert f"<!-- {mark} -->" in document
        assert f"<!-- end of {mark} -->" in document
    for run in RUNS.values():
        assert f"| {run.name} |" in tables["checks" if run.is_check else "runs"]
    assert "Median absolute error 0.0%, largest 0.0%." in tables["runs"]
    assert tables["scaling"].count("+0.000") == len(plan_accuracy.SCALING)
