"""Which schedule a plan tells, which others it tries, and what it refuses before anything is compiled."""

import dataclasses

import pytest

from llamajax.config.file import dump_config
from llamajax.config.machine import HardwareConfig, XlaConfig
from llamajax.config.model import REMATS
from llamajax.config.parallel import MeshConfig
from llamajax.errors import ConfigError
from llamajax.estimates.calibration import Constants
from llamajax.planning import plan as planning_schedule
from llamajax.planning.plan import Alternative, Plan, make_plan, plan_problems
from tests.estimates.test_calibration import MEASUREMENT
from tests.planning import plans

FILE = 'costs { name: "all-gather-start" cost_us: 7.000 }\n'


def test_auto_takes_latencies_where_they_help_and_a_file_is_always_used():
    fast, slow, large = plans.schedule(), plans.schedule(seconds=1.0), plans.schedule(peak_bytes=90 * plans.GIB)
    same = plans.schedule()
    guesses = {"xla.latency_profile": None}

    def plan(source, blind, profiled, *others) -> Plan:
        alternatives = tuple(Alternative(changes={"n": number}, schedule=other) for number, other in enumerate(others))
        config = with_xla(latency_profile=source)
        return Plan(config=config, guessed=blind, informed=profiled, alternatives=alternatives)

    for blind, profiled, helps in (
        (slow, fast, True),
        (fast, slow, False),
        (slow, large, False),
        (large, slow, True),
        (fast, same, False),  # then no file is needed
    ):
        assert plan("auto", blind, profiled).chosen is (profiled if helps else blind)
        assert plan("auto", blind, profiled).best_changes == {}
        measured = plan("measured.pbtxt", blind, profiled)
        assert measured.chosen is profiled
        assert measured.best_changes == ({} if helps or profiled is same else guesses)
    assert plan("auto", slow, slow, slow, fast).best_changes == {"n": 1}
    assert plan("auto", slow, slow, large).best_changes == {}
    assert plan(None, slow, None, fast).chosen is slow
    assert plan(None, slow, None, fast).best_changes == {"n": 0}


LEARNT = "learnt"


@pytest.fixture
def compiled(monkeypatch):
    """Compilations in place of real ones; gives what they were told: how the layers run, and the latencies, for which
    `LEARNT` stands where these are to be learnt."""
    told = []

    def compile_for(run, *, latencies=None, untimed=False):
        text = LEARNT if untimed else None
        if latencies is not None:
            with open(latencies) as file:
                text = file.read()
        told.append((run.config.parallel.stack, text))
        return plans.step(run.config)

    monkeypatch.setattr(planning_schedule, "compile_for", compile_for)
    monkeypatch.setattr(planning_schedule, "memory_plan", lambda step, module: plans.memory())
    return told


def with_xla(**settings):
    return plans.CONFIG.changed({"xla": XlaConfig(**settings)})


def test_the_last_compilation_is_told_the_latencies(compiled):
    assert make_plan(plans.CONFIG.changed({"parallel.stack": "prefetch"})).informed is not None
    blind, learnt, latencies = (text for _, text in compiled)
    assert (blind, learnt) == (None, LEARNT)
    assert latencies.count("costs { name: ") > 20


def test_without_a_loop_one_program_is_compiled_less(compiled):
    """Its instructions have the same names with latencies and without."""
    assert make_plan(plans.CONFIG).informed is not None
    blind, latencies = (text for _, text in compiled)
    assert blind is None
    assert latencies.count("costs { name: ") > 20


@pytest.mark.parametrize(
    "config",
    [
        with_xla(latency_profile=None),
        plans.CONFIG.changed({"mesh": MeshConfig(), "hardware": HardwareConfig(gpu="h100", gpus_per_node=1)}),
    ],
    ids=["asked for none", "one device"],
)
def test_one_compilation_where_training_has_no_latencies(compiled, monkeypatch, config):
    monkeypatch.setattr(planning_schedule, "replay", lambda *_: plans.schedule().timeline)
    assert make_plan(config).informed is None
    assert [text for _, text in compiled] == [None]


