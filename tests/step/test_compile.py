"""The XLA options of the training step: types, precedence, and options that a jaxlib does not support."""

import dataclasses

import jax
import jaxlib.version
import pytest

from llamajax.config.machine import XlaConfig
from llamajax.config.parallel import PLAIN, MeshConfig, ParallelConfig
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.estimates.formulas import layer_matrix_bytes, num_matmul_params
from llamajax.step.compile import compile_with, compiler_options, told
from llamajax.step.resolve import ResolvedRun, resolve
from tests.tiny import tiny_config


def on(config: Config, num_devices: int) -> ResolvedRun:
    return resolve(config, config.mesh.axis_sizes(num_devices))


def with_flags(*flags: str):
    return tiny_config(xla=XlaConfig(flags=flags))


def test_every_option_is_known_to_this_jaxlib():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    for stack in ("scan", "prefetch"):
        parallel = dataclasses.replace(PLAIN, stack=stack)
        config = tiny_config(parallel=parallel)
        compile_with(lowered, compiler_options(on(config, 512), latencies="costs.pbtxt"))


def test_the_users_flags_replace_ours():
    ours = compiler_options(on(tiny_config(), 8))
    name = "xla_gpu_enable_latency_hiding_scheduler"
    assert ours[name] is True
    assert compiler_options(on(with_flags(f"{name}=false"), 8)) == ours | {name: False}


def test_deterministic_excludes_kernels_with_atomics_on_any_number_of_devices():
    config = tiny_config(xla=XlaConfig(deterministic=True))
    for num_devices in (1, 8):
        options = compiler_options(on(config, num_devices))
        assert options["xla_gpu_exclude_nondeterministic_ops"] is True
        assert options.items() - compiler_options(on(tiny_config(), num_devices)).items() == {
            ("xla_gpu_exclude_nondeterministic_ops", True)
        }
    compile_with(jax.jit(lambda x: x + 1).lower(1.0), options)


def test_values_have_their_types():
    options = compiler_options(on(with_flags("xla_a=7", "xla_b=TRUE", "xla_c=LHS", "xla_d=a=b", "xla_e=false"), 1))
    assert options == {"xla_a": "7", "xla_b": True, "xla_c": "LHS", "xla_d": "a=b", "xla_e": False}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("xla_gpu_no_such_thing=1", "does not support xla_gpu_no_such_thing"),
        ("xla_gpu_memory_limit_slop_factor=much", "'much' is no valid int32 value for xla_gpu_memory_limit_slop_factor"),
        ("xla_gpu_enable_latency_hiding_scheduler=2", "xla_gpu_enable_latency_hiding_scheduler"),
    ],
)
def test_what_this_jaxlib_does_not_know_is_told_in_one_line(flag, message):
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    with pytest.raises(ConfigError) as caught:
        compile_with(lowered, compiler_options(on(with_flags(flag), 1)))
    assert message in str(caught.value)
    assert str(caught.value).startswith("xla.flags: ")
    assert "\n" not in str(caught.value)


def test_what_is_told_can_be_given_as_flags():
    """Every option as it was, whatever its type, after the jaxlib and the devices that it is for."""
    parallel = dataclasses.replace(PLAIN, stack="prefetch")
    options = compiler_options(on(tiny_config(parallel=parallel), 8)) | {"xla_a": "LHS=1", "xla_b": False}
    line = told(options, "NVIDIA H100 80GB HBM3")
    start = f"jaxlib {jaxlib.version.__version__}, NVIDIA H100 80GB HBM3: "
    assert line.startswith(f"{start}xla_")
    flags = line.removeprefix(start).split(" ")
    assert compiler_options(on(with_flags(*flags), 1)) == options
    assert told({}, "cpu") == f"jaxlib {jaxlib.version.__version__}, cpu: none"


@pytest.mark.parametrize("flag", ["--xla_a=1", "xla_a", "xla_a=", "a=1"])
def test_flags_are_written_as_name_and_value(flag):
    with pytest.raises(ConfigError, match="flags: "):
        XlaConfig(flags=(flag,))


def test_one_device_has_nothing_to_hide():
    assert compiler_options(on(tiny_config(), 1)) == {}


