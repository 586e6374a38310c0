"""The contract between plans and the program: its scopes, and what arrays are told by them."""

import re

import jax
import pytest

from llamajax.config.parallel import PLAIN
from llamajax.parallel.mesh import make_mesh
from llamajax.planning.cost.experts import FURTHER_ROUNDS
from llamajax.planning.memory import memory_plan
from llamajax.planning.scopes import EXPERT_VALUES, SCOPES, Namer, StageArrays
from llamajax.planning.xla.buffers import Buffer
from llamajax.planning.xla.parse import parse
from llamajax.step.compile import lower
from llamajax.step.resolve import resolve_planned
from llamajax.step.state import abstract_state
from tests.planning.compiled import CONFIG, compiled_step
from tests.planning.modules import module

STEP = "jit(train_step)/while/body/closed_call"
FORWARD, BACKWARD = f"{STEP}/jvp(layers)/while/body", f"{STEP}/transpose(jvp(layers))/while/body/closed_call/checkpoint"


@pytest.mark.parametrize("scope", SCOPES)
def test_the_step_is_written_in_the_scopes_that_plans_are_told_by(scope):
    """`jax.named_scope` in model and step is how plans know what belongs to what."""
    names = re.findall(r'op_name="([^"]*)"', compiled_step().hlo)
    assert scope in {part for name in names for part in re.split(r"[/():]", name)}


@pytest.mark.slow
def test_layers_with_experts_are_written_in_their_scopes():
    experts = {"model.experts.num_experts": 8, "mesh.fsdp": 2, "mesh.expert": 2, "parallel": PLAIN}
    run = resolve_planned(CONFIG.changed(experts))
    with jax.set_mesh(make_mesh(run.config.mesh)):
        text = lower(run, abstract_state(run.config)).as_text(debug_info=True)
    parts = {part for name in re.findall(r'loc\("([^"]*)"', text) for part in re.split(r"[/():]", name)}
    assert {*EXPERT_VALUES, FURTHER_ROUNDS} <= parts


def test_every_tensor_has_a_name():
    step = compiled_step()
    plan = memory_plan(step, parse(step.hlo))
    sizes = [tensor.buffer.size for tensor in plan.tensors]
    assert sizes == sorted(sizes, reverse=True)
    names = {tensor.name: tensor.kind for tensor in plan.tensors}
    assert names["model.layers.mlp.w_gate_up"] == "parameters"
    assert names["opt_state[0].nu.layers.mlp.w_gate_up"] == "optimizer"
    assert names["gradient of layers/mlp/w_gate_up"] == "gradients"
    assert all(tensor.name.strip() for tensor in plan.tensors)


def buffer(op_name: str, *shape: int, opcode: str = "fusion", dtype: str = "bf16") -> Buffer:
    return Buffer(instruction="fusion.1", opcode=opcode, op_name=op_name, dtype=dtype, shape=shape, size=1)


WEIGHT = buffer("state.model.layers.mlp.w_down.value", 4, 96, 8, opcode="parameter", dtype="f32")
BATCH = buffer("batch['tokens']", 3, 2, 32, opcode="parameter")
PROGRAM = module(
    f"""%w = bf16[96,16]{{1,0}} parameter(0)
    %all = bf16[96,64]{{1,0}} all-gather(%w), metadata={{op_name="{FORWARD}/mlp/gather_weight/reshard"}}
    %stack = bf16[4,2,32,96]{{3,2,1,0}} parameter(1)
    %made = bf16[1,2,32,96]{{3,2,1,0}} bitcast(%w), metadata={{op_name="{FORWARD}/mlp/gated/mul"}}
    %saved = bf16[4,2,32,96]{{3,2,1,0}} dynamic-update-slice(%stack, %made), metadata={{op_name="{FORWARD}/while"}}
    %out = bf16[1,2,16,64]{{3,2,1,0}} bitcast(%w), metadata={{op_name="{FORWARD}/attention/output_projection/ppermute"}}
    %residual = bf16[1,2,16,64]{{3,2,1,0}} add(%out, %out), metadata={{op_name="{FORWARD}/attention/add"}}
    %kept = bf16[1,2,16,64]{{3,2,1,0}} bitcast(%residual), metadata={{op_name="{FORWARD}/broadcast_in_dim"}}
    %stack.1 = bf16[4,2,16,64]{{3,2,1,0}} parameter(2)
    %saved.1 = bf16[4,2,16,64]{{3,2,1,0}} dynamic-update-slice(%stack.1, %kept), metadata={{op_name="{FORWARD}/while"}}"""
)
NAMED = (
    (WEIGHT, "parameters", "model.layers.mlp.w_down"),
    (buffer("state.opt_state[0].mu.layers.mlp.w_down.value", 4, 96, 8, opcode="parameter"), "optimizer",
     "opt_state[0].mu.layers.mlp.w_down"),
    (BATCH, "batch", "batch['tokens']"),
    (buffer("jit(train_step)/while", 4, 96, 8, dtype="f32"), "gradients", "gradient of layers/mlp/w_down"),
    (buffer("jit(train_step)/while", 8, 4, 96, dtype="f32"), "temporaries",
     "layers/mlp/w_down or its gradient, copied to another layout"),
    (buffer(f"{FORWARD}/mlp/gather_weight/reshard", 96, 64, opcode="all-gather"), "collectives",
     "layers/mlp weight, gathered"),
    (buffer(f"{FORWARD}/attention/attend/all_gather", 2, 64, opcode="all-gather-start"), "collectives",
     "layers/attention all-gather (forward)"),
    (buffer(f"{FORWARD}/mlp/down_projection/dot_general", 96, 64), "collectives", "layers/mlp down weight, gathered"),
    (buffer(f"{BACKWARD}/mlp/down_projection/transpose", 96, 64), "gradients",
     "gradient of layers/mlp down weight, not scattered yet"),
    (buffer(f"{BACKWARD}/mlp/reduce_sum", 2, 32, 96), "temporaries", "layers/mlp gradient of hidden states"),
    (buffer(f"{STEP}/jvp(layers)/broadcast_in_dim", 4, 2, 32, 96), "activations", "gated of every layer"),
    (buffer(STEP, 4, 2, 16, 64), "activations", "hidden states of every layer"),
    (buffer(STEP, 4, 2, 16, 65), "temporaries", "step closed_call"),
    (buffer(f"{BACKWARD}/rematted_computation/mlp/gated/mul", 2, 32, 99), "temporaries", "layers/mlp gated, recomputed"),
    (buffer(f"{BACKWARD}/mlp/gate_up/add_any", 2, 32, 2, 96), "temporaries", "layers/mlp gradient of gate_up"),
    (buffer(f"{STEP}/jvp(loss)/shard_map/while/body/logits/exp", 7, 9, dtype="f32"), "logits", "loss logits"),
    (buffer(f"{STEP}/transpose(jvp(embed))/scatter-add", 64, 96, dtype="f32"), "gradients",
     "gradient of embedding, not scattered yet"),
    (buffer(f"{BACKWARD}/mlp/gate_up/dot_general", 64, 2, 48), "temporaries", "layers/mlp gradient of gate_up"),
    (buffer("jit(train_step)/update/mul", 7, dtype="f32"), "temporaries", "update mul"),
    (buffer("", 7), "temporaries", "step fusion.1"),
)  # fmt: skip