def test_a_profile_of_ones_own_is_what_is_told(compiled, tmp_path):
    file = tmp_path / "measured.pbtxt"
    file.write_text(FILE)
    config = with_xla(latency_profile=str(file))
    plan = make_plan(config)
    assert plan.chosen is plan.informed
    assert [text for _, text in compiled] == [None, FILE]


def test_a_profile_that_holds_none_is_refused_before_anything_is_compiled(compiled, tmp_path):
    file = tmp_path / "measured.pbtxt"
    file.write_text("measured")
    config = with_xla(latency_profile=str(file))
    with pytest.raises(ConfigError, match=r"^xla\.latency_profile: .*measured\.pbtxt contains no latencies"):
        make_plan(config)
    assert [line.partition(";")[0] for line in plan_problems(config)] == [
        f"xla.latency_profile: {file} contains no latencies"
    ]
    file.unlink()
    with pytest.raises(ConfigError, match=r"^xla\.latency_profile: .*measured\.pbtxt cannot be read: No such file"):
        make_plan(config)
    assert compiled == []


def test_a_plan_takes_as_long_as_the_measured_constants_say(compiled, tmp_path):
    file = tmp_path / "h100.yaml"
    measured = plans.CONFIG.changed({"hardware.calibration": str(file)})
    file.write_text(dump_config(dataclasses.replace(MEASUREMENT, constants=Constants(kernel_s=4e-6))))
    built_in, twice = (make_plan(config).guessed.timeline for config in (plans.CONFIG, measured))
    file.write_text(dump_config(dataclasses.replace(MEASUREMENT, constants=Constants(kernel_s=6e-6))))
    thrice = make_plan(measured).guessed.timeline
    assert twice.compute_s > built_in.compute_s
    assert thrice.compute_s - twice.compute_s == pytest.approx(twice.compute_s - built_in.compute_s)


