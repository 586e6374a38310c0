"""Files of measured constants: what is refused, with its place, and what comes back unchanged."""

import dataclasses
import json
from pathlib import Path

import pytest

from llamajax.config.file import config_to_dict, dump_config
from llamajax.config.machine import HardwareConfig
from llamajax.errors import ConfigError
from llamajax.estimates.calibration import Constants, MeasuredGrid, Measurement, Versions, read_measurement
from llamajax.estimates.machine import Calibration

HARDWARE = HardwareConfig(gpu="h100", calibration="h100.yaml")
MEASUREMENT = Measurement(
    gpu="h100",
    device="NVIDIA H100 80GB HBM3",
    date="2026-11-24",
    command="python scripts/calibrate_gpu.py --output h100.yaml",
    commit="1234567",
    versions=Versions(llamajax="0.2.0", python="3.12", jax="0.11.2", jaxlib="0.11.2", platform="cuda 13000"),
    constants=Constants(matmul_efficiency=0.7, kernel_s=1.5e-6, host_bandwidth=5e10, compute_slowdown=0.0),
    small_grids=(MeasuredGrid(name="one row, forward", measured=1.01, predicted=0.99),),
)
TEXT = """\
gpu: h100
device: NVIDIA H100 80GB HBM3
date: "2026-11-24"
command: python scripts/calibrate_gpu.py --output h100.yaml
commit: "1234567"
versions: {llamajax: 0.2.0, python: "3.12", jax: 0.11.2, jaxlib: 0.11.2, platform: cuda 13000}
constants:
  matmul_efficiency: 0.7
  kernel_s: 1.5e-6
  host_bandwidth: 5e10
  compute_slowdown: 0.0
small_grids: [{name: "one row, forward", measured: 1.01, predicted: 0.99}]
"""


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "text", [TEXT, dump_config(MEASUREMENT), json.dumps(config_to_dict(MEASUREMENT), indent=1)], ids=["YAML", "own", "JSON"]
)
def test_what_was_measured_comes_back(text):
    Path("h100.yaml").write_text(text)
    assert read_measurement(HARDWARE) == MEASUREMENT


def test_no_file_is_read_where_none_is_named():
    assert read_measurement(HardwareConfig(gpu="h100")) is None


def test_the_file_may_lie_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.yaml").write_text(TEXT)
    assert read_measurement(dataclasses.replace(HARDWARE, calibration="~/own.yaml")) == MEASUREMENT


def test_every_constant_of_the_cost_model_can_be_measured_and_no_other():
    names = {field.name for field in dataclasses.fields(Calibration)}
    assert {field.name for field in dataclasses.fields(Constants)} == names


EDITS = [
    ("  kernel_s", "  kernel_us", "h100.yaml:9: unknown key 'constants.kernel_us'; did you mean 'constants.kernel_s'?"),
    ("device:", "xyzzy: 1\ndevice:", "h100.yaml:2: unknown key 'xyzzy'; a configuration has gpu, device, date,"),
    ("constants:", "constant:", "h100.yaml:7: unknown key 'constant'; did you mean 'constants'?"),
    ("0.7", "70%", "h100.yaml:8: constants.matmul_efficiency: must be a number (finite, such as 0.1 or 3e-4), not 70%"),
    ("0.7", "1.7", "h100.yaml:8: constants.matmul_efficiency: 1.7 must be above 0 and at most 1"),
    ("0.7", "0", "h100.yaml:8: constants.matmul_efficiency: 0.0 must be above 0 and at most 1"),
    (
        "0.7",
        "0.7\n  matmul_efficiency: 0.8",
        "h100.yaml:9: duplicate key 'matmul_efficiency', also at h100.yaml:8; keep one",
    ),
    ("1.5e-6", "1.5", "h100.yaml:9: constants.kernel_s: 1.5 must be above 0 and below 1e-3; it is in seconds"),
    ("5e10", "-5e10", "h100.yaml:10: constants.host_bandwidth: -50000000000.0 must be positive"),
    ("slowdown: 0.0", "slowdown: -1", "h100.yaml:11: constants.compute_slowdown: -1.0 must not be negative"),
    ('"2026-11-24"', "2026-11-24", "h100.yaml:3: date: must be text, but YAML reads 2026-11-24 as timestamp; write"),
    ("jaxlib: 0.11.2, ", "", "h100.yaml:6: versions.jaxlib: required, but missing"),
    ("gpu: h100\n", "", "h100.yaml:1: gpu: required, but missing"),
    ("gpu: h100", "gpu: h200", "h100.yaml:1: gpu: measured on h200, but hardware.gpu is h100; name a file for that GPU, or"),
    ("gpu: h100", "gpu: cpu", "h100.yaml:1: gpu: measured on cpu, but hardware.gpu is h100; name a file for that GPU, or"),
    ("gpu: h100", "gpu: none", "h100.yaml:1: gpu: must be one of cpu, a100-40gb, a100-80gb, h100, h200, b200, "),
]


@pytest.mark.parametrize(("old", "new", "message"), EDITS)
def test_a_mistake_is_named_with_its_place(old, new, message):
    assert TEXT.count(old) == 1
    Path("h100.yaml").write_text(TEXT.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_measurement(HARDWARE)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(message)


def test_all_mistakes_are_named_at_once():
    Path("h100.yaml").write_text(TEXT.replace("0.7", "7").replace("1.5e-6", "0").replace("h100\n", "h1000\n"))
    with pytest.raises(ConfigError) as caught:
        read_measurement(HARDWARE)
    assert [line.split(": ")[:2] for line in str(caught.value).splitlines()] == [
        ["h100.yaml:1", "gpu"], ["h100.yaml:8", "constants.matmul_efficiency"], ["h100.yaml:9", "constants.kernel_s"],
    ]  # fmt: skip


def test_a_file_that_is_not_there_is_named():
    Path("h1000.yaml").write_text(TEXT)
    with pytest.raises(ConfigError, match=r"^h100\.yaml: no such file; did you mean h1000\.yaml\?"):
        read_measurement(HARDWARE)
