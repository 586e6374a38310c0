"""Tests of llamajax.launching.program: ranks, devices, and mistakes that show before anything is started."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from llamajax.config.file import load_config
from llamajax.config.launch import LaunchConfig
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.launching.hosts import Hosts
from llamajax.launching.program import Program, find_program
from tests import runs

ONE_HOST = Hosts()
TWO_HOSTS = Hosts(count=2, own=1, coordinator="node0:99")


@pytest.fixture
def find(tmp_path):
    """Finds the program on a host with so many GPUs."""
    path = runs.write_config(tmp_path)

    def find(
        *arguments: str,
        processes: int | None = None,
        hosts: Hosts = ONE_HOST,
        gpus: int = 0,
        module: str = "llamajax.train",
        environment: Mapping[str, str] | None = None,
    ) -> Program:
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))} | dict(environment or {})
        config = LaunchConfig(num_processes=processes, module=module)
        return find_program(config, ["--config", str(path), *arguments], hosts, environment)

    return find


def on_gpus(data: int) -> tuple[str, ...]:
    mesh = json.dumps({"data": data, "fsdp": 2, "sequence": 2, "tensor": 2})
    return ("--mesh", mesh, "--train.global_batch_size", "64")


@pytest.mark.parametrize(
    ("hosts", "processes", "ranks", "devices"),
    [
        (ONE_HOST, None, range(8), [str(gpu) for gpu in range(8)]),
        (ONE_HOST, 2, range(2), ["0,1,2,3", "4,5,6,7"]),
        (ONE_HOST, 1, range(1), ["0,1,2,3,4,5,6,7"]),
        (TWO_HOSTS, None, range(8, 16), [str(gpu) for gpu in range(8)]),
        (TWO_HOSTS, 1, range(1, 2), ["0,1,2,3,4,5,6,7"]),
    ],
)
def test_the_gpus_of_a_host_are_divided_among_its_processes_and_ranks_are_those_of_all_hosts(
    find, hosts, processes, ranks, devices
):
    program = find(*on_gpus(hosts.count), processes=processes, hosts=hosts, gpus=8)
    told = [program.environment(rank, "node0:99", None) for rank in program.ranks]
    assert [one["LLAMAJAX_PROCESS_ID"] for one in told] == [str(rank) for rank in ranks]
    assert {one["LLAMAJAX_NUM_PROCESSES"] for one in told} == {str(len(ranks) * hosts.count)}
    assert {one["JAX_COORDINATOR_ADDRESS"] for one in told} == {"node0:99"}
    assert [one["JAX_LOCAL_DEVICE_IDS"] for one in told] == devices
    assert [one.get("NCCL_SOCKET_IFNAME") for one in told] == ["lo" if hosts is ONE_HOST else None] * len(ranks)
    is_alone = len(ranks) * hosts.count == 1
    assert program.arguments[-2:] == (on_gpus(1)[-2:] if is_alone else ("--distributed.enabled", "true"))
    assert program.config.distributed.enabled != is_alone


DOMAINS = (
    "--hardware.nodes", "2", "--hardware.domains",
    "[{name: ib, network: infiniband, nodes: 1, env: [NCCL_IB_HCA=mlx5, NCCL_SOCKET_IFNAME=bond0]},"
    " {name: roce, network: roce, nodes: 1}]",
)  # fmt: skip


@pytest.mark.parametrize("domain", ["ib", "roce", None, "eth"])
def test_a_host_has_the_nccl_settings_of_its_domain(find, monkeypatch, domain):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    arguments = ("--mesh", "{pipeline: 2, fsdp: 8}", "--train.global_batch_size", "16", "--parallel.zero", "1", *DOMAINS)
    environment = {} if domain is None else {"LLAMAJAX_DOMAIN": domain}
    if domain not in ("ib", "roce"):
        with pytest.raises(EnvironmentMismatchError, match=r"^LLAMAJAX_DOMAIN is .* has ib, roce; set it to"):
            find(*arguments, hosts=TWO_HOSTS, gpus=8, environment=environment)
        return
    program = find(*arguments, hosts=TWO_HOSTS, gpus=8, environment=environment)
    told = program.environment(8, "node0:99", None)
    own = {"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "bond0"} if domain == "ib" else {}
    assert {name: value for name, value in told.items() if name.startswith("NCCL")} == own


def test_emulated_devices_are_of_each_process_and_gpus_do_not_count(find):
    alone = find(gpus=8)
    assert (alone.num_processes, alone.devices, alone.config.distributed.enabled) == (1, "8 emulated devices", False)
    two = find("--mesh.num_cpu_devices", "4", processes=2, gpus=8)
    assert (two.num_processes, two.devices) == (2, "4 emulated devices")
    told = two.environment(1, "127.0.0.1:9", "10.0.0.1:9")
    assert "JAX_LOCAL_DEVICE_IDS" not in told
    assert told["JAX_COORDINATOR_BIND_ADDRESS"] == "10.0.0.1:9"


def test_what_the_launcher_must_know_is_that_of_the_program(find, tmp_path):
    program = find("--watchdog.start_s", "7")
    assert (program.run_dir, program.start_s) == (tmp_path / "run", 7.0)
    assert find("--watchdog.enabled", "false").start_s is None


def test_a_program_that_keeps_nothing_has_no_run_directory():
    program = find_program(LaunchConfig(module="llamajax.evaluate"), ["--model", "m"], Hosts(), {"CUDA_VISIBLE_DEVICES": ""})
    assert (program.run_dir, program.start_s) == (None, None)


def test_a_run_that_goes_on_may_do_so_on_any_devices(find, tmp_path):
    """It chooses its micro-batches anew, which the batch of the beginning need not divide into."""
    wide = ("--mesh", json.dumps({"fsdp": -1}), "--train.grad_accum_steps", "2")
    with pytest.raises(ConfigError, match=r"8 / grad_accum_steps\(2\) = 4 sequences cannot be split over .* = 8 devices"):
        find(*wide, gpus=8)
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    assert find(*wide, gpus=8).num_processes == 8


@pytest.mark.parametrize(
    ("arguments", "processes", "gpus", "line"),
    [
        ((), 2, 0, r"^mesh: .* = 8, but there are 16 devices; .* \(2 processes x 8 emulated devices\)$"),
        (on_gpus(1), 3, 8, "^num_processes: 3 processes cannot share the 8 GPUs of this host equally; choose"),
        (("--distributed.enabled", "false"), 1, 0, None),
        (
            ("--mesh.num_cpu_devices=4", "--mesh.tensor=1", "--distributed.enabled=false"), 2, 0,
            "^distributed.enabled: false, but 2 processes are started; remove it$",
        ),
        (
            ("--mesh.num_cpu_devices=4", "--distributed.num_processes=2"), 2, 0,
            "^distributed.num_processes: set, but the launcher sets it; remove it$",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(find, arguments, processes, gpus, line):
    if line is None:
        assert find(*arguments, processes=processes, gpus=gpus).num_processes == 1
        return
    with pytest.raises((ConfigError, EnvironmentMismatchError), match=line):
        find(*arguments, processes=processes, gpus=gpus)


@pytest.mark.parametrize("joined", [False, True])
def test_processes_read_what_the_launcher_has_read_and_tell_its_own_name(tmp_path, monkeypatch, joined):
    """The configuration and its base: neither an edit nor a removal after the launch changes what a restart reads."""
    monkeypatch.chdir(tmp_path)
    path = runs.write_config(tmp_path).relative_to(tmp_path)
    (tmp_path / "folder/of").mkdir(parents=True)
    Path("folder/of/mine.yaml").write_text(f"base: ../../{path}\nseed: 7\n")
    arguments = ["--config=folder/of/mine.yaml"] if joined else ["--config", "folder/of/mine.yaml"]
    program = find_program(LaunchConfig(num_processes=1), arguments, ONE_HOST, {"CUDA_VISIBLE_DEVICES": ""})
    path.unlink()
    Path("folder/of/mine.yaml").write_text("edited: meanwhile")
    kept = program.with_config_in(tmp_path / "folder")
    assert kept.arguments == tuple(arguments)
    for name, value in kept.environment(0, "127.0.0.1:9", None).items():
        monkeypatch.setenv(name, value)
    assert (found := load_config("folder/of/mine.yaml")) == program.config
    assert found.seed == 7
    copies = {os.path.relpath(original): copy for original, copy in kept.config_copies.items()}
    assert {os.path.dirname(copy) for copy in copies.values()} == {f"{tmp_path}/folder/config"}
    Path(copies[str(path)]).write_text("modle: {}")
    with pytest.raises(ConfigError) as caught:
        load_config("folder/of/mine.yaml")
    assert f"{path}:1: unknown key 'modle'" in str(caught.value)
    assert f"{tmp_path}/folder" not in str(caught.value)


def test_a_configuration_that_can_be_read_once_only_is_refused(tmp_path):
    text = runs.write_config(tmp_path).read_text()
    reads, writes = os.pipe()
    os.write(writes, text.encode())
    os.close(writes)
    with pytest.raises(ConfigError, match=f"^--config: /dev/fd/{reads} is not a file .*; write it to one$"):
        find_program(LaunchConfig(num_processes=1), ["--config", f"/dev/fd/{reads}"], ONE_HOST, {"CUDA_VISIBLE_DEVICES": ""})
    os.close(reads)