def test_a_layer_is_one_collective_where_it_is_prefetched():
    config = tiny_config(parallel=dataclasses.replace(PLAIN, stack="prefetch"), mesh=MeshConfig(fsdp=4, tensor=2))
    options = compiler_options(on(config, 8))
    layer = layer_matrix_bytes(config.model, config.mesh.axis_sizes(8))
    for collective in ("all_gather", "reduce_scatter"):
        assert layer < int(options[f"xla_gpu_{collective}_combine_threshold_bytes"]) < 1.05 * layer
    assert not options["xla_gpu_enable_while_loop_double_buffering"]
    informed = compiler_options(on(config, 8), latencies="file")
    assert informed["xla_gpu_enable_while_loop_double_buffering"]
    assert informed == compiler_options(on(config, 8), untimed=True) | {
        "xla_gpu_pgle_profile_file_or_directory_path": "file"
    }


def test_iterations_with_parts_that_take_turns_have_one_layer():
    mesh = {"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2, "model.experts.num_experts": 8, "parallel": PLAIN}
    config = tiny_config().changed(mesh | {"parallel.stack": "prefetch", "parallel.expert_parts": 2})
    assert not compiler_options(on(config, 8), latencies="file")["xla_gpu_enable_while_loop_double_buffering"]
    assert compiler_options(on(config, 8), untimed=True) == compiler_options(on(config, 8))


def test_a_layer_of_copied_heads_is_one_collective_too():
    config = tiny_config(parallel=dataclasses.replace(PLAIN, stack="prefetch"), mesh=MeshConfig(tensor=8))
    config = config.changed({"model.num_heads": 8, "model.num_kv_heads": 2})
    computed = num_matmul_params(config.changed({"model.num_kv_heads": 8}).model)
    layer = 2 * (computed - config.model.vocab_size * config.model.embed_dim) // config.model.num_layers // 8
    options = compiler_options(on(config.changed({"model.compute_dtype": "bfloat16"}), 8))
    assert layer < int(options["xla_gpu_all_gather_combine_threshold_bytes"]) < 1.05 * layer


def test_passes_that_compute_wrong_numbers_stay_disabled():
    base = {"mesh": MeshConfig(fsdp=8), "parallel": dataclasses.replace(PLAIN, stack="prefetch")}
    ours = compiler_options(on(tiny_config(**base), 8))["xla_disable_hlo_passes"]
    flags = ("xla_disable_hlo_passes=a,b", "xla_gpu_enable_latency_hiding_scheduler=false")
    options = compiler_options(on(tiny_config(**base, xla=XlaConfig(flags=flags)), 8))
    assert options["xla_disable_hlo_passes"] == f"{ours},a,b"
    assert "all-gather-to-collective-permute-simplifier" in str(ours)
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is False


def test_the_scheduler_counts_on_the_memory_that_arrays_may_take(monkeypatch):
    name = "xla_gpu_memory_limit_slop_factor"
    assert compiler_options(on(tiny_config(), 8))[name] == "115"  # 92% of the card for the 80% that XLA assumes
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    assert compiler_options(on(tiny_config(), 8))[name] == "75"


@pytest.mark.parametrize(("stack", "tensor"), [("prefetch", "collective"), ("prefetch", "ring"), ("scan", "ring")])
def test_weights_do_not_wait_for_the_hops_of_a_ring(stack, tensor):
    parallel = dataclasses.replace(PLAIN, stack=stack, tensor=tensor)
    options = compiler_options(on(tiny_config(parallel=parallel, mesh=MeshConfig(tensor=8)), 8))
    limit = options.get("xla_gpu_experimental_parallel_collective_overlap_limit")
    assert limit == ("2" if tensor == "ring" else None)


@pytest.mark.parametrize(("parts", "limit"), [(1, None), (2, "3")])
def test_weights_and_gradients_do_not_wait_for_tokens_that_travel(parts, limit):
    parallel = dataclasses.replace(PLAIN, stack="prefetch", expert_parts=parts)
    config = tiny_config(parallel=parallel, mesh=MeshConfig(fsdp=2, expert=4)).changed({"model.experts.num_experts": 8})
    assert compiler_options(on(config, 8)).get("xla_gpu_experimental_parallel_collective_overlap_limit") == limit


def test_stages_have_communicators_of_their_own_and_send_while_others_gather():
    """XLA of this jaxlib supports every option of a pipeline."""
    config = tiny_config(mesh=MeshConfig(pipeline=2, fsdp=2, tensor=2), parallel=ParallelConfig(zero=1))
    options = compiler_options(on(config, 8))
    assert options["xla_gpu_collective_permute_connected_components"] is True
    assert options["xla_gpu_experimental_parallel_collective_overlap_limit"] == "2"
    compile_with(jax.jit(lambda x: x + 1).lower(1.0), options)
    without = compiler_options(on(config.changed({"mesh.pipeline": 1, "mesh.fsdp": 4}), 8))
    assert "xla_gpu_collective_permute_connected_components" not in without
