"""The latency profile: names as XLA's scheduler knows them, and what XLA makes of it."""

import pathlib
import re
import struct

import jax
import pytest
from jax.sharding import NamedSharding

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.formulas import least_wire_bytes, num_matmul_params
from llamajax.config.gpus import planned_gpu
from llamajax.config.machine import HardwareConfig, XlaConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.parallel.mesh import make_mesh
from llamajax.planning import latencies
from llamajax.planning.cost.gpu import Machine
from llamajax.planning.cost.replay import replay
from llamajax.planning.latencies import gpu_options, latency_source, latency_text, read_latencies
from llamajax.planning.xla.compile import compile_for, planned_mesh
from llamajax.planning.xla.parse import parse
from llamajax.step.compile import Option
from llamajax.step.step import abstract_state, lower
from tests.planning.modules import MACHINE, memory_s, module

FIXTURES = pathlib.Path(__file__).parent / "hlo"
LINE = re.compile(r'costs \{ name: "([\w.\-]+)" cost_us: ([\d.]+) \}')
MESH = {"data": 2, "fsdp": 4, "tensor": 2}


def costs(text: str) -> dict[str, float]:
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert None not in found
    return {match[1]: float(match[2]) for match in found if match}


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
    assert costs(latency_text(program, MACHINE, {"data": 8})) == {
        "a": pytest.approx(memory_s(12e6) * 1e6, abs=1e-3),
        "y": pytest.approx(memory_s(8e6) * 1e6, abs=1e-3),
        "while": pytest.approx(3 * memory_s(8e6) * 1e6, abs=1e-3),
        "r": pytest.approx(memory_s(3) * 1e6, abs=1e-3),
    }


@pytest.mark.parametrize("version", ["0.10", "0.12"])
def test_covers_every_kernel_and_collective_that_is_scheduled(version):
    program = parse((FIXTURES / f"fsdp_jax_{version}.hlo").read_text())
    found = costs(latency_text(program, MACHINE, MESH))
    loops = [i for c in program.computations.values() for i in c.instructions.values() if i.opcode == "while"]
    scheduled = [program.entry, *(program.computations[name] for loop in loops for name in loop.called("body", "condition"))]
    for computation in scheduled:
        for instruction in computation.instructions.values():
            if instruction.opcode in ("fusion", "while") or instruction.opcode.endswith("-start"):
                assert found[instruction.scheduling_name] > 0
    assert found["while.24"] > 4 * found["all-gather-start"]


CONFIG = Config(
    run_dir="run",
    model=ModelConfig(
        vocab_size=4096, embed_dim=2048, mlp_dim=8192, num_layers=6, num_heads=16, num_kv_heads=4, head_dim=128, remat="full"
    ),
    data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=2048),
    mesh=MeshConfig(fsdp=16),
    train=TrainConfig(num_steps=100, global_batch_size=32, grad_accum_steps=2),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    hardware=HardwareConfig(gpu="h100", nodes=2, node_bandwidth=200e9),
)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_the_real_step_is_understood_and_its_exposed_time_shrinks(tmp_path):
    """The training step itself, compiled for 16 H100 with half a network, without and with its profile."""

    machine = Machine(gpu=planned_gpu(CONFIG.hardware), gpus_per_node=8)
    mesh = {"data": 1, "fsdp": 16, "sequence": 1, "tensor": 1}
    blind = parse(compile_for(CONFIG).hlo)
    before = replay(blind, machine, mesh)
    assert not before.not_understood
    assert {use.collective.axis for use in before.collectives} == {"fsdp"}

    # Forward, backward, and all that full remat runs again: everything but the MLP's last product. Attention takes two
    # products forward, two again, and five backward or four, if XLA sees that the scores are already there.
    model, tokens = CONFIG.model, 2 * 2048
    head = model.vocab_size * model.embed_dim
    layers = num_matmul_params(model) - head
    weights = 6 * head + 8 * layers - 2 * model.num_layers * model.embed_dim * model.mlp_dim
    square = 2 * model.num_layers * model.num_heads * model.head_dim * 2048
    assert any(before.flops == pytest.approx(tokens * (weights + n * square), rel=0.01) for n in (8, 9))

    assert sum(before.wire_bytes.values()) == pytest.approx(least_wire_bytes(CONFIG, mesh), rel=0.01)

    file = tmp_path / "profile.pbtxt"
    file.write_text(latency_text(blind, machine, mesh))
    informed = parse(compile_for(CONFIG, latencies=str(file)).hlo)
    after = replay(informed, machine, mesh)
    assert after.flops == before.flops
    assert list(informed.entry.instructions) != list(blind.entry.instructions)
    assert after.exposed_comm_s < before.exposed_comm_s


COSTS = {"all-gather-start": 7.0, "fusion.1.remat": 0.25}
TEXT = 'costs { name: "all-gather-start" cost_us: 7.000 }\ncosts { name: "fusion.1.remat" cost_us: 0.250 }\n'


def binary(costs: dict[str, float]) -> bytes:
    """A `ProfiledInstructionsProto` on the wire."""
    entries = [b"\x0a" + bytes([len(n)]) + n.encode() + b"\x11" + struct.pack("<d", us) for n, us in costs.items()]
    return b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in entries)


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
    with pytest.raises(ConfigError, match="holds no latencies") as caught:
        read_latencies(str(file))
    assert str(caught.value).startswith("xla.latency_profile: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["missing.pbtxt", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^xla\.latency_profile: .* cannot be read: "):
        read_latencies(path)


