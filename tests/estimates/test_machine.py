"""The constants of a cluster: as built in, and measured ones in their place."""

import dataclasses
import re
from pathlib import Path

import pytest

from llamajax.config.file import dump_config
from llamajax.config.machine import HardwareConfig
from llamajax.estimates.calibration import Constants, read_measurement
from llamajax.estimates.formulas import mesh_sizes
from llamajax.estimates.gpus import GPUS
from llamajax.estimates.machine import CALIBRATIONS, planned_machine
from llamajax.planning.cost.kernels import Dot, dot_seconds
from llamajax.planning.cost.network import all_reduce_seconds, ring_seconds
from llamajax.planning.cost.remarks import remarks
from llamajax.planning.cost.replay import replay
from llamajax.planning.xla.parse import parse
from tests.estimates.test_calibration import MEASUREMENT
from tests.planning.modules import MACHINE
from tests.planning.plans import CONFIG, HLO
from tests.tiny import tiny_config

CALIBRATION_FILES = Path(__file__).parents[2] / "configs" / "calibrations"


def test_what_was_not_measured_stays_as_built_in(tmp_path):
    (tmp_path / "h100.yaml").write_text(dump_config(MEASUREMENT))
    assert planned_machine(CONFIG).calibration == CALIBRATIONS["H100"]
    machine = planned_machine(CONFIG.changed({"hardware.calibration": str(tmp_path / "h100.yaml")}))
    assert machine.built_in == CALIBRATIONS["H100"]
    assert machine.calibration == dataclasses.replace(
        CALIBRATIONS["H100"], matmul_efficiency=0.7, kernel_s=1.5e-6, host_bandwidth=5e10, compute_slowdown=0.0
    )


def test_a_deterministic_step_loses_rate_in_attentions_backward_pass_alone():
    usual = planned_machine(CONFIG).calibration
    deterministic = planned_machine(CONFIG.changed({"xla.deterministic": True})).calibration
    for head_dim in (64, 80, 128):
        (forward, backward), (usual_forward, usual_backward) = deterministic.attention(head_dim), usual.attention(head_dim)
        assert (forward, backward) == pytest.approx((usual_forward, 0.621 * usual_backward))
    others = ("attention_backward_efficiency", "attention_64_backward_efficiency")
    assert dataclasses.replace(deterministic, **{name: getattr(usual, name) for name in others}) == usual


def test_products_and_links_are_as_fast_as_measured():
    half = MACHINE.calibration.matmul_efficiency / 2
    measured = Constants(matmul_efficiency=half, gpu_link_efficiency=0.4, node_link_efficiency=0.17)
    slow = dataclasses.replace(MACHINE, measured=measured)
    dot = Dot(batch=1, rows=8192, columns=8192, contracted=8192, dtype="bf16")
    assert dot_seconds(dot, slow) == pytest.approx(2 * dot_seconds(dot, MACHINE))
    assert slow.gpu_link == pytest.approx(MACHINE.gpu_link / 2)
    assert slow.node_link == pytest.approx(MACHINE.node_link / 5)


def test_every_gpu_has_constants():
    assert {gpu.family for gpu in GPUS} == CALIBRATIONS.keys()


_RACK = "unknown for GB200: NVLink's share of its peak, and attention's backward pass .assumed as on H100.$"
_SLOT = "the GPUs of a node are connected by PCIe"


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        (HardwareConfig(gpu="h100", nodes=2), ()),
        (HardwareConfig(gpu="gb200", gpus_per_node=72), (_RACK,)),
        (
            HardwareConfig(gpu="gb200", nodes=9),
            (_RACK, "NVLink connects 72 GB200 of a rack, but hardware.gpus_per_node is 8"),
        ),
        (
            HardwareConfig(gpu="rtx-3060-12gb", gpus_per_node=1),
            ("unknown for RTX-3060-12GB: attention's share .*; products' share of the peak .assumed as on RTX-4090.$",),
        ),
        (HardwareConfig(gpu="rtx-4090", gpus_per_node=1), ("unknown for RTX-4090: .*assumed as on H100.$",)),
        (HardwareConfig(gpu="l4", gpus_per_node=1), ("unknown for L4: .*; products' share .* .assumed as on L40S.$",)),
        (
            HardwareConfig(gpu="rtx-5090", gpus_per_node=2),
            ("unknown", f"{_SLOT} without peer-to-peer, 63 GB/s each way,"),
        ),
        (
            HardwareConfig(gpu="l40s", gpu_bandwidth=16e9),
            ("unknown for L40S", f"{_SLOT}, 16 GB/s each way,"),
        ),
    ],
)
def test_a_plan_tells_what_it_takes_without_knowing(hardware, expected):
    for line, start in zip(remarks(tiny_config(hardware=hardware)), expected, strict=True):
        assert re.match(start, line), line


def test_a_rack_of_72_is_one_node_and_cards_share_their_slots():
    rack = planned_machine(tiny_config(hardware=HardwareConfig(gpu="gb200", nodes=2, gpus_per_node=72)))
    assert (rack.gpu.gpu_bandwidth, rack.gpu.node_bandwidth) == (900e9, 72 * 50e9)
    gathered = 1e9
    within = ring_seconds(gathered, 71, 0, 72, 1, rack)
    assert within == pytest.approx(gathered / rack.gpu_link, rel=0.2)
    cards = planned_machine(tiny_config(hardware=HardwareConfig(gpu="rtx-4090", gpus_per_node=4)))
    assert ring_seconds(gathered, 3, 0, 4, 1, cards) == pytest.approx(gathered / 12.6e9, rel=0.01)
    assert all_reduce_seconds(gathered, 4, 1, cards) > 50 * all_reduce_seconds(gathered, 4, 1, rack)


def test_narrow_heads_attend_at_their_own_rate():
    """As published at 64 and 128, along a straight line between."""
    share = MACHINE.calibration
    assert share.attention(128) == share.attention(256) == (share.attention_efficiency, share.attention_backward_efficiency)
    narrow = (share.attention_64_efficiency, share.attention_64_backward_efficiency)
    assert share.attention(64) == share.attention(32) == narrow
    assert share.attention(96) == pytest.approx([(a + b) / 2 for a, b in zip(narrow, share.attention(128), strict=True)])
    assert narrow[0] * 989.5 == pytest.approx(379, rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "step_s", "compute_s"),
    [
        ("a100-40gb", 0.017126667111832757, 0.00217128595082068),
        ("a100-80gb", 0.017018627561245833, 0.002025978385758664),
        ("h100", 0.0029327385393153006, 0.0009444454183471654),
        ("h200", 0.0028713723611863396, 0.0008587644595045448),
    ],
)
def test_the_constants_of_2026_11_26_tell_what_they_told_that_day(gpu, step_s, compute_s):
    """The kept module has the times that commit bcc7128 printed. The files have every constant, so that no built-in one
    counts."""
    file = CALIBRATION_FILES / f"2026-11-26_{gpu}.yaml"
    config = CONFIG.changed({"hardware.gpu": gpu, "hardware.calibration": str(file)})
    measurement = read_measurement(config.hardware)
    assert measurement is not None
    assert None not in vars(measurement.constants).values()
    timeline = replay(parse(HLO), planned_machine(config), mesh_sizes(config))
    assert (timeline.step_time_s, timeline.compute_s) == pytest.approx((step_s, compute_s), rel=1e-9)
