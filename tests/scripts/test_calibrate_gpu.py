"""The program that measures a GPU's constants: its arithmetic without a GPU, and the whole of it at toy size on the CPU."""

import dataclasses
import itertools
import subprocess
import sys
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llamajax.config.file import dump_config, load_config, read_config
from llamajax.config.machine import HardwareConfig
from llamajax.config.yaml_text import Problems
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.estimates.calibration import Constants, Measurement, read_measurement
from llamajax.estimates.machine import Calibration, Machine
from llamajax.planning.cost.attention import planned_kernel
from llamajax.planning.cost.replay import replay
from llamajax.planning.memory import memory_plan
from llamajax.planning.plan import replayed
from llamajax.planning.xla.compile import compile_for, planned_mesh
from llamajax.planning.xla.hlo import Module
from llamajax.planning.xla.parse import parse
from llamajax.step.resolve import resolve_planned
from scripts import calibrate_gpu
from scripts.calibrate_gpu import CalibrateConfig, Timing, data_sheet, solved, timed
from scripts.calibration import programs as programs_of
from scripts.calibration.programs import FULL, ROOT, programs, repeated, scores_behind
from tests.estimates.test_calibration import MEASUREMENT

BASE = load_config(ROOT / "configs" / "llama3_2_1b_8xh100.yaml")
ONE = {"hardware.gpus_per_node": 1, "mesh.fsdp": 1}
H100 = data_sheet("cpu", "cpu")


@pytest.fixture(autouse=True)
def _no_mesh(_mesh):
    """As in a process that has not laid out its devices."""
    jax.set_mesh(None)


def compiled(work, shapes, device, count=5) -> Module:
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(device)) for x in shapes]
    with jax.default_device(device):
        return parse(jax.jit(partial(repeated, work, count)).lower(*arguments).compile().as_text() or "")


def test_every_result_of_a_loop_is_computed():
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    module = compiled(jnp.matmul, [square, square], jax.devices()[0], count=7)
    assert replay(module, Machine(gpu=H100), {}).flops == 7 * 2 * 64**3


def check_that_constants_come_back(found, device, gpu):
    """A machine that takes as long as the cost model tells with known constants has these constants."""
    known = Constants(
        kernel_s=3e-6, memory_efficiency=0.7, matmul_efficiency=0.6, attention_efficiency=0.4,
        attention_backward_efficiency=0.3, pallas_efficiency=0.25, pallas_backward_efficiency=0.2,
        attention_64_efficiency=0.35, attention_64_backward_efficiency=0.28, tokamax_efficiency=0.55,
        tokamax_backward_efficiency=0.5, grouped_efficiency=0.42,
    )  # fmt: skip
    machine, told = Machine(gpu=gpu), Machine(gpu=gpu, measured=known)
    for name, several in found.items():
        modules = [compiled(work, shapes, device) for work, shapes in several]
        timelines = [replay(module, told, {}, scores_behind(name), FULL) for module in modules]
        assert not any(timeline.not_understood for timeline in timelines)
        value = solved(name, modules, sum(timeline.step_time_s for timeline in timelines), machine)
        assert value == pytest.approx(getattr(known, name), rel=1e-3), name
        # As it is known: at toy size a thousandth of what memory takes is a hundredth of what a matmul does.
        machine = calibrate_gpu.with_constant(machine, name, getattr(known, name))
    return machine.measured


def test_constants_are_solved_for_from_what_the_cpu_runs():
    measured = check_that_constants_come_back(programs("cpu", None), jax.devices()[0], H100)
    assert measured.attention_efficiency is None


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("gpu", ["h100", pytest.param("a100-40gb", marks=pytest.mark.long)])
def test_constants_are_solved_for_from_what_gpus_run(gpu):
    """With every kernel of attention that can be had, compiled for one that is not there."""
    config = BASE.changed(ONE | {"hardware.gpu": gpu})
    (device,) = planned_mesh(config).devices.flat
    found = next(known for known in calibrate_gpu.GPUS if known.name.lower() == gpu)
    check_that_constants_come_back(programs("gpu", found.compute_capability), device, found)


