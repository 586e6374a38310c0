"""Cards and links, from what `nvidia-smi` prints."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from llamajax.diagnostics import devices, gpus, nvidia_smi
from llamajax.diagnostics.findings import Finding
from llamajax.diagnostics.nvidia_smi import Smi, parse_links, parse_rows
from tests.diagnostics import nvidia


def told(findings: Iterable[Finding]) -> list[tuple[str, str, str]]:
    """The findings without their remedies, which all but good ones must have."""
    several = list(findings)
    assert all(bool(finding.remedy) == (finding.status != "ok") for finding in several)
    return [(finding.check, finding.status, finding.text) for finding in several]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def read(**texts) -> Smi:
        nvidia.install(tmp_path, **texts)
        monkeypatch.setenv("PATH", str(tmp_path))
        return nvidia_smi.read()

    return read


def all_of(found: Smi, share: float | None = None) -> list[tuple[str, str, str]]:
    checks = (
        gpus.check_driver(found, 13), gpus.check_cards(found), gpus.check_memory(found, share), gpus.check_errors(found),
        gpus.check_links(found),
    )  # fmt: skip
    return [finding for check in checks for finding in told(check)]


def test_a_sound_host(smi):
    assert all_of(smi(gpu=nvidia.H100, topology=nvidia.HGX), share=0.92) == [
        ("driver", "ok", "580.95.05; CUDA 13 needs 580 or later"),
        ("GPUs", "ok", "4 x NVIDIA H100 80GB HBM3"),
        ("GPU memory", "ok", "free; 79.6 GiB per card"),
        ("GPU errors", "ok", "no uncorrected memory errors on 4 of 4 cards with ECC"),
        ("links", "ok", "NV18 between all 4 cards"),
    ]


def test_a_host_with_problems(smi):
    found = smi(gpu=nvidia.GEFORCE, topology=nvidia.CARDS, apps=nvidia.APPS)
    assert all_of(found, share=0.92) == [
        ("driver", "fail", "570.124.06 is too old for CUDA 13, which jax was built for"),
        ("GPUs", "warn", "1 x NVIDIA GeForce RTX 4090, 1 x NVIDIA GeForce RTX 3090"),
        ("persistence", "warn", "off for GPU 0, 1: each start waits for the driver"),
        ("slowdown", "warn", "hardware slows GPU 0 down: heat or power"),
        ("power limit", "warn", "below its default for GPU 0"),
        (
            "GPU memory",
            "fail",
            "GPU 0: 17.6 GiB of 24.0 GiB taken by /opt/env/bin/python (pid 72210), another container (pid 5930)",
        ),
        ("PCIe", "warn", "GPU 0 uses 4 of 16 lanes"),
        ("links", "ok", "PHB between all 2 cards"),
    ]
    assert told(gpus.check_memory(found, None))[0][1] == "warn"
    assert told(gpus.check_driver(found, 12)) == [("driver", "ok", "570.124.06; CUDA 12 needs 525 or later")]


def test_memory_errors(smi):
    bad = nvidia.H100.replace(
        "GPU-3, 580.95.05, 81559, 0, Enabled, Default, Disabled, Enabled, 0",
        "GPU-3, 580.95.05, 81559, 0, Enabled, Default, Disabled, Enabled, 2",
    )
    found = smi(gpu=bad, topology=nvidia.HGX, remapped=nvidia.REMAPPED)
    assert told(gpus.check_errors(found)) == [
        ("GPU errors", "fail", "GPU 2 cannot replace bad memory rows any more"),
        ("GPU errors", "fail", "GPU 1 replaces bad memory rows at its next reset"),
        ("GPU errors", "fail", "uncorrected memory errors since the driver started: GPU 3"),
    ]


@pytest.mark.parametrize(
    ("text", "status", "line"),
    [
        (nvidia.DEGRADED, "warn", "NV18 between 3 pairs, NV16 between 3 pairs; fewer at GPU 2"),
        (nvidia.BRIDGED, "warn", "SYS between 4 pairs, NV4 between 2 pairs"),
        (
            nvidia.BRIDGED.replace("NV4", "PIX"),
            "fail",
            "SYS between 4 pairs, PIX between 2 pairs, but H100 modules are joined by NVLink",
        ),
    ],
)
def test_unequal_links(text, status, line):
    found = Smi(cards=parse_rows(nvidia.H100, nvidia.FIELDS), links=parse_links(text))
    assert told(gpus.check_links(found)) == [("links", status, line)]


def test_cards_that_share_the_memory_of_their_host_report_none():
    found = parse_rows("0, NVIDIA GB10, [N/A], [N/A]\n", ("index", "name", "memory.total", "memory.used"))
    assert told(gpus.check_memory(Smi(cards=found), 0.92)) == []


def test_one_card_has_no_links():
    assert parse_links("\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tNODE\t0-19\t0\t\tN/A\n") == {}
    assert parse_links("Failed to run topology matrix\n") == {}


def test_a_fabric_that_has_not_started():
    cards = tuple({**card, "fabric.state": "In Progress"} for card in parse_rows(nvidia.H100, nvidia.FIELDS))
    assert told(gpus.check_links(Smi(cards=cards))) == [("NVLink", "fail", "the fabric of GPU 0, 1, 2, 3 is still starting")]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.133\n",
            "restart the machine",
        ),
        ("Failed to initialize NVML: Unknown Error\n", "start it again"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "of branch 580"),
        ("Unable to determine the device handle for GPU0000:01:00.0: GPU has fallen off the bus.\n", "Xid"),
        ("No devices were found\n", "Xid"),
        ("something new\n", "check the driver"),
    ],
)
def test_a_driver_that_does_not_answer(text, remedy, smi):
    (finding,) = gpus.check_driver(smi(gpu=text, topology="", code=9), 13)
    assert (finding.status, finding.text) == ("fail", f"nvidia-smi: {text.splitlines()[0]}")
    assert remedy in finding.remedy


def test_a_driver_without_cards_that_reports_success(smi):
    assert smi(gpu="No devices were found\n", topology="").problem == "No devices were found"


def test_a_machine_without_a_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert told(gpus.check_driver(nvidia_smi.read(), 13, devices=f"{tmp_path}/nvidia*"))[0][1] == "ok"
    (tmp_path / "nvidia0").touch()
    assert told(gpus.check_driver(nvidia_smi.read(), 13, devices=f"{tmp_path}/nvidia*"))[0][1] == "warn"


@pytest.mark.parametrize(
    ("found", "num_cards", "environment", "statuses"),
    [
        ({"platform": "gpu", "kind": "H", "count": 4, "wrong": [], "sum": True}, 4, {}, ["ok", "ok"]),
        (
            {"platform": "gpu", "kind": "H", "count": 2, "wrong": [], "sum": True},
            4,
            {"CUDA_VISIBLE_DEVICES": "0,3"},
            ["ok", "ok"],
        ),
        ({"platform": "gpu", "kind": "H", "count": 3, "wrong": [], "sum": True}, 4, {}, ["fail", "ok"]),
        ({"platform": "gpu", "kind": "H", "count": 4, "wrong": [2], "sum": False}, 4, {}, ["ok", "fail", "fail"]),
        ({"platform": "cpu", "kind": "cpu", "count": 1, "wrong": []}, 4, {}, ["fail"]),
        ({"platform": "cpu", "kind": "cpu", "count": 1, "wrong": []}, 4, {"JAX_PLATFORMS": "cpu"}, ["ok"]),
        ({"platform": "cpu", "kind": "cpu", "count": 1, "wrong": []}, 0, {}, ["ok"]),
    ],
)
def test_devices_of_jax_beside_those_of_the_driver(found, num_cards, environment, statuses):
    assert [status for _, status, _ in told(devices.check_found(found, num_cards, environment))] == statuses


@pytest.mark.slow
def test_the_program_that_asks_jax():
    environment = devices.environment_of_probe() | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    environment.pop("XLA_FLAGS", None)
    assert told(devices.check_devices(0, environment)) == [
        ("jax devices", "ok", "4 x cpu"),
        ("collectives", "ok", "the sum over 4 devices is right"),
    ]
    ((_, status, text),) = told(devices.check_devices(0, environment | {"JAX_PLATFORMS": "nonsense"}))
    assert status == "fail"
    assert "nonsense" in text