def test_constants_that_break_a_rule_are_refused_before_anything_is_compiled(compiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h100.yaml").write_text(dump_config(MEASUREMENT).replace("gpu: h100", "gpu: h200"))
    config = plans.CONFIG.changed({"hardware.calibration": "h100.yaml"})
    with pytest.raises(ConfigError, match=r"^h100\.yaml:1: gpu: measured on h200, but hardware\.gpu is h100; ") as caught:
        make_plan(config)
    assert plan_problems(config) == [str(caught.value)]
    assert compiled == []


@pytest.mark.parametrize("stack", ["auto", "scan", "prefetch", "unrolled"])
@pytest.mark.parametrize("source", ["auto", None])
def test_alternatives_are_every_other_way(compiled, stack, source):
    changes = {"xla.latency_profile": source, "parallel.stack": stack, "train.grad_accum_steps": 1}
    config = plans.CONFIG.changed(changes)
    plan = make_plan(config, alternatives=True)
    tried = [({}, plan.chosen), *((other.changes, other.schedule) for other in plan.alternatives)]
    ways = [(way.parallel.stack, way.xla.latency_profile) for way in (config.changed(c) for c, _ in tried)]
    if source is not None:
        ways.append((stack, None))  # the one that is compiled first
    tried = [(form, text) for form, text in compiled if text != LEARNT]
    assert len(ways) == len(set(ways)) == len(tried)
    other = "scan" if stack == "prefetch" else "prefetch"
    assert set(ways) == {(s, by) for s in (stack, other) for by in ("auto", None)}
    assert sum(text is not None for _, text in tried) == len(ways) // 2
    # A loop that prefetches is another one by latencies, whose names these must have.
    assert [form for form, text in compiled if text == LEARNT] == ["prefetch"]


def test_remat_auto_is_the_fastest_that_fits(compiled, monkeypatch):
    seconds = {"none": 0.0, "save_attention_qkv_mlp": 4.0, "save_attention_qkv": 2.0, "save_attention": 1.0, "full": 3.0}
    needs = {"none": 90, "save_attention_qkv_mlp": 70, "save_attention_qkv": 60, "save_attention": 78, "full": 10}

    def replayed(step, config):
        remat = step.run.config.model.remat
        return plans.schedule(peak_bytes=needs[remat] * plans.GIB, seconds=seconds[remat])

    monkeypatch.setattr(planning_schedule, "replayed", replayed)
    doing = []
    config = plans.CONFIG.changed({"model.remat": "auto", "xla.latency_profile": None})
    plan = make_plan(config, doing=doing.append)
    fitting = [remat for remat, schedule in plan.by_remat.items() if schedule.memory.fits]
    assert tuple(plan.by_remat) == REMATS
    assert "none" not in fitting
    assert plan.config.model.remat == min(fitting, key=lambda remat: seconds[remat])
    assert plan.chosen is plan.by_remat[plan.config.model.remat]
    assert len(compiled) == len(REMATS)
    assert doing[:5] == [f"compiling the step with model.remat: {remat}" for remat in REMATS]
    needs |= dict.fromkeys(REMATS, 90) | {"full": 85}
    assert not make_plan(config, suggest=False).chosen.memory.fits
    assert make_plan(plans.CONFIG).by_remat == {}


def test_what_stands_in_the_way_of_a_plan_is_known_before_compiling():
    def problems(changes):
        section, settings = changes
        part = dataclasses.replace(getattr(plans.CONFIG, section), **settings)
        return plan_problems(dataclasses.replace(plans.CONFIG, **{section: part}))

    assert plan_problems(plans.CONFIG) == []
    (line,) = problems(("model", {"attention_kernel": "cudnn"}))
    assert line.startswith("model.attention_kernel: cudnn cannot be used: documents of one row")
    assert problems(("model", {"matmul_dtype": "float8"})) == []
    in_float8 = plans.CONFIG.changed({"model.matmul_dtype": "float8", "hardware.gpu": "a100-80gb"})
    (line,) = plan_problems(in_float8)
    assert line.startswith("model.matmul_dtype: float8 needs GPUs of compute capability 8.9")
    (line,) = problems(("xla", {"flags": ("xla_gpu_no_such_thing=1",)}))
    assert "does not support xla_gpu_no_such_thing" in line
    (line,) = problems(("train", {"global_batch_size": 33}))
    assert line.startswith("train.global_batch_size: 33")
    (line,) = problems(("data", {"seq_len": 8192}))
    assert line.startswith("data.seq_len: 8192 is above")
    assert problems(("hardware", {"gpu": "none"})) == ["hardware.gpu: a plan needs a GPU; name one"]


def test_what_does_not_fit_gets_suggestions(compiled, monkeypatch):
    monkeypatch.setattr(planning_schedule, "memory_plan", lambda step, module: plans.memory(90 * plans.GIB))
    suggestion = plans.plan(peak_bytes=90 * plans.GIB).suggestions[0]
    asked = []

    def suggestions(config, memory, *, compiled):
        assert not memory.fits
        asked.append(compiled(config))
        return [suggestion]

    monkeypatch.setattr(planning_schedule, "suggestions", suggestions)
    plan = make_plan(plans.CONFIG)
    assert plan.suggestions == (suggestion,)
    assert asked == [(plan.chosen.memory, plan.guessed.timeline.step_time_s)]
    assert sum(text != LEARNT for _, text in compiled) == 3  # what does not fit by guesses is not compiled by latencies


def test_suggestions_are_compiled_as_training_would(compiled):
    memory, seconds = planning_schedule.memory_and_time(plans.CONFIG.changed({"parallel.stack": "prefetch"}))
    assert memory.fits
    assert seconds > 0
    blind, learnt, latencies = (text for _, text in compiled)
    assert (blind, learnt) == (None, LEARNT)
    assert latencies.startswith("costs {")