@pytest.fixture
def lowered(monkeypatch):
    """A program over eight devices that is no training step, and the options of the compilations for its latencies.

    In place of a compiler that schedules by latencies: one that drops half of the program when it is told some.
    """
    jax.set_mesh(make_mesh(MeshConfig()))
    x = jax.ShapeDtypeStruct((1 << 20,), "float32", sharding=NamedSharding(jax.sharding.get_mesh(), jax.P("fsdp")))
    made, faster = jax.jit(lambda x: (x * 2, x.sum())).lower(x), jax.jit(lambda x: x.sum()).lower(x)
    compilations = []

    def compile_with(lowered, options):
        compilations.append(options)
        return (faster if "xla_gpu_pgle_profile_file_or_directory_path" in options else lowered).compile()

    monkeypatch.setattr(latencies, "compile_with", compile_with)
    return made, compilations


def latency_file(config, lowered) -> Option | None:
    return gpu_options(config, lowered).get("xla_gpu_pgle_profile_file_or_directory_path")


def with_xla(tmp_path, **settings) -> Config:
    return CONFIG.changed({"data.cache_dir": str(tmp_path / "cache"), "xla": XlaConfig(**settings)})


def test_training_uses_the_file_that_the_plan_reads(tmp_path, lowered):
    file = tmp_path / "measured"
    file.write_bytes(binary(COSTS))
    made, compilations = lowered
    config = with_xla(tmp_path, latency_profile=str(file))
    path = gpu_options(config, made)["xla_gpu_pgle_profile_file_or_directory_path"]
    assert str(path).endswith(".pbtxt")  # what XLA takes for text
    assert pathlib.Path(str(path)).read_text() == read_latencies(str(file)) == TEXT
    assert compilations == []
    file.write_text("garbage")
    with pytest.raises(ConfigError, match="holds no latencies"):
        gpu_options(config, made)


def test_processes_with_different_files_do_not_start(tmp_path, lowered, monkeypatch):
    file = tmp_path / "measured.pbtxt"
    file.write_text(TEXT)
    monkeypatch.setattr(latencies, "everyones", lambda value: [value, "another"])
    with pytest.raises(EnvironmentMismatchError, match=r"^xla\.latency_profile: .* of process 1 is not that of process 0"):
        gpu_options(with_xla(tmp_path, latency_profile=str(file)), lowered[0])


def test_no_latencies_where_none_are_asked_for_or_nothing_is_known(tmp_path, lowered):
    made, compilations = lowered
    for config in (
        with_xla(tmp_path, latency_profile=None),
        with_xla(tmp_path).changed({"hardware": HardwareConfig()}),
    ):
        assert "xla_gpu_pgle_profile_file_or_directory_path" not in gpu_options(config, made)
    assert compilations == []
    assert [latency_source(CONFIG, devices) for devices in (1, 2)] == [None, "auto"]


def test_latencies_are_made_once_per_program_and_made_anew_when_the_file_is_damaged(tmp_path, lowered):
    made, compilations = lowered
    path = pathlib.Path(str(latency_file(with_xla(tmp_path), made)))
    text = path.read_text()
    assert costs(text)
    assert latency_file(with_xla(tmp_path), made) == str(path)
    assert len(compilations) == 2
    path.write_text("garbage")
    assert latency_file(with_xla(tmp_path), made) == str(path)
    assert (path.read_text(), len(compilations)) == (text, 4)
    pipelined = with_xla(tmp_path, flags=("xla_gpu_enable_while_loop_double_buffering=true",))
    assert latency_file(pipelined, made) != str(path)
    assert len(compilations) == 6


def test_latencies_that_do_not_help_are_left_out_of_training_as_of_plans(tmp_path, lowered, monkeypatch):
    made, compilations = lowered
    monkeypatch.setattr(
        latencies, "compile_with", lambda lowered, options: compilations.append(options) or lowered.compile()
    )
    for _ in range(2):
        assert latency_file(with_xla(tmp_path), made) is None
        assert len(compilations) == 2


def test_the_first_process_tells_the_others_its_latencies(tmp_path, lowered, monkeypatch):
    """Two hosts may have chosen other kernels; all must schedule alike, and compile together or not at all."""
    made, compilations = lowered
    monkeypatch.setattr(latencies, "everyones", lambda value: [TEXT, value])
    path = latency_file(with_xla(tmp_path), made)
    assert pathlib.Path(str(path)).read_text() == TEXT
    assert compilations == []


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_training_makes_its_profile_once(tmp_path, monkeypatch):
    config = CONFIG.changed({"data.cache_dir": str(tmp_path)})
    with jax.set_mesh(planned_mesh(config)):
        lowered = lower(config, abstract_state(config))
        made = gpu_options(config, lowered)
        path = pathlib.Path(str(made["xla_gpu_pgle_profile_file_or_directory_path"]))
        told = path.read_text()
        assert "all-gather-start" in told
        assert "reduce-scatter" in told
        monkeypatch.setattr(latencies, "compile_with", None)
        assert gpu_options(config, lowered) == made
        assert path.read_text() == told
        assert lowered.compile(compiler_options=made)
        other = config.changed({"hardware.node_bandwidth": 50e9})
        with pytest.raises(TypeError):  # another network: it would be compiled again
            gpu_options(other, lowered)
