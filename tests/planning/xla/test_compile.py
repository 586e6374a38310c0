"""Compiling the training step for a cluster: the errors everywhere, the rest where XLA's compiler for GPUs is installed."""

import dataclasses
import importlib.metadata
import re

import jax
import jaxlib.version
import numpy as np
import pytest
from jax.experimental import topologies

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.machine import HardwareConfig, XlaConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import TrainConfig
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.estimates.formulas import layer_matrix_bytes, mesh_sizes, minimum_state_bytes
from llamajax.estimates.machine import planned_machine
from llamajax.planning.cost.attention import scores_of_calls
from llamajax.planning.cost.kernels import CostModel
from llamajax.planning.fitting import suggestions
from llamajax.planning.memory import MemoryPlan, estimate, memory_plan
from llamajax.planning.xla import compile as planning_compile
from llamajax.planning.xla.compile import CompiledStep, CompilerMissingError, check_compiler, compile_for
from llamajax.planning.xla.hlo import arrays
from llamajax.planning.xla.parse import parse
from llamajax.step.compile import Option, compile_with, compiler_options, lower
from llamajax.step.resolve import resolve_planned
from llamajax.step.state import abstract_state
from tests.tiny import tiny_config

CONFIG = tiny_config(
    model=ModelConfig(
        vocab_size=32000, embed_dim=4096, mlp_dim=11008, num_layers=4, num_heads=32, num_kv_heads=8, head_dim=128,
    ),
    data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=4096),
    train=TrainConfig(num_steps=100, global_batch_size=16, grad_accum_steps=2),
    mesh=MeshConfig(fsdp=8, tensor=2),
    hardware=HardwareConfig(gpu="a100-80gb", nodes=2),
)  # fmt: skip
"""Four layers of 7B on two nodes."""


@pytest.fixture(scope="module")
def step(gpu_compiler) -> CompiledStep:
    return compile_for(resolve_planned(CONFIG))


def installed(monkeypatch, versions: dict[str, str]) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(planning_compile.importlib.metadata, "version", version)


def test_a_missing_compiler_is_told_with_the_remedy(monkeypatch):
    installed(monkeypatch, {})
    with pytest.raises(CompilerMissingError, match=r"jax-cuda13-plugin.*pip install 'llamajax\[plan\]'") as caught:
        compile_for(resolve_planned(CONFIG))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_compiler_of_another_version_is_told(monkeypatch):
    installed(monkeypatch, {"jax-cuda13-plugin": "0.1.0"})
    with pytest.raises(CompilerMissingError, match=r"0\.1\.0 does not fit jaxlib"):
        check_compiler()


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_no_kernel_of_the_step_adds_with_atomics(tmp_path):
    """Reads the assembly of all kernels, the gradient of the embedding and attention over packed rows among them."""
    model = dataclasses.replace(CONFIG.model, embed_dim=512, mlp_dim=1024, num_layers=1, num_heads=4, num_kv_heads=2)
    config = CONFIG.changed({"hardware.gpu": "h100", "hardware.nodes": 1, "data.seq_len": 2048, "mesh.tensor": 1})
    run = resolve_planned(dataclasses.replace(config, model=model))
    config = run.config
    mesh = planning_compile.planned_mesh(config)
    dump: dict[str, Option] = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_module_re": ".*", "xla_dump_emitter_re": "ptx"}
    options = compiler_options(run) | dump
    with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
        compile_with(lower(run, abstract_state(config)), options)
    assembly = {path.name: path.read_text() for path in tmp_path.glob("*.ptx")}
    assert len(assembly) > 20
    assert [name for name, text in assembly.items() if re.search(r"\b(atom|red)\.", text)] == []


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_a_deterministic_step_is_planned():
    changes = {"xla.deterministic": True, "xla.flags": ("xla_gpu_deterministic_ops=true",)}
    step = compile_for(resolve_planned(tiny_config(hardware=HardwareConfig(gpu="h100")).changed(changes)))
    assert not [name for name in step.options if "determin" in name]


UNEVEN = dataclasses.replace(CONFIG.model, num_heads=40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": HardwareConfig()}, r"hardware\.gpu: .*a100-40gb, a100-80gb, h100, h200"),
        ({"hardware": HardwareConfig(gpu="h100", nodes=3)}, "mesh: .* 24 devices"),
        ({"mesh": MeshConfig(fsdp=1, tensor=16), "model": UNEVEN}, r"model\.num_kv_heads: 8 must be divisible by mesh\.ten"),
    ],
)
def test_what_cannot_be_laid_over_the_cluster_is_refused(monkeypatch, changes, message):
    installed(monkeypatch, {"jax-cuda13-plugin": jaxlib.version.__version__})
    with pytest.raises(ConfigError, match=message):
        compile_for(resolve_planned(dataclasses.replace(CONFIG, **changes)))


