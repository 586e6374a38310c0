"""The arithmetic of published runs, by hand."""

import dataclasses

import pytest

from llamajax.planning.cost.kernels import Dot, dot_seconds
from scripts.accuracy.published import LAYER, RUNS
from scripts.accuracy.run import Run
from scripts.accuracy.step import compute_seconds, step_seconds

BY_NAME = {run.name: run for run in RUNS}
FSDP, ZERO1 = BY_NAME["fms-fsdp Llama-2-7B, 96 H100"], BY_NAME["NeMo Llama-3.1-8B, 8 H100"]


def seconds(run: Run) -> float:
    return step_seconds(run, run.machine())


def test_sizes_are_those_of_the_models():
    """As published: parameters of Llama-2 and Llama-3, and of MosaicML's table without its positions and shared head."""
    sizes = {run.name.split(",")[0]: run.model.num_params / 1e9 for run in RUNS}
    assert sizes["fms-fsdp Llama-2-7B"] == pytest.approx(6.738, rel=1e-3)
    assert sizes["fms-fsdp Llama-2-70B"] == pytest.approx(68.98, rel=1e-3)
    assert sizes["NeMo Llama-3.1-8B"] == pytest.approx(8.030, rel=1e-3)
    assert sizes["NeMo Llama-3.1-405B"] == pytest.approx(405.9, rel=1e-3)
    assert sizes["MosaicML MPT-7B"] == pytest.approx(6.6589 + 0.206 - 0.0084, rel=1e-3)


@pytest.mark.parametrize("run", [run for run in RUNS if run.name.startswith("Megatron-LLaMA")], ids=lambda run: run.name)
def test_megatron_llama_has_the_batch_of_its_script_on_every_cluster(run):
    assert run.tokens_per_step * run.num_gpus == 2048 * 2048


@pytest.mark.parametrize("run", RUNS, ids=BY_NAME)
def test_every_run_fills_its_cluster(run):
    assert run.shards * run.tensor * run.pipeline * run.replicas == run.num_gpus
    # 126 layers: 16 in each of 8 stages, 8 in each of 16, fewer at the ends.
    assert (run.model.num_layers + 2) % run.pipeline == 0 or run.model.num_layers % run.pipeline == 0
    assert run.shards >= run.context


def test_in_turn_nothing_is_hidden():
    """512 GPUs in pairs: fp32 gradients and bf16 weights of half the model, by rings of 256 over 64 nodes."""
    run = BY_NAME["Megatron-LLaMA 13B, 512 A100, plain"]
    without = dataclasses.replace(run, node_bandwidth=1e15, gpu_bandwidth=1e15)
    inter = 6 * run.model.num_params / 2 * 255 / 256 / 4 / run.machine().node_link
    tensor = 10 * 40 * 2 * 2048 * 4 * 5120 / 2 / run.machine().gpu_link * run.grad_accum_steps
    assert seconds(run) - seconds(without) == pytest.approx(inter + tensor, rel=0.05)


def test_hidden_exchange_slows_what_hides_it():
    run, machine = dataclasses.replace(ZERO1, grad_accum_steps=1), ZERO1.machine()
    slowdown = machine.calibration.compute_slowdown
    exchange = 6 * run.model.num_params * 7 / 8 / machine.gpu_link
    silent = dataclasses.replace(run, gpu_bandwidth=1e18)
    edges = exchange / run.model.num_layers
    assert seconds(run) - seconds(silent) == pytest.approx(exchange * slowdown / (1 + slowdown) + edges, rel=0.02)


def test_flash_attention_takes_its_own_rate():
    """Seven products of half a square each; the rest of the kernels is the same."""
    machine = FSDP.machine()
    by_cudnn = dataclasses.replace(FSDP, attention="cudnn")
    product = 8192 * 32 * 128 * 4096 * 32
    forward, backward = machine.calibration.attention(128)
    theirs = 7 * product / 294e12
    cudnn = product / machine.gpu.peak_flops * (2 / forward + 5 / backward)
    assert sum(compute_seconds(FSDP, machine)) - sum(compute_seconds(by_cudnn, machine)) == pytest.approx(theirs - cudnn)
    twice = dataclasses.replace(FSDP, attention="flash 1")
    assert sum(compute_seconds(twice, machine)) - sum(compute_seconds(FSDP, machine)) == pytest.approx(theirs)


def test_what_is_computed_again_is_a_second_forward_pass_of_it():
    machine = FSDP.machine()
    forward, backward = compute_seconds(FSDP, machine)
    head = dot_seconds(Dot(1, 8192, 32000, 4096, "bf16"), machine) + machine.calibration.kernel_s
    full = dataclasses.replace(FSDP, again=LAYER, attention_again=True)
    assert compute_seconds(full, machine)[1] - backward == pytest.approx(forward - head, rel=1e-3)
    third = dataclasses.replace(full, again_share=1 / 3)
    assert compute_seconds(third, machine)[1] - backward == pytest.approx((forward - head) / 3, rel=1e-3)


def test_a_pipeline_waits_for_its_ends_and_tensor_parallelism_divides_products():
    run = BY_NAME["NeMo Llama-3.1-70B, 64 H100"]
    plain = dataclasses.replace(run, interleaved=1)
    assert seconds(plain) / seconds(run) == pytest.approx((1 + 3 / 64) / (1 + 3 / 320), rel=0.01)
    whole = dataclasses.replace(run, tensor=1)
    assert sum(compute_seconds(whole, run.machine())) / sum(compute_seconds(run, run.machine())) == pytest.approx(
        4, rel=0.05
    )


def test_float8_makes_products_faster_and_adds_roundings():
    fast = dataclasses.replace(ZERO1, float8=True)
    assert 1.2 < seconds(ZERO1) / seconds(fast) < 1.6
