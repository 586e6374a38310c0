"""Programs for GPUs whose saved values, weights and moments wait in host memory: what they hold there, what they copy, and
that they copy nothing else and wait for none of it, as XLA has compiled them."""

import functools
import math
from typing import Any

import pytest

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig, Remat
from llamajax.config.offload import OffloadConfig
from llamajax.config.parallel import MeshConfig, ParallelConfig, StackForm
from llamajax.config.run import Config
from llamajax.config.training import TrainConfig
from llamajax.estimates.device_memory import host_bytes, saved_host_bytes
from llamajax.estimates.formulas import layer_matrices, mesh_sizes, trained_weights
from llamajax.planning.plan import Schedule, planned
from llamajax.planning.xla.hlo import arrays, num_bytes
from tests.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("gpu_compiler")

MIB = 2**20
WHOLE = ("input", "residual", "attention")
EVERY = (*WHOLE, "qkv", "gate_up")
LAYERS, TOKENS = 6, 4096


def config(
    offload: OffloadConfig,
    *,
    stack: StackForm = "prefetch",
    remat: Remat = "save_attention_qkv_mlp",
    gpus: int = 8,
    **sections: Any,
) -> Config:
    """Layers of a Llama 7B, six of them, with four rows per GPU."""
    model = ModelConfig(
        vocab_size=32000, embed_dim=4096, mlp_dim=11008, num_layers=LAYERS, num_heads=32, num_kv_heads=32, head_dim=128,
        attend_across_documents=True, compute_dtype="bfloat16", max_seq_len=TOKENS, remat=remat,
    )  # fmt: skip
    defaults = {
        "model": model,
        "data": DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=TOKENS),
        "train": TrainConfig(num_steps=10, global_batch_size=4 * gpus),
        "mesh": MeshConfig(fsdp=gpus),
        "parallel": ParallelConfig(stack=stack),
        "hardware": HardwareConfig(gpu="a100-80gb", gpus_per_node=gpus),
        "offload": offload,
    }
    return tiny_config(**(defaults | sections))


@functools.cache
def compiled(run: Config) -> Schedule:
    return planned(run)


def whole_stacks(schedule: Schedule) -> list[str]:
    """Instructions that make an array of all layers' saved values on the card."""
    return [
        f"{instruction.name} {array}"
        for computation in schedule.module.computations.values()
        for instruction in computation.instructions.values()
        for array in arrays(instruction.shape)
        if not array.on_host and array.dtype == "bf16" and array.dims[:1] in ((LAYERS - 1,), (LAYERS,))
        if len(array.dims) > 2 and TOKENS in array.dims
    ]


def copies_within_host_memory(schedule: Schedule) -> list[str]:
    """Copies from host memory to host memory."""
    return [
        instruction.name
        for computation in schedule.module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode in ("copy", "copy-start") and num_bytes(instruction.shape) > MIB
        for source in [list(arrays(computation.operand_shapes(instruction)[0]))]
        if any(array.on_host for array in source) and (any(array.on_host for array in list(arrays(instruction.shape))[:1]))
    ]


