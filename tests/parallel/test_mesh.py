"""Tests of llamajax.parallel.mesh."""

import ast
import itertools
import logging
import pathlib
import random
import subprocess
import sys
from dataclasses import dataclass

import pytest

import llamajax
from llamajax.config.parallel import AXES, MeshConfig
from llamajax.errors import EnvironmentMismatchError
from llamajax.parallel import mesh

ONE_MORE_AXIS = """
import pathlib, sys, types
import llamajax.config

# As if someone had written one more row into the table.
path = pathlib.Path(llamajax.config.__path__[0], "parallel.py")
source, row = path.read_text(), '    fsdp: AxisSize = field('
new_row = '    island: AxisSize = field(default=1, metadata=dict(splits=("batch", "micro_batch", "embed")))'
assert source.count(row) == 1
sys.modules["llamajax.config.parallel"] = module = types.ModuleType("llamajax.config.parallel")
exec(source.replace(row, new_row + chr(10) + row), module.__dict__)

import jax
from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh, startup
from llamajax.parallel.sharding import spec

startup.select_platform(MeshConfig(num_cpu_devices=8))
from llamajax.model import Llama
from tests.tiny import random_rows, tiny_config

config = tiny_config()
assert not config.placement_problems(8)
for sizes in (MeshConfig(), MeshConfig(island=2, fsdp=2, tensor=2)):
    jax.set_mesh(mesh.make_mesh(sizes))
    model = jax.jit(Llama, static_argnums=0)(config.model, jax.random.key(0))
    rows = {name: jax.device_put(x, spec("batch", "seq")) for name, x in random_rows(config, 0).items()}
    logits = jax.jit(lambda model, rows: model(rows["tokens"], rows["segment_ids"], rows["positions"]))(model, rows)
    print(jax.sharding.get_mesh().axis_names, model.layers.mlp.w_down.sharding.spec, f"{float(abs(logits).mean()):.5f}")
"""


@pytest.mark.slow
def test_an_axis_more_is_a_row_more_in_one_table():
    child = subprocess.run([sys.executable, "-c", ONE_MORE_AXIS], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    before, after = child.stdout.splitlines()
    assert (
        "('pipeline', 'data', 'island', 'fsdp', 'expert', 'sequence', 'tensor')"
        " P(None, ('island', 'fsdp', 'expert', 'sequence'), 'tensor')" in after
    )
    assert before.split()[-1] == after.split()[-1]


def test_nothing_else_names_the_axes_in_order():
    root = pathlib.Path(*llamajax.__path__)
    literals = [
        (path.relative_to(root).as_posix(), [leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)])
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict))
    ]
    named = [(path, [value for value in values if value in AXES]) for path, values in literals]
    assert not [(path, axes) for path, axes in named if len(axes) > 2 and axes == sorted(axes, key=AXES.index)]


@dataclass(frozen=True)
class Device:
    """A device of one of several hosts."""

    id: int
    process_index: int


def hosts_of(domains: list[int], per_host: int) -> list[Device]:
    """Devices of a host for each entry of `domains`, in any order."""
    devices = [Device(host * per_host + local, host) for host in range(len(domains)) for local in range(per_host)]
    random.shuffle(devices)
    return devices


def test_no_group_but_the_pipelines_crosses_domains_in_any_order_of_hosts():
    others = [axis for axis in AXES if axis != "pipeline"]
    subsets = [axes for n in range(1, len(others) + 1) for axes in itertools.combinations(others, n)]
    for seed in range(200):
        random.seed(seed)
        stages = random.choice([(1, 1), (1, 3), (2, 2), (1, 2, 1)])  # of every domain
        axes = MeshConfig(pipeline=sum(stages), data=2, fsdp=2, sequence=2, tensor=2)
        domains = [domain for domain, count in enumerate(stages) for _ in range(count * 16 // 4)]  # of every host of four
        random.shuffle(domains)
        devices = hosts_of(domains, 4)
        ordered = mesh.order_of_devices(devices, domains)
        assert sorted(ordered, key=lambda device: device.id) == sorted(devices, key=lambda device: device.id)
        found, sizes = [domains[device.process_index] for device in ordered], axes.axis_sizes(len(devices))
        assert [mesh.groups_across_domains(found, sizes, some) for some in subsets] == [0] * len(subsets)
        assert mesh.groups_across_domains(found, sizes, ["pipeline"]) == 16
        assert mesh.groups_across_domains(found, sizes, AXES) == 1
        ids = [[device.id for device in ordered if domains[device.process_index] == domain] for domain in set(domains)]
        assert all(own == sorted(own) for own in ids), "node after node within a domain"


def test_groups_that_cross_domains_are_counted():
    domains, sizes = [0, 0, 0, 1], {"pipeline": 2, "fsdp": 2}
    assert [mesh.groups_across_domains(domains, sizes, [axis]) for axis in sizes] == [1, 1]
    assert mesh.groups_across_domains([0, 1, 0, 1], sizes, ["pipeline"]) == 0
    assert mesh.groups_across_domains([0, 1, 0, 1], sizes, ["fsdp"]) == 2


def test_a_stage_in_two_domains_is_refused_in_one_line():
    domains = [1, 0, 0]
    with pytest.raises(EnvironmentMismatchError) as error:
        mesh.make_mesh(MeshConfig(pipeline=2), hosts_of(domains, 4), domains)
    assert str(error.value) == (
        "hardware.domains: 8 and 4 devices are not whole numbers of stages of 6 devices, and a stage must be within one"
        " domain; choose another mesh.pipeline, or other hosts"
    )


@pytest.mark.parametrize("has_driver", [False, True])
def test_a_plugin_for_gpus_is_missed_only_where_there_is_a_driver(has_driver, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(mesh, "_DRIVER", tmp_path if has_driver else tmp_path / "none")
    logger = logging.getLogger("jax._src.xla_bridge")
    try:
        raise RuntimeError("Unable to load cuFFT. Is it installed?")
    except RuntimeError:
        logger.exception("Jax plugin configuration error: Exception when calling jax_plugins.xla_cuda13.initialize()")
    logger.error("something else")
    assert len(caplog.records) == (2 if has_driver else 1)