@pytest.mark.slow
def test_the_memory_is_xlas_own_to_the_byte(step):
    buffers = step.buffers
    assert step.peak_bytes == buffers.argument_bytes + buffers.other_bytes + buffers.arena_bytes - buffers.gap_bytes
    plan = memory_plan(step, parse(step.hlo))
    batch = plan.by_kind["batch"]
    assert plan.argument_bytes - batch == pytest.approx(minimum_state_bytes(CONFIG), rel=1e-6)
    assert plan.argument_bytes == pytest.approx(minimum_state_bytes(CONFIG), rel=0.01)
    assert plan.peak_bytes == pytest.approx(estimate(resolve_planned(CONFIG)).peak_bytes, rel=0.25)
    assert plan.host_bytes == 0
    assert plan.fits


@pytest.mark.slow
def test_the_update_reads_and_writes_the_state_once(step):
    """Weights and two moments are read and written, gradients read, and once more before, for their norm."""
    module = parse(step.hlo)
    costs = CostModel(module, planned_machine(CONFIG), scores_of_calls(step.run))
    entry = module.entry.instructions.values()
    update = [i for i in entry if "/update/" in i.op_name or i.opcode == "copy"]
    norm = [i for i in update if i.op_name.endswith("reduce_sum")]
    whole, of_norm = (sum(costs.cost(i, module.entry).num_bytes for i in some) for some in (update, norm))
    state = minimum_state_bytes(CONFIG)
    assert 1.0 <= (whole - of_norm) / (state * 7 / 3) <= 1.1
    assert 1.0 <= of_norm / (state / 3) <= 1.1


@pytest.mark.slow
def test_the_program_is_for_all_devices_and_tensor_stays_within_a_node(step):
    module = parse(step.hlo)
    assert module.num_devices == 16
    groups = [
        instruction.replica_groups(16)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if "replica_groups" in instruction.attributes
    ]
    pairs = [group for group in groups if group.shape == (8, 2)]
    assert pairs, "tensor parallelism without a collective"
    for group in pairs:
        np.testing.assert_array_equal(np.sort(group, axis=None).reshape(8, 2), np.arange(16).reshape(8, 2))
        assert (np.abs(group[:, 0] - group[:, 1]) == 1).all()


@pytest.mark.slow
def test_the_current_mesh_stays(gpu_compiler):
    before = jax.sharding.get_mesh()
    with pytest.raises(ConfigError, match=r"xla\.flags: .* does not support xla_gpu_no_such_thing"):
        compile_for(resolve_planned(CONFIG.changed({"xla.flags": ("xla_gpu_no_such_thing=1",), "model.num_layers": 1})))
    assert jax.sharding.get_mesh() == before


