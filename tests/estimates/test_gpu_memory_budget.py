"""Memory of a card for XLA's arrays: the same for a plan and for its training."""

import os
from typing import Any

import pytest

from llamajax.config.machine import HardwareConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import TrainConfig
from llamajax.errors import EnvironmentMismatchError
from llamajax.estimates.gpu_memory_budget import VARIABLE, Allowance, allowance, memory_fraction, room
from llamajax.parallel import startup
from llamajax.planning import memory
from llamajax.step.resolve import resolve_planned
from tests.tiny import tiny_config

GIB = 2**30


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that what a test sets is taken back
    monkeypatch.delenv(VARIABLE)


def on(gpu: Any = "a100-40gb", **axes):
    return tiny_config(
        hardware=HardwareConfig(gpu=gpu), mesh=MeshConfig(**axes), train=TrainConfig(num_steps=10, global_batch_size=32)
    )


def test_the_allowance_is_stated():
    beside = Allowance(num_communicators=2)
    assert beside.total_bytes == GIB + 2 * 24 * 2 * (524_288 + 4_915_200 + 4_194_304)
    assert str(beside).startswith("1,906 MiB besides XLA's arrays: CUDA context 512, ")


@pytest.mark.parametrize(
    ("axes", "communicators"),
    [({"fsdp": 1}, 0), ({"fsdp": 8}, 1), ({"data": 2, "fsdp": 4}, 3), ({"data": 2, "fsdp": 2, "tensor": 2}, 7)],
)
def test_every_set_of_axes_may_have_a_communicator(axes, communicators):
    assert allowance(axes).num_communicators == communicators


def test_training_leaves_what_is_needed_beside_its_arrays():
    """Seven communicators take 4.0 GiB with CUDA, where the usual share of an A100 with 40 GB leaves 3.15."""
    config = on(data=2, fsdp=2, tensor=2)
    card = memory.estimate(resolve_planned(config)).capacity_bytes
    beside = allowance({"data": 2, "fsdp": 2, "tensor": 2}).total_bytes
    assert 3.9 * GIB < beside < 4.1 * GIB
    assert (1 - 0.92) * card < 3.2 * GIB
    share = memory_fraction(config)
    assert share == room(card, allowance({"data": 2, "fsdp": 2, "tensor": 2}))
    assert beside <= (1 - share) * card < beside + card / 1000
    assert memory_fraction(on(fsdp=8)) == memory_fraction(on("h100", data=2, fsdp=2, tensor=2)) == 0.92
    assert memory_fraction(tiny_config()) == 0.92


def test_what_training_sets_is_what_the_plan_counts_on(monkeypatch):
    config = on(data=2, fsdp=2, tensor=2)
    planned = memory.estimate(resolve_planned(config)).training_fraction
    monkeypatch.setattr(startup, "select_platform", lambda config, *, or_more: None)
    startup.start(config)
    assert float(os.environ[VARIABLE]) == planned < 0.92


def test_the_environment_decides_for_both(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0.8")
    config = on(fsdp=8)
    assert memory.estimate(resolve_planned(config)).training_fraction == memory_fraction(config) == 0.8
    startup.connect(MeshConfig(), config.distributed)
    assert os.environ[VARIABLE] == "0.8"
    monkeypatch.setenv(VARIABLE, "most")
    with pytest.raises(EnvironmentMismatchError, match=r"XLA_PYTHON_CLIENT_MEM_FRACTION='most' must be a share"):
        memory_fraction(config)
