"""The constants of a cluster: as built in, and measured ones in their place."""

import dataclasses

import pytest

from llamajax.config.calibration import Constants
from llamajax.config.file import dump_config
from llamajax.planning.cost.gpu import CALIBRATIONS, planned_machine
from llamajax.planning.cost.kernels import Dot, dot_seconds
from tests.config.test_calibration import MEASUREMENT
from tests.planning.modules import MACHINE
from tests.planning.plans import CONFIG


def test_what_was_not_measured_stays_as_built_in(tmp_path):
    (tmp_path / "h100.yaml").write_text(dump_config(MEASUREMENT))
    assert planned_machine(CONFIG).calibration == CALIBRATIONS[9]
    machine = planned_machine(CONFIG.changed({"hardware.calibration": str(tmp_path / "h100.yaml")}))
    assert machine.built_in == CALIBRATIONS[9]
    assert machine.calibration == dataclasses.replace(
        CALIBRATIONS[9], matmul_efficiency=0.7, kernel_s=1.5e-6, host_bandwidth=5e10, compute_slowdown=0.0
    )


def test_products_and_links_are_as_fast_as_measured():
    measured = Constants(matmul_efficiency=0.36, gpu_link_efficiency=0.4, node_link_efficiency=0.17)
    slow = dataclasses.replace(MACHINE, measured=measured)
    dot = Dot(batch=1, rows=8192, columns=8192, contracted=8192, dtype="bf16")
    assert dot_seconds(dot, slow) == pytest.approx(2 * dot_seconds(dot, MACHINE))
    assert slow.gpu_link == pytest.approx(MACHINE.gpu_link / 2)
    assert slow.node_link == pytest.approx(MACHINE.node_link / 5)
