"""The latencies that schedule training's step: kept files, and the same latencies in all processes."""

import dataclasses
import pathlib
import types

import jax
import pytest
from jax.sharding import NamedSharding

from llamajax.config.file import dump_config, load_config
from llamajax.config.machine import HardwareConfig, XlaConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.estimates.calibration import Constants
from llamajax.parallel.mesh import make_mesh
from llamajax.planning import schedule_choice, scheduling
from llamajax.planning.latencies import read_latencies
from llamajax.planning.scheduling import gpu_options, latency_source, resolve_here
from llamajax.planning.xla.compile import planned_mesh
from llamajax.step.compile import Option, compiler_options, lower
from llamajax.step.resolve import resolve_planned
from llamajax.step.state import abstract_state
from tests.estimates.test_calibration import MEASUREMENT
from tests.planning.profiles import CONFIG, COSTS, TEXT, binary, costs
from tests.tiny import tiny_config

CLUSTER_CONFIGS = sorted(
    path for path in (pathlib.Path(__file__).parents[2] / "configs").glob("*.yaml") if not path.stem.startswith("quickstart")
)
PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"


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
        return (faster if PROFILE in options else lowered).compile()

    monkeypatch.setattr(schedule_choice, "compile_with", compile_with)
    return made, compilations


def latency_file(config, lowered) -> Option | None:
    return gpu_options(resolve_here(config), lowered)[0].get(PROFILE)


def with_xla(tmp_path, **settings) -> Config:
    return CONFIG.changed({"data.cache_dir": str(tmp_path / "cache"), "xla": XlaConfig(**settings)})


def test_training_uses_the_file_that_the_plan_reads(tmp_path, lowered):
    file = tmp_path / "measured"
    file.write_bytes(binary(COSTS))
    made, compilations = lowered
    config = with_xla(tmp_path, latency_profile=str(file))
    path = gpu_options(resolve_here(config), made)[0][PROFILE]
    assert str(path).endswith(".pbtxt")  # what XLA takes for text
    assert pathlib.Path(str(path)).read_text() == read_latencies(str(file)) == TEXT
    assert compilations == []
    file.write_text("garbage")
    with pytest.raises(ConfigError, match="contains no latencies"):
        gpu_options(resolve_here(config), made)


def test_the_final_options_are_kept_with_what_was_compiled(tmp_path, lowered, monkeypatch):
    flag = "xla_gpu_memory_limit_slop_factor"
    config = with_xla(tmp_path, latency_profile=None, flags=(f"{flag}=90",))
    assert scheduling.compile_here(resolve_here(config), lowered[0]).options == {}  # the CPU takes none
    monkeypatch.setattr(scheduling.jax, "default_backend", lambda: "gpu")
    compilation = scheduling.compile_here(resolve_here(config), lowered[0])
    assert compilation.options == compiler_options(resolve_here(config))
    assert compilation.facts["options"][flag] == "90"
    assert not compilation.from_cache


def test_processes_with_different_files_do_not_start(tmp_path, lowered, monkeypatch):
    file = tmp_path / "measured.pbtxt"
    file.write_text(TEXT)
    monkeypatch.setattr(scheduling, "everyones", lambda value: [value, "another"])
    with pytest.raises(EnvironmentMismatchError, match=r"^xla\.latency_profile: .* of process 1 differs from process 0's"):
        gpu_options(resolve_here(with_xla(tmp_path, latency_profile=str(file))), lowered[0])


def test_no_latencies_where_none_are_asked_for_or_nothing_is_known(tmp_path, lowered):
    made, compilations = lowered
    for config in (
        with_xla(tmp_path, latency_profile=None),
        with_xla(tmp_path).changed({"hardware": HardwareConfig()}),
    ):
        assert PROFILE not in gpu_options(resolve_here(config), made)[0]
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


def test_latencies_are_those_of_measured_constants(tmp_path, lowered):
    made, compilations = lowered
    file = tmp_path / "h100.yaml"
    file.write_text(dump_config(dataclasses.replace(MEASUREMENT, constants=Constants(kernel_s=1e-4))))
    built_in = latency_file(with_xla(tmp_path), made)
    measured = latency_file(with_xla(tmp_path).changed({"hardware.calibration": str(file)}), made)
    assert len(compilations) == 4
    before, after = (costs(pathlib.Path(str(path)).read_text()) for path in (built_in, measured))
    assert before.keys() == after.keys()
    kernels = [name for name in before if after[name] != before[name]]
    assert [after[name] - before[name] for name in kernels] == pytest.approx([98.0] * len(kernels), abs=1e-2)  # microseconds
    assert kernels


