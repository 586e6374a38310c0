"""The limit of jax's pool of pinned memory follows from the run's need, and is checked against the machine."""

import os

import pytest

from llamajax.config.file import load_config
from llamajax.errors import EnvironmentMismatchError
from llamajax.step import pinned_memory
from llamajax.step.pinned_memory import VARIABLE, memory_of_machine, prepare

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)

    def of(size: int) -> None:
        monkeypatch.setattr(pinned_memory, "memory_of_machine", lambda: size)

    of(2048 * GIB)
    return of


def test_a_run_on_the_card_changes_nothing():
    assert prepare(load_config("llama2_7b_8xa100_80gb")) is None
    assert VARIABLE not in os.environ


def test_the_pool_may_hold_what_the_gpus_of_a_node_need():
    told = prepare(load_config("llama2_70b_8xa100_80gb"))
    assert told is not None
    assert told.startswith("1.37 TiB of this machine's 2.00 TiB, for 8 GPUs")
    needed = 8 * 175.36
    assert 1.05 * needed < int(os.environ[VARIABLE]) < 1.15 * needed


def test_what_the_environment_names_stays(monkeypatch):
    monkeypatch.setenv(VARIABLE, "7")
    prepare(load_config("llama2_70b_8xa100_80gb"))
    assert os.environ[VARIABLE] == "7"


def test_a_machine_with_too_little_memory_is_refused_before_jax_starts(machine):
    machine(1024 * GIB)
    with pytest.raises(
        EnvironmentMismatchError, match=r"^offload: 1\.37 TiB of host memory for 8 GPUs are more than 90% of"
    ):
        prepare(load_config("llama2_70b_8xa100_80gb"))


def test_a_limit_on_locked_memory_is_told(monkeypatch):
    for limit, is_told in ((64 << 10, True), (-1, False), (2**50, False)):
        monkeypatch.setattr(pinned_memory.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        told = prepare(load_config("llama2_70b_8xa100_80gb"))
        assert told is not None
        assert ("ulimit -l is 64.0 KiB" in told) == is_told


def test_without_a_named_gpu_the_pool_may_grow_with_the_machine():
    config = load_config("llama2_13b_1xa100_80gb", ["hardware.gpu=none"])
    told = prepare(config)
    assert told is not None
    assert int(os.environ[VARIABLE]) == int(0.9 * 2048)


def test_a_container_has_the_memory_of_its_group(tmp_path):
    whole = memory_of_machine(tmp_path)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert memory_of_machine(tmp_path) == whole
    (group / "memory.max").write_text("1000000\n")
    assert memory_of_machine(tmp_path) == 1000000
