"""The reader of HLO text: hand-written modules for every notation, and two that XLA printed."""

import pathlib

import pytest

from llamajax.planning.xla.hlo import Array
from llamajax.planning.xla.hlo import num_bytes as hlo_bytes
from llamajax.planning.xla.parse import parse

FIXTURES = pathlib.Path(__file__).parent.parent / "hlo"

MODULE = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}, num_partitions=4

FileNames
1 "a {file.py"

%fused_add (p.0: f32[8,4], p.1: f32[]) -> f32[8,4] {
  %p.1 = f32[] parameter(1)
  %p.0 = f32[8,4]{1,0} parameter(0)
  %b = f32[8,4]{1,0} broadcast(%p.1), dimensions={}
  ROOT %add = f32[8,4]{1,0} add(%p.0, %b)
}

%body (t: (s32[], /*index=1*/f32[8,4])) -> (s32[], f32[8,4]) {
  %t = (s32[], /*index=1*/f32[8,4]{1,0}) parameter(0)
  %gte = f32[8,4]{1,0} get-tuple-element(%t), index=1
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%i, %gte)
}

%cond (t.1: (s32[], f32[8,4])) -> pred[] {
  %t.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}, metadata={op_name="state['x']"}
  %text = s8[3]{0} constant("a)b")
  %one = f32[] constant(1)
  %zero = s32[] constant(0)
  %fusion = f32[8,4]{1,0} fusion(%x, %one), kind=kLoop, calls=%fused_add, metadata={op_name="jit(f)/add \\"q\\", x}" \
scheduling_name="add_fusion"}, backend_config={"a":{"b":["}",","]}}
  %tuple = (s32[], f32[8,4]{1,0}) tuple(%zero, %fusion)
  %while = (s32[], f32[8,4]{1,0}) while(%tuple), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %result = f32[8,4]{1,0} get-tuple-element(%while), index=1
}
"""


def test_reads_a_module():
    module = parse(MODULE)
    assert (module.name, module.num_devices) == ("jit_f", 4)
    assert list(module.computations) == ["fused_add", "body", "cond", "main"]
    assert module.entry.name == "main"
    assert list(module.entry.instructions) == ["x", "text", "one", "zero", "fusion", "tuple", "while", "result"]
    assert module.entry.root.name == "result"
    fusion = module.entry.instructions["fusion"]
    assert fusion.operands == ("x", "one")
    assert fusion.called("calls") == ("fused_add",)
    assert fusion.attributes["kind"] == "kLoop"
    assert fusion.backend_config == {"a": {"b": ["}", ","]}}
    assert fusion.op_name == 'jit(f)/add \\"q\\", x}'
    assert (fusion.scheduling_name, module.entry.root.scheduling_name) == ("add_fusion", "result")
    loop = module.entry.instructions["while"]
    assert (loop.trip_count, loop.called("body", "condition")) == (12, ("body", "cond"))
    assert fusion.trip_count is None
    assert [p.name for p in module.computations["fused_add"].parameters] == ["p.0", "p.1"]
    assert module.computations["body"].operand_shapes(module.computations["body"].root) == [
        Array("s32", (), ""),
        Array("f32", (8, 4), "1,0"),
    ]


@pytest.mark.parametrize(
    ("text", "shape", "num_bytes"),
    [
        ("f32[]", Array("f32", (), ""), 4),
        ("bf16[2,3]{1,0:T(8,128)S(5)}", Array("bf16", (2, 3), "1,0:T(8,128)S(5)"), 12),
        ("s4[5]{0}", Array("s4", (5,), "0"), 3),
        ("f8e4m3fn[<=7]{0}", Array("f8e4m3fn", (7,), "0"), 7),
        ("token[]", Array("token", (), ""), 0),
        ("()", (), 0),
        (
            "((pred[2]{0}, s32[]), /*index=1*/u32[2]{0})",
            ((Array("pred", (2,), "0"), Array("s32", (), "")), Array("u32", (2,), "0")),
            14,
        ),
    ],
)
def test_shapes(text, shape, num_bytes):
    module = parse(f"HloModule m\n\nENTRY %e () -> f32[] {{\n  ROOT %x = {text} constant(0)\n}}\n")
    assert module.entry.root.shape == shape
    assert hlo_bytes(shape) == num_bytes


def test_knows_host_memory():
    assert Array("f32", (8,), "0:S(5)").on_host
    assert not Array("f32", (8,), "0:T(8)").on_host


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: not the text of an HLO module"),
        ("HloModule m\n", "no ENTRY computation"),
        ("HloModule m\n\nENTRY %e () -> f32[] {\n  this is no HLO\n}\n", "line 4: not an HLO instruction: this is no HLO"),
        ("HloModule m\n\nENTRY %e () -> f32[] {\n  ROOT %x = q7[3]{0} add()\n}\n", "unknown HLO shape 'q7"),
        ("HloModule m\n\nENTRY %e () -> f32[] {\n  ROOT %x = f32[] add(%a\n}\n", "unbalanced brackets"),
    ],
)
def test_says_what_it_cannot_read(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize("version", ["0.10", "0.12"])
def test_reads_what_xla_prints(version):
    """A scan of four layers over a mesh (data=2, fsdp=4, tensor=2), as jax 0.10.2 and 0.12.0.1 compile it for H100."""
    module = parse((FIXTURES / f"fsdp_jax_{version}.hlo").read_text())
    assert module.num_devices == 16
    loops = [i for i in module.entry.instructions.values() if i.opcode == "while"]
    assert [loop.trip_count for loop in loops] == [4, 3]
    found = set()
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            assert set(instruction.operands) <= set(computation.instructions)
            assert set(instruction.called("calls", "body", "condition", "to_apply")) <= set(module.computations)
            if "replica_groups" in instruction.attributes:
                groups = instruction.replica_groups(16)
                assert sorted(groups.ravel().tolist()) == list(range(16))
                found.add(tuple(groups[0].tolist()))
    assert found == {(0, 2, 4, 6), (0, 1), (0, 8)}


LOOP = """HloModule jit_f, is_scheduled=true

