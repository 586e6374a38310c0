"""The constants of a cluster: as built in, and measured ones in their place."""

import dataclasses

import pytest

from llamajax.config.calibration import Constants
from llamajax.config.file import dump_config
from llamajax.config.gpus import GPUS
from llamajax.config.machine import HardwareConfig
from llamajax.planning.cost.gpu import CALIBRATIONS, planned_machine, remarks
from llamajax.planning.cost.kernels import Dot, dot_seconds
from llamajax.planning.cost.network import all_reduce_seconds, ring_seconds
from tests.config.test_calibration import MEASUREMENT
from tests.planning.modules import MACHINE
from tests.planning.plans import CONFIG
from tests.tiny import tiny_config


def test_what_was_not_measured_stays_as_built_in(tmp_path):
    (tmp_path / "h100.yaml").write_text(dump_config(MEASUREMENT))
    assert planned_machine(CONFIG).calibration == CALIBRATIONS["H100"]
    machine = planned_machine(CONFIG.changed({"hardware.calibration": str(tmp_path / "h100.yaml")}))
    assert machine.built_in == CALIBRATIONS["H100"]
    assert machine.calibration == dataclasses.replace(
        CALIBRATIONS["H100"], matmul_efficiency=0.7, kernel_s=1.5e-6, host_bandwidth=5e10, compute_slowdown=0.0
    )


def test_products_and_links_are_as_fast_as_measured():
    measured = Constants(matmul_efficiency=0.36, gpu_link_efficiency=0.4, node_link_efficiency=0.17)
    slow = dataclasses.replace(MACHINE, measured=measured)
    dot = Dot(batch=1, rows=8192, columns=8192, contracted=8192, dtype="bf16")
    assert dot_seconds(dot, slow) == pytest.approx(2 * dot_seconds(dot, MACHINE))
    assert slow.gpu_link == pytest.approx(MACHINE.gpu_link / 2)
    assert slow.node_link == pytest.approx(MACHINE.node_link / 5)


def test_every_gpu_has_constants():
    assert {gpu.family for gpu in GPUS} == CALIBRATIONS.keys()


_RACK = "not known of GB200: products' and NVLink's shares of their peaks, and attention's backward pass (taken as on H100)"
_SLOT = "the GPUs of a node are joined by PCIe"


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        (HardwareConfig(gpu="h100", nodes=2), ()),
        (HardwareConfig(gpu="gb200", gpus_per_node=72), (_RACK,)),
        (
            HardwareConfig(gpu="gb200", nodes=9),
            (_RACK, "NVLink joins 72 GB200 of a rack, and hardware.gpus_per_node says 8"),
        ),
        (HardwareConfig(gpu="rtx-3060-12gb", gpus_per_node=1), ("not known of RTX-3060-12GB: attention's share",)),
        (
            HardwareConfig(gpu="rtx-5090", gpus_per_node=2),
            ("not known", f"{_SLOT} without peer-to-peer, 63 GB/s each way,"),
        ),
        (
            HardwareConfig(gpu="l40s", gpu_bandwidth=16e9),
            ("not known of L40S", f"{_SLOT}, 16 GB/s each way,"),
        ),
    ],
)
def test_a_plan_tells_what_it_takes_without_knowing(hardware, expected):
    for line, start in zip(remarks(tiny_config(hardware=hardware)), expected, strict=True):
        assert line.startswith(start)


def test_a_rack_of_72_is_one_node_and_cards_share_their_slots():
    rack = planned_machine(tiny_config(hardware=HardwareConfig(gpu="gb200", nodes=2, gpus_per_node=72)))
    assert (rack.gpu.gpu_bandwidth, rack.gpu.node_bandwidth) == (900e9, 72 * 50e9)
    gathered = 1e9
    within = ring_seconds(gathered, 71, 0, 72, 1, rack)
    assert within == pytest.approx(gathered / rack.gpu_link, rel=0.2)
    cards = planned_machine(tiny_config(hardware=HardwareConfig(gpu="rtx-4090", gpus_per_node=4)))
    assert ring_seconds(gathered, 3, 0, 4, 1, cards) == pytest.approx(gathered / 12.6e9, rel=0.01)
    assert all_reduce_seconds(gathered, 4, 1, cards) > 50 * all_reduce_seconds(gathered, 4, 1, rack)