def test_what_is_not_measured_is_the_network_and_how_some_products_differ():
    left = {field.name for field in dataclasses.fields(Calibration)} - {*programs("gpu", (8, 0)), "host_bandwidth"}
    assert left - {"tokamax_efficiency", "tokamax_backward_efficiency", "grouped_efficiency"} == {
        "node_link_efficiency",
        "gpu_link_efficiency",
        "compute_slowdown",
        "float8_share",
        "matmul_start_s",
    }


@pytest.mark.long
@pytest.mark.usefixtures("gpu_compiler")
def test_a_plan_goes_by_the_measured_rates_of_the_own_kernels(tmp_path):
    """Each constant alone at half its rate: attention's share of a step is what is longer."""
    closed = {"model.attend_across_documents": False, "model.num_layers": 2, "model.vocab_size": 512, "data.seq_len": 4096}
    config = BASE.changed(ONE | closed | {"train.global_batch_size": 2, "train.grad_accum_steps": 1})
    step = compile_for(resolve_planned(config))
    built_in = replayed(step, config).timeline
    longer = {}
    for name in ("pallas_efficiency", "pallas_backward_efficiency", "attention_efficiency", "tokamax_efficiency"):
        slow = dataclasses.replace(MEASUREMENT, constants=Constants(**{name: getattr(Machine(gpu=H100).built_in, name) / 2}))
        (tmp_path / "h100.yaml").write_text(dump_config(slow))
        timeline = replayed(step, config.changed({"hardware.calibration": str(tmp_path / "h100.yaml")})).timeline
        longer[name] = timeline.step_time_s - built_in.step_time_s
    # Forward in two products, backward in seven, at 0.36 and 0.30 of the peak.
    assert longer["pallas_backward_efficiency"] == pytest.approx(longer["pallas_efficiency"] * 7 / 2 * 0.36 / 0.30, rel=0.02)
    assert longer["pallas_efficiency"] > 0
    assert longer["attention_efficiency"] == longer["tokamax_efficiency"] == 0


@pytest.mark.long
@pytest.mark.usefixtures("gpu_compiler")
def test_small_grids_are_told_as_shares_of_the_rate_of_large_ones(monkeypatch, capsys):
    """On this machine one row takes a quarter longer than planned, and 16 rows as long as planned."""
    (device,) = planned_mesh(BASE.changed(ONE)).devices.flat
    machine = Machine(gpu=H100)
    (name, shape), *_ = itertools.islice(reversed(programs_of.SMALL_GRIDS.items()), 1)

    def measured(work: Any, shapes: Any, _: Any) -> tuple[Module, Timing]:
        module = compiled(work, shapes, device)
        longer = 1.25 if shapes[0].shape[0] == 1 else 1.0
        return module, Timing(longer * replay(module, machine, {}, programs_of.scores_of(shape)).step_time_s, 0.01)

    monkeypatch.setattr(calibrate_gpu, "measured", measured)
    monkeypatch.setattr(calibrate_gpu, "SMALL_GRIDS", {name: shape})
    forward, both = calibrate_gpu.small_grids(machine, programs_of.SIZES["gpu"])
    assert [grid.name for grid in (forward, both)] == [f"{name}, forward", f"{name}, both passes"]
    for grid in (forward, both):
        assert grid.measured == pytest.approx(grid.predicted / 1.25, rel=1e-3)
        assert 0.9 < grid.predicted <= 1
    line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith("small grid 70B on tensor 8, row of 8,192, forward: 0.7")
    assert "of the rate of 16 rows (predicted: 0.9" in line


def test_a_median_counts_only_what_comes_after_the_warm_up(monkeypatch):
    """Results come after 0, 1, ... 5 seconds, and then every 10, but one takes 40."""
    ends = itertools.chain(range(6), (15, 25, 65), itertools.count(75, 10))
    monkeypatch.setattr(calibrate_gpu.time, "perf_counter", lambda: next(ends))
    found = timed(iter(range(1000)), warm_s=5.0, measured_s=75.0)
    assert next(ends) == 95  # the last that counted came when 5 + 75 seconds were over
    assert found.seconds == 10
    assert found.spread == pytest.approx(0.75 * 3, rel=0.1)  # of five, one took 40: the 95th percentile lies between


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_runs_are_of_one_device(device):
    for changes in calibrate_gpu.RUNS[device].values():
        config = BASE.changed(changes)
        assert config.hardware.num_devices == 1
        assert not config.placement_problems(1)