def test_what_has_the_shape_of_a_frozen_weight_is_not_its_gradient():
    array = buffer(f"{FORWARD}/mlp/mul", 4, 96, 8, dtype="f32")
    assert Namer(PROGRAM, (WEIGHT, BATCH), lambda _: False).tell(array)[0] == "gradients"
    assert Namer(PROGRAM, (WEIGHT, BATCH), lambda name: name == "layers.mlp.w_down").tell(array)[0] == "temporaries"


@pytest.mark.parametrize(("array", "kind", "name"), NAMED)
def test_an_array_is_told_by_its_scopes(array, kind, name):
    assert Namer(PROGRAM, (WEIGHT, BATCH), lambda _: False).tell(array) == (kind, name)


def test_slots_and_sums_of_a_pipeline_are_told_as_such():
    """Kept in slots by two loops, one of which has lost the value's name; sums and weights by their size."""
    program = module(
        f"""%w = bf16[96,16]{{1,0}} parameter(0)
        %slots = bf16[7,2,32,96]{{3,2,1,0}} parameter(1)
        %made = bf16[1,2,32,96]{{3,2,1,0}} bitcast(%w), metadata={{op_name="{STEP}/layers/jvp(mlp)/gated/mul"}}
        %filled = bf16[7,2,32,96]{{3,2,1,0}} dynamic-update-slice(%slots, %made), metadata={{op_name="{STEP}/update_slice"}}
        %own = bf16[1,2,32,96]{{3,2,1,0}} bitcast(%w)
        %put = bf16[7,2,32,96]{{3,2,1,0}} dynamic-update-slice(%filled, %own), metadata={{op_name="{STEP}/update_slice"}}
        %x = bf16[7,2,32,9]{{3,2,1,0}} parameter(2)
        %kept = bf16[7,2,32,9]{{3,2,1,0}} dynamic-update-slice(%x, %own), metadata={{op_name="{STEP}/update_slice"}}"""
    )
    namer = Namer(program, (WEIGHT, BATCH), lambda _: False, StageArrays(slots=7, whole={6144: "layers/mlp/w_down"}))
    assert namer.tell(buffer(STEP, 7, 2, 32, 96)) == ("activations", "gated of 7 micro-batches")
    assert namer.tell(buffer(STEP, 7, 2, 32, 9)) == ("activations", "hidden states of 7 micro-batches")
    assert namer.tell(buffer(STEP, 1, 64, 96, dtype="f32")) == ("gradients", "summed gradient of layers/mlp/w_down")
    assert namer.tell(buffer(STEP, 1, 64, 96)) == ("collectives", "layers/mlp/w_down, gathered")


def test_weights_of_a_stage_are_named_by_their_size():
    config = CONFIG.changed({"parallel.zero": 1, "mesh.pipeline": 2, "mesh.fsdp": 2, "model.vocab_size": 96})
    arrays = StageArrays.of(config, config.mesh.axis_sizes(8))
    assert arrays.slots == 5
    assert arrays.whole[2 * 32 * 64 // 2] == "layers/mlp/w_gate_up"
    assert arrays.whole[96 * 32 // 2] == "embedding or head"
    assert StageArrays.of(CONFIG, CONFIG.mesh.axis_sizes(8)) == StageArrays()