def test_latencies_are_told_of_the_program_that_goes_by_them(tmp_path, lowered):
    """Which has other names where it is more than scheduled anew."""
    made, compilations = lowered
    config = with_xla(tmp_path).changed({"parallel.stack": "prefetch", "mesh.fsdp": -1, "train.grad_accum_steps": 1})
    path = latency_file(config, made)
    guessed, untimed, informed = compilations
    assert informed.items() - untimed.items() == {(PROFILE, informed[PROFILE])}
    assert guessed != untimed
    assert path is not None


def test_latencies_that_do_not_help_are_left_out_of_training_as_of_plans(tmp_path, lowered, monkeypatch):
    made, compilations = lowered
    monkeypatch.setattr(
        schedule_choice, "compile_with", lambda lowered, options: compilations.append(options) or lowered.compile()
    )
    for _ in range(2):
        assert latency_file(with_xla(tmp_path), made) is None
        assert len(compilations) == 2


@pytest.mark.parametrize("helps", [True, False])
def test_the_program_that_was_judged_is_the_one_that_trains(tmp_path, lowered, monkeypatch, helps):
    """With each way of scheduling it is compiled once; a later start compiles what is known to be better."""
    made, compilations = lowered
    if not helps:
        monkeypatch.setattr(
            schedule_choice, "compile_with", lambda lowered, told: compilations.append(told) or lowered.compile()
        )
    monkeypatch.setattr(scheduling, "compile_with", schedule_choice.compile_with)
    monkeypatch.setattr(scheduling.jax, "default_backend", lambda: "gpu")
    first = scheduling.compile_here(resolve_here(with_xla(tmp_path)), made)
    assert len(compilations) == 2
    assert (PROFILE in first.options) == helps
    again = scheduling.compile_here(resolve_here(with_xla(tmp_path)), made)
    assert len(compilations) == 3
    texts = [compiled.step.as_text() for compiled in (again, first) if isinstance(compiled.step, jax.stages.Compiled)]
    assert again.options == first.options
    assert len(texts) == 2
    assert texts[0] == texts[1]


def test_the_program_that_trains_is_found_again_by_its_options(tmp_path, lowered, monkeypatch):
    """A cache like jax's identifies programs by their options; another candidate program in it does not count."""
    made, compilations = lowered
    compile_with, kept = schedule_choice.compile_with, []

    def compile_or_load(lowered, options):
        if options in kept:
            jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        kept.append(options)
        return compile_with(lowered, options)

    monkeypatch.setattr(schedule_choice, "compile_with", compile_or_load)
    monkeypatch.setattr(scheduling, "compile_with", compile_or_load)
    monkeypatch.setattr(scheduling.jax, "default_backend", lambda: "gpu")
    config = with_xla(tmp_path)
    kept.append(compiler_options(resolve_here(config)))  # as XLA schedules it by its built-in estimates
    first = scheduling.compile_here(resolve_here(config), made)
    assert (len(compilations), first.from_cache) == (2, False)
    assert [options[PROFILE] for options in compilations if PROFILE in options] == [first.options[PROFILE]]
    again = scheduling.compile_here(resolve_here(config), made)
    assert (again.options, again.from_cache) == (first.options, True)


def test_latencies_of_a_start_that_was_killed_are_judged_anew(tmp_path, lowered, monkeypatch):
    made, compilations = lowered
    compile_with = schedule_choice.compile_with

    def killed(lowered, options):
        if PROFILE in options:
            assert costs(pathlib.Path(options[PROFILE]).read_text().partition("\n")[2])
            raise KeyboardInterrupt
        return compile_with(lowered, options)

    with monkeypatch.context() as first:
        first.setattr(schedule_choice, "compile_with", killed)
        with pytest.raises(KeyboardInterrupt):
            gpu_options(resolve_here(with_xla(tmp_path)), made)
    assert len(compilations) == 1
    path = pathlib.Path(str(latency_file(with_xla(tmp_path), made)))
    assert len(compilations) == 3
    assert costs(path.read_text())


def test_all_processes_compile_by_the_latencies_of_the_first_and_by_its_verdict(tmp_path, lowered, monkeypatch):
    """Theirs may be others: of two hosts that have chosen other kernels."""
    made, compilations = lowered
    of_first = {str: TEXT, bool: False}
    monkeypatch.setattr(schedule_choice, "of_first", lambda own: of_first[type(own)])
    told = []
    monkeypatch.setattr(schedule_choice.disk, "keep", lambda path, content: told.append(content.decode()))
    options, judged = gpu_options(resolve_here(with_xla(tmp_path)), made)
    assert told == [f"{schedule_choice._NOT_JUDGED}{TEXT}", schedule_choice.GUESSES]
    assert PROFILE not in options
    assert judged is not None
    assert len(compilations) == 2


