"""The latency profile: names as XLA's scheduler knows them, and what XLA makes of it."""

import pathlib

import pytest

from llamajax.errors import ConfigError
from llamajax.estimates.communication import least_wire_bytes
from llamajax.estimates.formulas import num_matmul_params
from llamajax.estimates.gpus import planned_gpu
from llamajax.estimates.machine import Machine
from llamajax.planning.cost.attention import scores_of_calls
from llamajax.planning.cost.replay import replay
from llamajax.planning.latencies import latency_text, read_latencies
from llamajax.planning.xla.compile import compile_for
from llamajax.planning.xla.parse import parse
from llamajax.step.resolve import resolve_planned
from tests.planning.modules import MACHINE, memory_s, module
from tests.planning.profiles import CONFIG, COSTS, TEXT, binary, costs

FIXTURES = pathlib.Path(__file__).parent / "hlo"
MESH = {"data": 2, "fsdp": 4, "tensor": 2}


def test_tells_microseconds_by_the_name_at_scheduling():
    """A kernel renamed since, a loop of three iterations, its kernel and its condition; what is free is not told."""
    body = """body:
    %t = (f32[1000000]{0}) parameter(0)
    %x = f32[1000000]{0} get-tuple-element(%t), index=0
    %y = f32[1000000]{0} negate(%x)
    %r = (f32[1000000]{0}) tuple(%y)

    cond:
    %t = (f32[1000000]{0}) parameter(0)
    %r = pred[] compare(%t, %t)"""
    program = module(
        """%x = f32[1000000]{0} parameter(0)
        %a.clone = f32[1000000]{0} add(%x, %x), metadata={op_name="add" scheduling_name="a"}
        %t = (f32[1000000]{0}) tuple(%a.clone)
        %while = (f32[1000000]{0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}""",
        body,
    )
    told = costs(latency_text(replay(program, MACHINE, {"data": 8}).latencies))
    assert told == {
        "a": pytest.approx(memory_s(12e6) * 1e6, abs=1e-3),
        "y": pytest.approx(memory_s(8e6) * 1e6, abs=1e-3),
        "while": pytest.approx(3 * memory_s(8e6) * 1e6, abs=1e-3),
        "r": pytest.approx(memory_s(3) * 1e6, abs=1e-3),
    }


@pytest.mark.parametrize("version", ["0.10", "0.12"])
def test_covers_every_kernel_and_collective_that_is_scheduled(version):
    program = parse((FIXTURES / f"fsdp_jax_{version}.hlo").read_text())
    found = costs(latency_text(replay(program, MACHINE, MESH).latencies))
    loops = [i for c in program.computations.values() for i in c.instructions.values() if i.opcode == "while"]
    scheduled = [program.entry, *(program.computations[name] for loop in loops for name in loop.called("body", "condition"))]
    for computation in scheduled:
        for instruction in computation.instructions.values():
            if instruction.opcode in ("fusion", "while") or instruction.opcode.endswith("-start"):
                assert found[instruction.scheduling_name] > 0
    assert found["while.24"] > 4 * found["all-gather-start"]


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    "stack", [pytest.param("scan", marks=pytest.mark.long), pytest.param("prefetch", marks=pytest.mark.long)]
)
def test_the_real_step_is_understood_and_its_exposed_time_shrinks(tmp_path, stack):
    """The training step itself, compiled for 16 H100 with half a network, without and with its profile."""
    mesh = {"pipeline": 1, "data": 1, "fsdp": 16, "sequence": 1, "tensor": 1}
    config = CONFIG.changed({"parallel.stack": stack})
    machine = Machine(gpu=planned_gpu(config.hardware), gpus_per_node=8)
    blind = parse(compile_for(resolve_planned(config), untimed=True).hlo)
    scores = scores_of_calls(resolve_planned(config))
    assert scores is not None
    before = replay(blind, machine, mesh, scores)
    assert not before.not_understood
    assert {use.collective.axis for use in before.collectives} == {"fsdp"}

    # Forward, backward, and all that full remat runs again: everything but the MLP's last product. Attention takes two
    # products forward, two again, and backward three for the queries and four for the keys.
    model, tokens = config.model, 2 * 2048
    head = model.vocab_size * model.embed_dim
    layers = num_matmul_params(model) - head
    weights = 6 * head + 8 * layers - 2 * model.num_layers * model.embed_dim * model.mlp_dim
    seen = 2 * model.num_layers * model.num_heads * model.head_dim * (7 * scores.by_queries + 4 * scores.by_keys)
    assert before.flops == pytest.approx(tokens * (weights + seen), rel=0.01)

    assert sum(before.wire_bytes.values()) == pytest.approx(least_wire_bytes(resolve_planned(config).config, mesh), rel=0.01)

    file = tmp_path / "profile.pbtxt"
    file.write_text(latency_text(before.latencies))
    informed = parse(compile_for(resolve_planned(config), latencies=str(file)).hlo)
    after = replay(informed, machine, mesh, scores)
    assert after.flops == before.flops
    assert list(informed.entry.instructions) != list(blind.entry.instructions)
    assert after.exposed_comm_s < before.exposed_comm_s


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        b'costs {\n  name: "all-gather-start"\n  cost_us: 7\n}\ncosts: { name: "fusion.1.remat", cost_us: 2.5e-1 }',
        binary(COSTS),
    ],
    ids=["ours", "text", "binary"],
)
def test_a_measured_profile_is_text_or_binary(tmp_path, content):
    file = tmp_path / "measured"
    file.write_bytes(content)
    assert read_latencies(str(file)) == TEXT


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        bytes(range(256)),
        TEXT.encode()[:-20],
        b'costs { name: "a" cost_us: much }',
        binary(COSTS)[:-3],
        b"\x0a\x05hello",
        b"# a run\nnum_layers: 2\n",
    ],
)
def test_what_holds_no_latencies_is_refused_in_one_line(tmp_path, content):
    file = tmp_path / "measured.pbtxt"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="contains no latencies") as caught:
        read_latencies(str(file))
    assert str(caught.value).startswith("xla.latency_profile: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["missing.pbtxt", ".", "~nosuchuser/latencies.pbtxt"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^xla\.latency_profile: .* cannot be read: "):
        read_latencies(path)
