"""Tests of llamajax.planning.domains, and of the bytes that cross domains in a compiled step."""

import dataclasses
import json
import subprocess
import sys
from collections import defaultdict
from typing import Any, cast

import pytest

from llamajax.config.domains import DomainConfig
from llamajax.config.file import config_to_dict
from llamajax.config.machine import HardwareConfig
from llamajax.config.parallel import MeshConfig, ParallelConfig
from llamajax.config.run import Config
from llamajax.config.training import TrainConfig
from llamajax.estimates.gpus import planned_gpu
from llamajax.estimates.machine import planned_machine
from llamajax.parallel.pipeline_schedule import PipelineSchedule
from llamajax.planning.cost.replay import replay
from llamajax.planning.cost.timeline import CollectiveUse
from llamajax.planning.domains import speeds_of_domains
from llamajax.planning.plan import Schedule
from llamajax.planning.xla.hlo import Module
from llamajax.planning.xla.parse import parse
from llamajax.step.pipeline_forms import head_form
from llamajax.step.resolve import resolve_planned
from tests.planning.modules import module
from tests.tiny import tiny_config

MICRO_BATCHES = 4
FAST, SLOW = (
    DomainConfig(name="fast", network="infiniband", nodes=2, node_bandwidth=100e9),
    DomainConfig(name="slow", network="roce", nodes=2, node_bandwidth=20e9),
)
COMPILE = """
import json, sys
from llamajax.config.file import settings_of
from llamajax.config.run import Config
from llamajax.parallel import mesh, startup

config = settings_of(Config, json.loads(sys.stdin.read()))
startup.select_platform(config.mesh)
import jax
from llamajax.step.compile import lower
from llamajax.step.pipeline_forms import head_form
from llamajax.step.resolve import resolve_planned
from llamajax.step.state import abstract_state

run = resolve_planned(config)
with jax.set_mesh(mesh.make_mesh(config.mesh)):
    print(lower(run, abstract_state(run.config)).compile().as_text())
"""


def two_domains(**changes: Any) -> Config:
    config = tiny_config(
        mesh=MeshConfig(pipeline=2, data=2, fsdp=2, tensor=2, num_cpu_devices=16),
        parallel=ParallelConfig(zero=1, pipeline="1f1b", pipeline_head="last"),
        train=TrainConfig(num_steps=10, global_batch_size=8 * MICRO_BATCHES, grad_accum_steps=MICRO_BATCHES),
        hardware=HardwareConfig(gpu="h100", nodes=4, gpus_per_node=4, domain_bandwidth=1e9, domains=(FAST, SLOW)),
    )
    return config.changed(changes)


def compiled(config: Config) -> Module:
    """The step for sixteen devices of the CPU, in a process with as many."""
    child = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(config_to_dict(config)),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr
    return parse(child.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("head", "tied"), [("last", False), pytest.param("shared", True, marks=pytest.mark.long)])
def test_only_activations_the_ends_and_scalars_cross_domains(head, tied):
    """Per device: an activation and a gradient in every tick, weights and gradients of the ends once, and scalars."""
    config = two_domains(**{"parallel.pipeline_head": head, "model.tie_embeddings": tied})
    mesh = config.mesh.axis_sizes(16)
    uses = replay(compiled(config), planned_machine(config), mesh).collectives
    crossing = [use for use in uses if use.collective.wire_bytes["inter_domain"]]
    assert all("pipeline" in use.collective.axis for use in crossing)
    width, p = 4, mesh["pipeline"]
    schedule = PipelineSchedule(p, MICRO_BATCHES)
    activation = config.rows_per_device(mesh) * config.data.seq_len * config.model.embed_dim * width // mesh["tensor"]
    norm = config.model.embed_dim * width
    end = config.model.vocab_size * config.model.embed_dim * width // mesh["tensor"]

    def kind(use: CollectiveUse) -> str:
        of = use.collective
        if of.kind == "collective-permute":
            return "permutes"
        if (of.axis, of.num_bytes) == ("pipeline", activation):
            return "head"
        return "ends" if of.axis == "pipeline+fsdp" and of.num_bytes >= end else "scalars"

    sent: dict[str, float] = defaultdict(float)
    for use in crossing:
        sent[kind(use)] += use.count * use.collective.wire_bytes["inter_domain"]
        assert kind(use) != "scalars" or use.collective.num_bytes <= norm + 64, "losses, norms, gradients of the last norm"
    forward, backward = schedule.units + p - 1, schedule.ticks - schedule.fill
    assert sent["permutes"] == (forward + backward) * activation
    # The head works a tick behind the last stage, once more than there are micro-batches.
    assert sent["head"] == (2 * (MICRO_BATCHES + 1) * activation * (p - 1) / p if head == "shared" else 0)
    # A ring of n devices passes (n - 1) / n of an array on, over p of its n links; a sum goes around twice.
    n, arrays = p * mesh["fsdp"], 1 if tied else 2
    assert sent["ends"] == 3 * arrays * end * (n - 1) / n * p / n, "gathered and summed once"


def test_domains_have_the_speed_of_their_networks_and_layers_in_proportion():
    config = two_domains(**{"model.num_layers": 12})
    run = resolve_planned(config)
    groups = "mesh['pipeline'=2,'data'=2,'fsdp'=2,'tensor'=2] {'data'}"
    text = (
        f"%x = bf16[8388608]{{0}} parameter(0)\n%r = bf16[8388608]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%f"
    )
    step = dataclasses.make_dataclass("Step", ["run"])(run)
    schedule = dataclasses.make_dataclass("Schedule", ["step", "module"])(step, module(text, num_devices=16))
    fast, slow = speeds_of_domains(config, cast(Schedule, schedule))
    assert (fast.name, fast.network, fast.nodes, fast.node_bandwidth) == ("fast", "infiniband", 2, 100e9)
    assert slow.step_time_s == pytest.approx(5 * fast.step_time_s, rel=0.05)
    assert (fast.layers, slow.layers) == ((10,), (2,))
    assert speeds_of_domains(config.changed({"hardware": HardwareConfig(gpu="h100")}), cast(Schedule, schedule)) == []


def test_the_head_is_shared_where_the_network_between_stages_is_fast():
    shapes = {"model.vocab_size": 131072, "model.embed_dim": 4096, "model.compute_dtype": "bfloat16"}
    config = two_domains(**shapes, **{"parallel.pipeline_head": "auto"})
    gpu, axes = planned_gpu(config.hardware), config.mesh.axis_sizes(16)
    assert head_form(config, axes, gpu)[0] == "last"
    fast = config.changed({"hardware.domain_bandwidth": 400e9})
    assert head_form(fast, axes, gpu)[0] == "shared"
    alike = config.changed({"hardware": HardwareConfig(gpu="h100", nodes=4, gpus_per_node=4)})
    assert head_form(alike, axes, gpu)[0] == "shared"
