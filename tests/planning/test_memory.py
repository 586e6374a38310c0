"""A device's memory: formulas against hand counts, and a compiled step told in the words of training."""

import dataclasses

import pytest

from llamajax.config.training import OptimizerConfig
from llamajax.estimates.formulas import mesh_sizes, minimum_state_bytes, num_params, params_gathered_once
from llamajax.estimates.gpu_memory_budget import VARIABLE
from llamajax.kernels.cudnn import workspace_bytes
from llamajax.planning import memory
from llamajax.planning.cost.network import num_communicators
from llamajax.planning.xla.parse import parse
from llamajax.step.resolve import resolve_planned
from tests.planning.compiled import CONFIG, compiled_step
from tests.planning.modules import module


def test_the_kinds_add_up_and_the_state_is_what_the_formula_says():
    step = compiled_step()
    plan = memory.memory_plan(step, parse(step.hlo))
    norms = (2 * 2 + 1) * 32  # not split
    shard = (num_params(CONFIG.model) - norms) // 8 + norms
    assert plan.by_kind["parameters"] == 4 * shard
    assert plan.by_kind["optimizer"] == 8 * shard
    rows, counters = 32 // 4, 4 + 4 + 8 + 4 + 4 + 4  # step, two optax counts, key, skipped steps
    assert plan.by_kind["batch"] == 4 * 4 * rows * CONFIG.data.seq_len + counters
    assert plan.argument_bytes == sum(plan.by_kind[kind] for kind in ("parameters", "optimizer", "batch"))
    assert plan.peak_bytes == sum(plan.by_kind.values())
    assert plan.peak_bytes == plan.argument_bytes + plan.temp_bytes + step.buffers.other_bytes
    assert plan.capacity_bytes == 84_942_979_072
    assert plan.fits


def test_the_estimate_follows_what_changes():
    base = memory.estimate(resolve_planned(CONFIG)).by_kind
    more_rows = memory.estimate(resolve_planned(CONFIG.changed({"train.grad_accum_steps": 1}))).by_kind
    assert more_rows["activations"] == 2 * base["activations"]
    assert more_rows["gradients"] < base["gradients"]  # no sum over micro-batches beside the micro-batch's own
    narrow = CONFIG.changed({"model.param_dtype": "bfloat16"})  # whose micro-batches' sum is fp32 all the same
    mesh = mesh_sizes(CONFIG)
    whole = params_gathered_once(resolve_planned(CONFIG).config, mesh)
    assert whole > 0
    waiting = minimum_state_bytes(CONFIG) // 12 - whole // mesh["fsdp"]  # of what is whole there is no shard's gradient yet
    assert base["gradients"] - memory.estimate(resolve_planned(narrow)).by_kind["gradients"] == 2 * waiting
    half = memory.estimate(resolve_planned(CONFIG.changed({"optimizer.moment_dtype": "bfloat16"}))).by_kind
    assert half["optimizer"] == base["optimizer"] // 2
    kept = [
        memory.estimate(resolve_planned(CONFIG.changed({"model.remat": policy}))).by_kind["activations"]
        for policy in ("full", "save_attention", "save_attention_qkv", "save_attention_qkv_mlp", "none")
    ]
    assert kept == sorted(kept)
    assert len(set(kept)) == 5
    assert base["parameters"] + base["optimizer"] == minimum_state_bytes(CONFIG)


def test_what_xla_may_take_is_training_s_part_of_the_card(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    plan = memory.estimate(resolve_planned(CONFIG))
    assert (plan.training_fraction, plan.allowance.num_communicators) == (0.92, 3)  # fsdp, tensor, both
    full = dataclasses.replace(plan, peak_bytes=plan.budget_bytes)
    assert full.budget_bytes == int(0.92 * full.capacity_bytes)
    assert full.fits
    assert not dataclasses.replace(full, peak_bytes=full.peak_bytes + 1).fits
    assert (full.memory_fraction, full.room) == (0.92, 0.971)
    monkeypatch.setenv(VARIABLE, "0.95")
    assert dataclasses.replace(memory.estimate(resolve_planned(CONFIG)), peak_bytes=int(0.95 * plan.capacity_bytes)).fits
    monkeypatch.setenv(VARIABLE, "0.99")
    larger = memory.estimate(resolve_planned(CONFIG))
    assert larger.budget_bytes == int(0.971 * larger.capacity_bytes)  # the rest is NCCL's and CUDA's


def test_communicators_are_the_different_groups():
    step = compiled_step()
    plan, groups = memory.memory_plan(step, parse(step.hlo)), num_communicators(parse(step.hlo))
    assert 2 <= groups <= plan.allowance.num_communicators == 3


def test_cudnn_s_workspace_is_counted_where_xla_does_not_know_it():
    """Llama 3 70B and Llama 3.2 1B as shipped: two rows of 64 heads over 8, four of 32 over 8, one GPU each."""
    step = compiled_step()
    plain = memory.memory_plan(step, parse(step.hlo))
    assert plain.by_kind["workspace"] == 0
    for batch, heads, width, expected in ((2, 64, 128, 1 << 30), (4, 32, 64, 1 << 29)):
        shapes = (f"{batch},8192,{heads},{width}", f"{batch},8192,8,{width}", f"{batch},{heads},8192")
        for known in (0, 1000):
            program = module(
                f"""%q = bf16[{shapes[0]}]{{3,2,1,0}} parameter(0)
                %k = bf16[{shapes[1]}]{{3,2,1,0}} parameter(1)
                %dq = (bf16[{batch},{heads},8192,{width}]{{3,1,2,0}}, u8[{known}]{{0}}) custom-call(%q, %k),"""
                ' custom_call_target="__cudnn$fmhaSoftmaxBackward"'
            )
            plan = memory.memory_plan(step, program)
            statistics = 4 * batch * heads * 8192
            assert plan.by_kind["workspace"] == (0 if known else expected + statistics)
            assert plan.peak_bytes == plain.peak_bytes + plan.by_kind["workspace"]


def test_the_estimate_knows_the_workspace_too():
    assert memory.estimate(resolve_planned(CONFIG)).by_kind["workspace"] == 0  # documents are closed: the plain kernel
    config = CONFIG.changed({"model.attend_across_documents": True, "model.head_dim": 16, "model.compute_dtype": "bfloat16"})
    rows, tensor = 32 // 2 // 4, 2
    expected = workspace_bytes(
        rows, config.model.num_heads // tensor, config.model.num_kv_heads // tensor, config.data.seq_len, 16
    )
    assert memory.estimate(resolve_planned(config)).by_kind["workspace"] == expected > 0
    assert memory.estimate(resolve_planned(config.changed({"model.attention_kernel": "plain"}))).by_kind["workspace"] == 0
    assert memory.estimate(resolve_planned(config.changed({"model.compute_dtype": "float32"}))).by_kind["workspace"] == 0


def test_moments_that_round_away_are_no_way_out():
    with pytest.raises(ValueError, match="bfloat16 loses"):
        OptimizerConfig(learning_rate=1e-3, b2=0.999, moment_dtype="bfloat16")
