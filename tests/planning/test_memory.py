"""A device's memory: formulas against hand counts, and a compiled step told in the words of training."""

import dataclasses

import jax
import pytest

from llamajax import mesh
from llamajax.config import HardwareConfig, MeshConfig, OptimizerConfig, TrainConfig
from llamajax.planning import memory
from llamajax.planning.buffers import read_buffer_assignment
from llamajax.planning.compile import CompiledStep, lower
from llamajax.planning.fitting import changed
from llamajax.planning.hardware import planned_gpu
from llamajax.planning.hlo import parse
from tests.tiny import tiny_config

CONFIG = tiny_config(
    hardware=HardwareConfig(gpu="h100"),
    mesh=MeshConfig(fsdp=4, tensor=2),
    train=TrainConfig(num_steps=10, global_batch_size=32, grad_accum_steps=2),
)


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> CompiledStep:
    """The tiny step, compiled for eight CPU devices: real buffers, though not a GPU's."""
    jax.set_mesh(mesh.make_mesh(CONFIG.mesh))
    folder = tmp_path_factory.mktemp("dump")
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True}
    compiled = lower(CONFIG).compile(compiler_options=options)
    (proto,) = folder.glob("*jit_train_step*after_optimizations.hlo.pb")
    hlo = compiled.as_text()
    assert hlo is not None
    return CompiledStep(
        config=CONFIG,
        gpu=planned_gpu(CONFIG.hardware),
        hlo=hlo,
        buffers=read_buffer_assignment(proto.read_bytes()),
        peak_bytes=0,
        options={},
        compile_s=0.0,
        jax_version=jax.__version__,
    )


def test_the_kinds_add_up_and_the_state_is_what_the_formula_says(step):
    plan = memory.memory_plan(step, parse(step.hlo))
    norms = (2 * 2 + 1) * 32  # not split
    shard = (CONFIG.model.num_params - norms) // 8 + norms
    assert plan.by_kind["parameters"] == 4 * shard
    assert plan.by_kind["optimizer"] == 8 * shard
    rows, counters = 32 // 4, 4 + 4 + 8 + 4 + 4 + 4  # step, two optax counts, key, skipped steps
    assert plan.by_kind["batch"] == 4 * 4 * rows * CONFIG.data.seq_len + counters
    assert plan.argument_bytes == sum(plan.by_kind[kind] for kind in ("parameters", "optimizer", "batch"))
    assert plan.peak_bytes == sum(plan.by_kind.values())
    assert plan.peak_bytes == plan.argument_bytes + plan.temp_bytes + step.buffers.other_bytes
    assert plan.capacity_bytes == 84_942_979_072
    assert plan.fits


def test_every_tensor_has_a_name(step):
    plan = memory.memory_plan(step, parse(step.hlo))
    sizes = [tensor.size for tensor in plan.tensors]
    assert sizes == sorted(sizes, reverse=True)
    names = {tensor.name: tensor.kind for tensor in plan.tensors}
    assert names["model.layers.mlp.w_gate_up"] == "parameters"
    assert names["opt_state[0].nu.layers.mlp.w_gate_up"] == "optimizer"
    assert names["gradient of layers/mlp/w_gate_up"] == "gradients"
    assert all(tensor.name.strip() for tensor in plan.tensors)


def test_the_minimum_splits_all_matrices_over_all_shards():
    norms = (2 * 2 + 1) * 32
    matrices = CONFIG.model.num_params - norms
    assert memory.minimum_state_bytes(CONFIG) == 12 * (matrices // 8 + norms)
    half = changed(CONFIG, {"optimizer.moment_dtype": "bfloat16"})
    assert memory.minimum_state_bytes(half) == 8 * (matrices // 8 + norms)
    replicated = changed(CONFIG, {"mesh.data": 4, "mesh.fsdp": 1})
    assert memory.minimum_state_bytes(replicated) == 12 * (matrices // 2 + norms)


def test_the_estimate_follows_what_changes():
    base = memory.estimate(CONFIG).by_kind
    more_rows = memory.estimate(changed(CONFIG, {"train.grad_accum_steps": 1})).by_kind
    assert more_rows["activations"] == 2 * base["activations"]
    assert more_rows["gradients"] < base["gradients"]  # no sum over micro-batches beside the micro-batch's own
    narrow = changed(CONFIG, {"model.param_dtype": "bfloat16"})  # whose micro-batches' sum is fp32 all the same
    shard = memory.minimum_state_bytes(CONFIG) // 12
    assert base["gradients"] - memory.estimate(narrow).by_kind["gradients"] == 2 * shard
    half = memory.estimate(changed(CONFIG, {"optimizer.moment_dtype": "bfloat16"})).by_kind
    assert half["optimizer"] == base["optimizer"] // 2
    kept = [
        memory.estimate(changed(CONFIG, {"model.remat": policy})).by_kind["activations"]
        for policy in ("full", "save_attention", "save_attention_qkv", "save_attention_qkv_mlp", "none")
    ]
    assert kept == sorted(kept)
    assert len(set(kept)) == 5
    assert base["parameters"] + base["optimizer"] == memory.minimum_state_bytes(CONFIG)


def test_the_allowance_is_stated_and_counts_against_the_card():
    plan = memory.estimate(CONFIG)
    assert plan.allowance.num_communicators == 2
    assert plan.allowance.total_bytes == 2**30 + 2 * 24 * 2 * (524_288 + 4_915_200 + 4_194_304)
    assert str(plan.allowance).startswith("1,906 MiB beside XLA's arrays: CUDA context 512, ")
    full = dataclasses.replace(plan, peak_bytes=plan.capacity_bytes - plan.allowance.total_bytes)
    assert full.fits
    assert full.memory_fraction == 0.98
    assert not dataclasses.replace(full, peak_bytes=full.peak_bytes + 1).fits


def test_communicators_are_the_different_groups(step):
    plan = memory.memory_plan(step, parse(step.hlo))
    assert 2 <= plan.allowance.num_communicators <= 4  # fsdp, tensor, and what XLA makes of both


def test_moments_that_round_away_are_no_way_out():
    with pytest.raises(ValueError, match="bfloat16 loses"):
        OptimizerConfig(learning_rate=1e-3, b2=0.999, moment_dtype="bfloat16")
