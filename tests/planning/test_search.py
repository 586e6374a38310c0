"""What-if: the configurations that values make, and which of them are compiled."""

import dataclasses
import pathlib

import pytest

from llamajax.config.file import dump_config
from llamajax.config.machine import HardwareConfig
from llamajax.config.parallel import MeshConfig
from llamajax.errors import ConfigError
from llamajax.estimates.calibration import Constants
from llamajax.planning import plan as schedule
from llamajax.planning import search as sweep
from llamajax.planning.search import read_sweep, run_sweep
from tests.estimates.test_calibration import MEASUREMENT
from tests.planning import plans

CONFIG = plans.CONFIG.changed({"mesh": MeshConfig(data=2, fsdp=4, tensor=2)})


def test_devices_scale_fsdp_and_the_batch():
    found = read_sweep("hardware.nodes=2,4,8", CONFIG)
    assert found.key == "hardware.nodes"
    assert found.values == ("2", "4", "8")
    assert [config.mesh.fsdp for config in found.configs] == [2, 4, 8]
    assert [config.train.global_batch_size for config in found.configs] == [16, 32, 64]
    assert found.configs[1] == CONFIG
    assert {config.hardware.token_budget for config in found.configs} == {1e9}


def test_the_token_budget_stays_that_of_the_run():
    config = CONFIG.changed({"hardware": HardwareConfig(gpu="h100", nodes=2)})
    for changed in read_sweep("hardware.gpus_per_node=16", config).configs:
        assert changed.hardware.token_budget == 1000 * 32 * 1024


def test_an_automatic_axis_takes_the_new_devices():
    config = CONFIG.changed({"mesh.fsdp": -1})
    (changed,) = read_sweep("hardware.nodes=8", config).configs
    assert changed.mesh.axis_sizes(32)["fsdp"] == 8


def test_any_setting_can_be_swept():
    assert [c.model.remat for c in read_sweep("model.remat=none,full", CONFIG).configs] == ["none", "full"]
    assert [c.hardware.node_bandwidth for c in read_sweep("hardware.node_bandwidth=25e9,1e11", CONFIG).configs] == [
        25e9, 1e11,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hardware.nodes", "not KEY=VALUE"),
        ("hardware.nodes=1,,2", "not KEY=VALUE"),
        ("seed=1,2", "no setting of a section"),
        ("hardware.nods=1", r"did you mean 'hardware\.nodes'"),
        ("hardware.nodes=x", "whole number"),
        ("hardware.nodes=0", "must be positive"),
        ("hardware.nodes=3", r"hardware\.nodes=3: train\.global_batch_size=32|mesh\.fsdp"),
        ("hardware.gpus_per_node=3", r"mesh\.fsdp|embed_dim"),
        ("hardware.gpu=b300", "a100-40gb"),
        ("mesh.tensor=4", "there are 16 devices"),
    ],
)
def test_mistakes_are_told_before_anything_is_compiled(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_sweep(text, CONFIG)
    assert str(caught.value).startswith("--sweep: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hardware.gpu=h200,none,h100", "--sweep: hardware.gpu=none: a plan needs a GPU"),
        ("data.seq_len=512,8192", "--sweep: data.seq_len=8192: 8192 is above model.max_seq_len"),
        (
            "xla.latency_profile=auto,costs.pb",
            "--sweep: xla.latency_profile=costs.pb: costs.pb cannot be read",
        ),
        (
            "model.attention_kernel=auto,cudnn,plain",
            "--sweep: model.attention_kernel=cudnn: cudnn cannot",
        ),
        ("mesh.num_cpu_devices=1", "mesh"),
    ],
)
def test_what_cannot_be_planned_is_told_before_anything_is_compiled(text, message):
    with pytest.raises(ConfigError) as caught:
        read_sweep(text, CONFIG)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def compiled(monkeypatch):
    """Records what would be compiled: configurations, and those scheduled with new latencies."""
    monkeypatch.setattr(schedule, "memory_plan", lambda step, module: plans.memory())
    whole, again = [], []

    def make_plan(config, **arguments):
        whole.append(config)
        return plans.plan(config=config)

    def by_latencies(blind, config):
        again.append(config)
        return plans.schedule(config=config)

    monkeypatch.setattr(sweep, "make_plan", make_plan)
    monkeypatch.setattr(sweep, "by_latencies", by_latencies)
    return whole, again


def test_bandwidths_change_the_latencies_and_prices_nothing(compiled):
    whole, again = compiled
    base = plans.plan()
    slow, same, fast = run_sweep(found := read_sweep("hardware.node_bandwidth=1e9,200e9,1e12", CONFIG), base)
    assert whole == []
    assert again == list(found.configs)
    assert [plan.config for plan in (slow, same, fast)] == list(found.configs)
    seconds = [plan.guessed.timeline.exposed_comm_s for plan in (slow, same, fast)]
    assert seconds[0] > seconds[1] > seconds[2]
    assert same.informed is not None
    assert same.chosen.timeline == dataclasses.replace(base.chosen.timeline)
    again.clear()
    for plan in run_sweep(read_sweep("hardware.price_per_gpu_hour=1,3", CONFIG), base):
        assert plan.chosen.timeline == base.chosen.timeline
    assert run_sweep(read_sweep("hardware.nodes=4", CONFIG), base) == (base,)
    assert (whole, again) == ([], [])
    run_sweep(read_sweep("hardware.gpu=h100,h200", CONFIG), base)
    assert [config.hardware.gpu for config in whole] == ["h200"]


def test_measured_constants_change_the_latencies_of_what_is_compiled(compiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole, again = compiled
    file = pathlib.Path("h100.yaml")
    file.write_text(dump_config(dataclasses.replace(MEASUREMENT, constants=Constants(kernel_s=1e-4))))
    base = plans.plan()
    same, slow = run_sweep(found := read_sweep(f"hardware.calibration=null,{file}", CONFIG), base)
    assert same is base
    assert (whole, again) == ([], [found.configs[1]])
    assert slow.guessed.timeline.compute_s > base.guessed.timeline.compute_s
    assert slow.chosen.timeline.compute_s > base.chosen.timeline.compute_s
    with pytest.raises(ConfigError, match=r"^--sweep: hardware\.gpu=h200: h100\.yaml:1: gpu: measured on h100, but "):
        read_sweep("hardware.gpu=h100,h200", CONFIG.changed({"hardware.calibration": str(file)}))


def test_latencies_of_ones_own_are_those_of_any_network(compiled, tmp_path):
    file = tmp_path / "measured.pbtxt"
    file.write_text('costs { name: "a" cost_us: 1 }')
    config = CONFIG.changed({"xla.latency_profile": str(file)})
    base = plans.plan(config=config)
    (slow,) = run_sweep(read_sweep("hardware.node_bandwidth=1e9", config), base)
    assert slow.chosen.timeline.exposed_comm_s > base.chosen.timeline.exposed_comm_s
    assert compiled == ([], [])