@pytest.mark.slow
def test_where_xla_is_told_to_dump_its_programs_is_no_matter(gpu_compiler, tmp_path):
    """Two configurations that differ only in it have the same program and memory; nothing is dumped."""
    flags = ("xla_dump_to=" + str(tmp_path), "xla_dump_hlo_module_re=none", "xla_dump_compress_protos=true")
    config = tiny_config(hardware=HardwareConfig(gpu="h100"), xla=XlaConfig(flags=flags))
    step = compile_for(resolve_planned(config))
    assert memory_plan(step, parse(step.hlo)).argument_bytes > 0
    assert not any(name.startswith("xla_dump") for name in step.options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_directory_for_temporary_files_that_is_missing_is_named(gpu_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    with pytest.raises(EnvironmentMismatchError, match=rf"^TMPDIR: .* cannot write to {tmp_path}/gone; set it to") as caught:
        compile_for(resolve_planned(tiny_config(hardware=HardwareConfig(gpu="h100"))))
    assert "\n" not in str(caught.value)


def test_a_compiler_that_jax_cannot_load_is_told_with_the_remedy(gpu_compiler, monkeypatch):
    describe = topologies.get_topology_desc
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **known: describe(**known | {"platform": "unloaded"}))
    with pytest.raises(
        CompilerMissingError, match=r"could not load its CUDA plugin.*unloaded.*pip install 'llamajax\[plan\]'"
    ):
        compile_for(resolve_planned(CONFIG))


@pytest.mark.parametrize(
    "message",
    ["UNAVAILABLE: No PTX compilation provider is available.", "INTERNAL: libdevice not found at ./libdevice.10.bc"],
)
def test_missing_tools_of_cuda_are_told_with_the_remedy(gpu_compiler, monkeypatch, message):
    def fail(lowered, options):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(planning_compile, "compile_with", fail)
    with pytest.raises(CompilerMissingError, match=r"ptxas and libdevice.*pip install 'llamajax\[plan\]'"):
        compile_for(resolve_planned(CONFIG.changed({"model.num_layers": 1})))


@pytest.mark.long
def test_what_is_suggested_was_compiled_and_fits(gpu_compiler):
    too_large = CONFIG.changed(
        {"model.num_layers": 2, "model.remat": "none", "hardware.gpu": "a100-40gb", "train.global_batch_size": 512}
    )
    assert not estimate(resolve_planned(too_large)).fits
    seconds: list[Config] = []

    def compiled(config: Config) -> tuple[MemoryPlan, float]:
        step = compile_for(resolve_planned(config))
        seconds.append(config)
        return memory_plan(step, parse(step.hlo)), float(len(seconds))

    found = suggestions(too_large, compiled(too_large)[0], compiled=compiled)
    assert len(found) == 3
    assert [suggestion.step_time_s for suggestion in found] == sorted(suggestion.step_time_s for suggestion in found)
    for suggestion in found:
        assert suggestion.memory.fits
        assert suggestion.candidate.changes
        assert isinstance(suggestion.candidate.config, Config)


@pytest.mark.long
def test_matmuls_multiply_and_collectives_carry_eight_bits(gpu_compiler):
    changes = {"hardware.gpu": "h100", "model.matmul_dtype": "float8", "model.num_layers": 2, "train.grad_accum_steps": 1}
    module = parse(compile_for(resolve_planned(CONFIG.changed(changes))).hlo)
    products, gathered = [], []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            dtypes = tuple(array.dtype for shape in computation.operand_shapes(instruction) for array in arrays(shape))
            if instruction.opcode == "dot" and re.search("qkv|projection|gate_up", instruction.op_name):
                products.append(dtypes)
            if instruction.opcode == "all-gather-start" and "layers" in instruction.op_name:
                gathered += dtypes
    forward, backward = ("f8e4m3fn", "f8e4m3fn"), {"f8e4m3fn", "f8e5m2"}
    assert products.count(forward) >= 4
    assert sum(set(dtypes) == backward for dtypes in products) >= 8
    assert all(dtypes == forward or set(dtypes) == backward for dtypes in products)
    assert set(gathered) == {"f8e4m3fn", "f8e5m2"}  # weights and tokens; gradients of tokens, over the tensor axis


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    ("stack", "remat", "micro_batches"),
    [
        pytest.param("prefetch", "save_attention", 2, marks=pytest.mark.long),
        pytest.param("unrolled", "full", 1, marks=pytest.mark.long),
        pytest.param("prefetch", "full", 1, marks=pytest.mark.long),
        pytest.param("unrolled", "save_attention", 2, marks=pytest.mark.long),
    ],
)
def test_prefetched_layers_take_five_layers_weights_more_than_a_plain_loop(stack, remat, micro_batches):
    """Though XLA makes straight lines of loops: no micro-batch's memory beside another's; and though what is computed again
    was computed before, in the same line: it is not kept."""
    config = CONFIG.changed({
        "mesh.fsdp": 16, "mesh.tensor": 1, "train.global_batch_size": 128 * micro_batches,
        "train.grad_accum_steps": micro_batches, "model.remat": remat, "parallel.grad_reduce": "micro",
    })  # fmt: skip
    plain, prefetched = (
        compile_for(resolve_planned(config.changed({"parallel.stack": form})), untimed=True).peak_bytes
        for form in ("scan", stack)
    )
    assert prefetched <= plain + 5 * layer_matrix_bytes(config.model, mesh_sizes(config))


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    ("gpu", "kernel"),
    [
        ("rtx-4090", "pallas"),
        pytest.param("rtx-3090", "cudnn", marks=pytest.mark.slow),
        *(
            pytest.param(gpu, kernel, marks=pytest.mark.long)
            for gpu, kernel in (
                ("rtx-5090", "pallas"),
                ("rtx-5090", "cudnn"),
                ("rtx-4090", "cudnn"),
                ("b200", "pallas"),
                ("b200", "cudnn"),
                ("rtx-3090", "pallas"),
            )
        ),
    ],
)
def test_every_architecture_has_a_step(gpu, kernel):
    """With attention by cuDNN and by our own kernels, where the card has what they need; and in float8, where it multiplies
    such."""
    config = tiny_config(
        model=ModelConfig(
            vocab_size=256, embed_dim=256, mlp_dim=512, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=128,
            attend_across_documents=kernel == "cudnn", matmul_dtype="compute_dtype" if gpu == "rtx-3090" else "float8",
        ),
        data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=256),
        train=TrainConfig(num_steps=10, global_batch_size=1),
        mesh=MeshConfig(),
        hardware=HardwareConfig(gpu=gpu, gpus_per_node=1),
    )  # fmt: skip
    hlo = compile_for(resolve_planned(config)).hlo
    assert ("__cudnn$fmhaSoftmaxBackward" in hlo) == (kernel == "cudnn")
    assert ("attention_backward_keys" in hlo) == (kernel == "pallas")
    assert ("f8e4m3fn" in hlo) == (gpu != "rtx-3090")