FRACTIONS = [
    pytest.param(0.0, "prefetch", marks=pytest.mark.long),
    pytest.param(0.25, "prefetch", marks=pytest.mark.long),
    pytest.param(0.5, "prefetch", marks=pytest.mark.slow),
    pytest.param(1.0, "prefetch", marks=pytest.mark.long),
    pytest.param(0.5, "unrolled", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("fraction", "stack"), FRACTIONS)
def test_saved_values_take_the_bytes_of_the_formula_on_the_host_and_none_on_the_card(fraction, stack):
    run = config(OffloadConfig(activations=EVERY, fraction=fraction), stack=stack)
    schedule = compiled(run)
    resolved, mesh = schedule.step.run.config, mesh_sizes(run)
    wanted = saved_host_bytes(resolved, mesh)
    staying = 2 if stack == "unrolled" else 1
    per_token = 2 * (4096 + 4096 + 4096 + 2 * 32 + fraction * (3 * 4096 + 2 * 11008))  # bf16; one fp32 per head is two
    assert wanted == (LAYERS - staying) * 4 * TOKENS * per_token
    assert schedule.memory.host_bytes == pytest.approx(wanted, rel=0.01)
    assert {lane: pytest.approx(wanted, rel=0.01) for lane in ("to_host", "from_host")} == schedule.timeline.host_copies
    assert whole_stacks(schedule) == []
    assert copies_within_host_memory(schedule) == []
    assert schedule.memory.fits


@pytest.mark.long
def test_the_rows_of_other_tokens_are_computed_again_and_attention_never_is():
    saved, half, none = (
        compiled(config(OffloadConfig(activations=EVERY, fraction=fraction))).timeline for fraction in (1.0, 0.5, 0.0)
    )
    matrices = {weight.result: size for weight, size in layer_matrices(config(OffloadConfig()).model).items()}
    # XLA finds the last layer's values in the forward pass, which has only just ended.
    again = 2 * (LAYERS - 1) * 4 * TOKENS * (matrices["qkv"] + matrices["gate_up"])
    assert none.flops - saved.flops == pytest.approx(again, rel=1e-3)
    assert half.flops - saved.flops == pytest.approx(again / 2, rel=1e-3)
    for timeline in (half, none):
        assert timeline.compute_by_kind["attention"] == pytest.approx(saved.compute_by_kind["attention"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["prefetch", pytest.param("unrolled", marks=pytest.mark.long)])
def test_nothing_waits_for_copies_that_are_shorter_than_a_layer(stack):
    schedule = compiled(config(OffloadConfig(activations=WHOLE), stack=stack, remat="save_attention"))
    timeline = schedule.timeline
    busy = timeline.host_copies["to_host"] / 25e9
    assert busy > 0.05 * timeline.step_time_s
    assert timeline.exposed_host_copy_s == 0.0


@pytest.mark.long
def test_without_a_place_on_the_host_the_values_are_on_the_card():
    """The control: what the other tests find missing is there."""
    schedule = compiled(config(OffloadConfig(), remat="save_attention"))
    assert schedule.memory.host_bytes == 0
    assert schedule.timeline.host_copies == {}
    assert whole_stacks(schedule)


STATES = [
    pytest.param(1.0, "none", 1, {"fsdp": 8}, 8, marks=pytest.mark.slow),
    pytest.param(1.0, "none", 2, {"data": 2, "fsdp": 2, "tensor": 2}, 8, marks=pytest.mark.long),
    pytest.param(0.5, "none", 1, {"fsdp": 8}, 8, marks=pytest.mark.long),
    pytest.param(1.0, "all", 1, {"fsdp": 1}, 1, marks=pytest.mark.long),
    pytest.param(1.0, "all", 2, {"data": 2, "fsdp": 4}, 8, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("share", "parameters", "steps", "axes", "gpus"), STATES)
def test_the_state_is_updated_where_it_is(share, parameters, steps, axes, gpus):
    """Twelve bytes per parameter, all of them in place: a second copy, there or on the card, would be found."""
    offload = OffloadConfig(
        activations=("input",), optimizer=share, parameters=parameters, gradient_dtype="bfloat16"
    )  # fmt: skip
    train = TrainConfig(num_steps=10, global_batch_size=4 * gpus * steps, grad_accum_steps=steps)
    run = config(offload, remat="full", gpus=gpus, mesh=MeshConfig(**axes), train=train)
    schedule = compiled(run)
    resolved, mesh = schedule.step.run.config, mesh_sizes(run)
    assert schedule.memory.host_bytes == pytest.approx(host_bytes(resolved, mesh), rel=0.01)
    matrices = sum(size for name, size in trained_weights(run, run.model).items() if "norm" not in name)
    shards = math.prod(axes.values()) // axes.get("data", 1)
    state = schedule.memory.host_bytes - saved_host_bytes(resolved, mesh)
    if share == 1.0 and parameters == "none":
        assert state == pytest.approx(12 * matrices / shards, rel=1e-3)
    assert copies_within_host_memory(schedule) == []
    assert schedule.timeline.not_understood == {}