%fused_add (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %step = s32[] constant(STEP)
  ROOT %add = s32[] add(%p, %step)
}

%body (carry: (f32[8], s32[])) -> (f32[8], s32[]) {
  %carry = (f32[8]{0}, s32[]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%carry), index=0
  %i = s32[] get-tuple-element(%carry), index=1
  %copy = s32[] copy(%i)
  %next = s32[] fusion(%copy), kind=kLoop, calls=%fused_add
  ROOT %out = (f32[8]{0}, s32[]) tuple(%x, %next)
}

%cond (carry.1: (f32[8], s32[])) -> pred[] {
  %carry.1 = (f32[8]{0}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=1
  %end = s32[] constant(31)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %main (x.1: f32[8], n: s32[]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  %n = s32[] parameter(1)
  %one = s32[] constant(1)
  %tuple = (f32[8]{0}, s32[]) tuple(%x.1, %START)
  %while = (f32[8]{0}, s32[]) while(%tuple), condition=%cond, body=%body, backend_config={CONFIG}
  ROOT %result = f32[8]{0} get-tuple-element(%while), index=0
}
"""
COUNTER = '"known_induction_variable":{"tuple_index":"1"}'


@pytest.mark.parametrize(
    ("start", "step", "config", "trips"),
    [
        ("one", "1", COUNTER, 30),
        ("one", "7", COUNTER, 5),
        ("one", "0", COUNTER, None),
        ("n", "1", COUNTER, None),
        ("one", "1", "", None),
    ],
)
def test_a_loop_without_a_count_is_counted(start, step, config, trips):
    module = parse(LOOP.replace("START", start).replace("STEP", step).replace("CONFIG", config))
    assert module.entry.instructions["while"].trip_count == trips