def test_runs_on_a_gpu_take_the_kernels_that_plans_take():
    """cuDNN's, and llamajax's own: what is measured of both shows in a predicted step."""
    on_gpu = [BASE.changed(changes | {"hardware.gpu": "h100"}) for changes in calibrate_gpu.RUNS["gpu"].values()]
    assert [planned_kernel(resolve_planned(config))[0] for config in on_gpu] == ["cudnn", "pallas", "cudnn"]


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    "changes",
    [pytest.param(changes, id=name, marks=pytest.mark.long) for name, changes in calibrate_gpu.RUNS["gpu"].items()],
)
def test_the_runs_fit_the_smallest_card(changes):
    step = compile_for(resolve_planned(BASE.changed(changes | {"hardware.gpu": "a100-40gb"})))
    assert memory_plan(step, parse(step.hlo)).fits


def test_differences_are_those_from_what_was_measured(monkeypatch, capsys):
    class Pool(Executor):
        def submit(self, *_: Any, **__: Any) -> Future[Any]:
            done: Future[Any] = Future()
            done.set_result((Timing(0.2, 0.01), 2**34))
            return done

    monkeypatch.setattr(calibrate_gpu, "predicted", lambda config, file: (2**33, 0.19, 0.21 if file else None))
    runs = calibrate_gpu.compare(CalibrateConfig(output="h100.yaml"), H100, Pool())
    assert [(run.measured_s, run.predicted_s) for run in runs] == [(0.2, 0.21)] * 3
    head, step, peak, *others = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "measured", "spread", "H100,", "built", "in", "H100,", "as", "measured"]
    assert step.endswith("  0.2 s         1.0%    0.19 s (-5.0%)              0.21 s (+5.0%)")
    assert peak.endswith("  16.0 GiB              8.00 GiB (-50.0%)")
    assert len(others) == 4


def test_a_gpu_that_is_not_planned_for_is_refused():
    with pytest.raises(
        EnvironmentMismatchError, match=r"^--device gpu: plans do not support NVIDIA B300; measure one of NVIDIA A100-"
    ):
        data_sheet("gpu", "NVIDIA B300")


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_the_whole_way_on_the_cpu(tmp_path):
    command = [sys.executable, "scripts/calibrate_gpu.py", "--device", "cpu", "--output", str(tmp_path / "cpu.yaml")]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert "\r" not in outcome.stdout
    assert "\x1b" not in outcome.stdout
    lines = outcome.stdout.splitlines()
    for name in ("kernel_s", "memory_efficiency", "matmul_efficiency", "host_bandwidth"):
        assert sum(line.startswith(f"{name} ") for line in lines) == 1
    (built_in,) = (line for line in lines if line.startswith("built in "))
    for constant in ("node_link_efficiency 0.85", "pallas_efficiency 0.36", "pallas_backward_efficiency 0.3,"):
        assert constant in built_in
    assert "not measured" in built_in
    steps = [line for line in lines if ": step " in line]
    assert [line.count("not measured") for line in steps] == [2, 2, 2]  # of the H100: neither its step nor its constants

    text = (tmp_path / "cpu.yaml").read_text()
    assert text.startswith("# Of a CPU")
    measurement = read_config(Measurement, str(tmp_path / "cpu.yaml"), (), Problems())
    assert (measurement.gpu, measurement.device) == ("cpu", "cpu")
    measured = {name for name, value in vars(measurement.constants).items() if value is not None}
    assert measured == {*programs("cpu", None), "host_bandwidth"}
    with pytest.raises(ConfigError, match=r":2: gpu: measured on cpu, but hardware\.gpu is h100; "):
        read_measurement(HardwareConfig(gpu="h100", calibration=str(Path(tmp_path, "cpu.yaml"))))
