"""Tests of llamajax.config.machine."""

from typing import Any

import pytest

from llamajax.config.domains import DomainConfig
from llamajax.config.machine import HardwareConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from tests.tiny import tiny_config


def run(nodes: tuple[int, ...], **axes: Any) -> Config:
    domains = tuple(DomainConfig(name=f"domain{index}", network="roce", nodes=count) for index, count in enumerate(nodes))
    return tiny_config(mesh=MeshConfig(**axes), hardware=HardwareConfig(nodes=sum(nodes), domains=domains))


@pytest.mark.parametrize(("nodes", "pipeline"), [((2, 2), 2), ((2, 2), 4), ((1, 2), 3), ((2, 4), 6), ((1, 1, 2), 4)])
def test_domains_hold_whole_stages(nodes, pipeline):
    config = run(nodes, pipeline=pipeline)
    assert not [problem for problem in config.placement_problems(8 * pipeline) if problem.startswith("hardware.domains")]


@pytest.mark.parametrize(
    ("nodes", "pipeline", "own", "least"), [((2, 2), 1, "0.5", 2), ((1, 2), 2, "0.667", 3), ((2, 4), 4, "1.33", 3)]
)
def test_a_part_of_a_stage_in_a_domain_is_refused_in_one_line(nodes, pipeline, own, least):
    config = run(nodes, pipeline=pipeline)
    (problem,) = [problem for problem in config.placement_problems(24) if problem.startswith("hardware.domains")]
    assert problem == (
        f"hardware.domains.0: domain0 has {nodes[0]} of {sum(nodes)} nodes, which hold {own} of mesh.pipeline={pipeline}"
        f" stages, and a stage must be within one domain; set mesh.pipeline to a multiple of {least}, or other domains"
    )


def test_emulated_devices_are_in_no_domain():
    """The run on one device, for verification and evaluation, keeps its hardware."""
    config = run((2, 2), pipeline=2).changed({"mesh": MeshConfig(num_cpu_devices=1)})
    assert config.hardware.domains