def test_the_first_process_tells_the_others_its_latencies(tmp_path, lowered, monkeypatch):
    """Two hosts may have chosen other kernels; all must schedule alike, and compile together or not at all."""
    made, compilations = lowered
    monkeypatch.setattr(scheduling, "of_first", lambda value: TEXT)
    path = latency_file(with_xla(tmp_path), made)
    assert pathlib.Path(str(path)).read_text() == TEXT
    assert compilations == []


def test_remat_auto_is_judged_once_and_for_all_processes(tmp_path, monkeypatch):
    config = CONFIG.changed({"data.cache_dir": str(tmp_path), "model.remat": "auto", "mesh.fsdp": 8, "hardware.nodes": 1})
    seconds = {"none": 0.0, "save_attention_qkv_mlp": 4.0, "save_attention_qkv": 2.0, "save_attention": 1.0, "full": 3.0}

    def lower(run, state):
        return types.SimpleNamespace(remat=run.config.model.remat, as_text=lambda: "the step")

    def compiled(self, lowered, told):
        return types.SimpleNamespace(preference=(lowered.remat == "none", seconds[lowered.remat]))  # which does not fit

    monkeypatch.setattr(scheduling, "lower", lower)
    monkeypatch.setattr(schedule_choice.Judge, "compiled", compiled)
    jax.set_mesh(make_mesh(MeshConfig(fsdp=8)))

    def chosen(config):
        doing = []
        run = resolve_here(config, doing.append)
        assert run.reasons.get("remat", f"{run.config.model.remat}: ").startswith(f"{run.config.model.remat}: ")
        return run.config.model.remat, len(doing)

    assert chosen(config) == ("none", 0)  # by formulas, on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen(config) == ("save_attention", 5)
    assert chosen(config) == ("save_attention", 0)
    (kept,) = tmp_path.glob("remat/*/policy")
    kept.write_text("garbage")
    assert chosen(config) == ("save_attention", 5)
    assert chosen(config.changed({"model.remat": "none"})) == ("none", 0)
    assert chosen(config.changed({"hardware.gpu": "none"})) == ("full", 0)
    monkeypatch.setattr(scheduling, "of_first", lambda value: "save_attention_qkv")
    assert chosen(config) == ("save_attention_qkv", 0)
    assert kept.read_text() == "save_attention_qkv"


@pytest.mark.long
@pytest.mark.usefixtures("gpu_compiler")
def test_training_makes_its_profile_once(tmp_path, monkeypatch):
    config = CONFIG.changed({"data.cache_dir": str(tmp_path)})
    with jax.set_mesh(planned_mesh(config)):
        lowered = lower(resolve_here(config), abstract_state(config))
        made, step = gpu_options(resolve_here(config), lowered)
        assert step is not None, "of those that were judged"
        path = pathlib.Path(str(made[PROFILE]))
        told = path.read_text()
        assert "all-gather-start" in told
        assert "reduce-scatter" in told
        monkeypatch.setattr(schedule_choice, "compile_with", None)
        assert gpu_options(resolve_here(config), lowered) == (made, None)
        assert path.read_text() == told
        assert lowered.compile(compiler_options=made)
        other = config.changed({"hardware.node_bandwidth": 50e9})
        with pytest.raises(TypeError):  # another network: it would be compiled again
            gpu_options(resolve_here(other), lowered)


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("path", CLUSTER_CONFIGS, ids=lambda path: path.stem)
def test_training_and_plans_resolve_every_shipped_configuration_alike(path):
    """So that they lower the same program: both trace `train_step` with what they have resolved."""
    config = load_config(path).in_largest_steps()
    with jax.set_mesh(planned_mesh(config)):
        assert resolve_here(config) == resolve_planned(config)


def test_latencies_of_one_program_are_refused_for_the_programs_of_stages():
    staged = {"model.num_layers": 3, "mesh.pipeline": 2, "mesh.stages": (1, 2), "parallel.zero": 1}
    config = tiny_config().changed(staged | {"xla.latency_profile": "file"})
    with pytest.raises(ConfigError, match=r"^xla\.latency_profile: a file is for one program"):
        scheduling.check_told(config)
