"""Processors, memory, limits, the clock, names, ports and packages."""

import os
import resource
import socket
from importlib import metadata
from pathlib import Path

import pytest

from llamajax.diagnostics import host, network, software
from llamajax.processes import addresses
from tests.diagnostics.test_gpus import told


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_quota_of_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    assert told(host.check_processors(8, tmp_path)) == [("processors", "ok", "32 of 64")]
    root = write(tmp_path, {"sys/fs/cgroup/cpu.max": "450000 100000\n"})
    assert told(host.check_processors(8, root)) == [("processors", "warn", "4.5 of 64 for 8 GPUs, which need 4 each")]
    assert told(host.check_processors(0, root)) == [("processors", "ok", "4.5 of 64")]
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert told(host.check_processors(8, root)) == [("processors", "ok", "32 of 64")]


def test_memory(tmp_path):
    assert told(host.check_memory(tmp_path)) == [("host memory", "warn", "unknown: /proc/meminfo cannot be read")]
    write(tmp_path, {"proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n"})
    assert told(host.check_memory(tmp_path)) == [("host memory", "ok", "16.0 GiB of 32.0 GiB free")]
    write(tmp_path, {"proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   1048576 kB\n"})
    assert told(host.check_memory(tmp_path)) == [("host memory", "warn", "1.00 GiB of 32.0 GiB free")]


def test_shared_memory(tmp_path, monkeypatch):
    docker = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 1, 1, 1, 0, 255))  # --shm-size is 64 MiB by default
    monkeypatch.setattr(os, "statvfs", lambda _: docker)
    assert told(host.check_shared_memory(8)) == [("shared memory", "warn", "64.0 MiB of 64.0 MiB free in /dev/shm")]
    assert told(host.check_shared_memory(1))[0][1] == "ok"
    monkeypatch.undo()
    missing = str(tmp_path / "shm")
    assert [status for _, status, _ in told(host.check_shared_memory(2, missing))] == ["fail"]


def test_limits(monkeypatch):
    limits = {resource.RLIMIT_NOFILE: (1024, 1024), resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert told(host.check_limits(locks_memory=True)) == [
        ("open files", "warn", "at most 1,024; 4,096 are needed"),
        ("locked memory", "warn", "at most 8.00 MiB; InfiniBand and offloading need more"),
    ]
    limits[resource.RLIMIT_NOFILE] = (1024, 8192)
    assert told(host.check_limits(locks_memory=False)) == [
        ("open files", "ok", "at most 8,192"), ("locked memory", "ok", "at most 8.00 MiB"),
    ]  # fmt: skip
    assert told(host.check_limits(locks_memory=False, num_processes=8192))[0][2] == "at most 8,192; 16,640 are needed"
    limits |= dict.fromkeys(limits, (resource.RLIM_INFINITY,) * 2)
    assert [text for _, _, text in told(host.check_limits(locks_memory=True))] == ["no limit", "no limit"]


def tracking(offset: str, leap: str) -> str:
    return f"""\
Reference ID    : E1FE1EBE (time.example)
Stratum         : 4
System time     : {offset} seconds slow of NTP time
RMS offset      : 0.000309569 seconds
Leap status     : {leap}
"""


def test_the_clock_of_chrony():
    assert host.check_tracking(tracking("0.000226142", "Normal")).text == "0.000 s slow of its time server"
    assert host.check_tracking(tracking("3.5", "Normal")).status == "warn"
    assert host.check_tracking(tracking("0.000000000", "Not synchronised")).text == "chrony has no time server"


@pytest.mark.parametrize(("answer", "status"), [("yes", "ok"), ("no", "warn")])
def test_the_clock_of_systemd(answer, status, tmp_path, monkeypatch):
    program = tmp_path / "timedatectl"
    program.write_text(f"#!/bin/sh\necho {answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [found for _, found, _ in told(host.check_clock())] == [status]
    program.unlink()
    assert [text for _, _, text in told(host.check_clock())] == ["neither timedatectl nor chronyc tells who sets it"]


@pytest.mark.parametrize(
    ("found", "status"),
    [(["127.0.1.1"], "warn"), (["127.0.1.1", "10.0.0.7"], "ok"), (["::1", "fd00::7"], "ok"), ([], "warn")],
)
def test_the_name_of_a_host(found, status, monkeypatch):
    def resolve(*_, **__):
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert [one for _, one, _ in told(network.check_name("gpu003"))] == [status]


def test_the_port_where_processes_meet():
    assert told(network.check_meeting_place(None, {}))[0][1] == "ok"
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        (found,) = told(network.check_meeting_place(taken, {}))
        assert (found[1], found[2].endswith("is taken")) == ("fail", True)
    free = f"127.0.0.1:{addresses.free_port()}"
    assert told(network.check_meeting_place(None, {"JAX_COORDINATOR_ADDRESS": free})) == [
        ("ports", "ok", f"{free} is here, and free")
    ]
    assert told(network.check_meeting_place("nowhere.invalid:1234", {}))[0][1] == "fail"
    assert told(network.check_meeting_place("no port", {}))[0][2].endswith("must be host:port")
    assert told(network.check_meeting_place(None, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "x"}))[0][1] == "fail"


def test_ports_on_another_host(monkeypatch):
    """The other host is played by this one: none of its addresses counts as own."""
    monkeypatch.setattr(addresses, "own_addresses", lambda _: [])
    monkeypatch.setattr(addresses, "is_loopback", lambda _: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        assert told(network.check_meeting_place(there, {})) == [("ports", "ok", f"{there} answers")]
    assert told(network.check_meeting_place(there, {})) == [
        ("ports", "ok", f"{there} can be reached; no process listens there yet")
    ]


def test_fast_ports(tmp_path):
    assert told(network.check_fast_ports(tmp_path))[0][1] == "ok"
    assert not network.has_fast_ports(tmp_path)
    ports = tmp_path / "sys/class/infiniband"
    write(ports, {"mlx5_0/ports/1/state": "4: ACTIVE\n", "mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n"})
    write(ports, {"mlx5_1/ports/1/state": "1: DOWN\n", "mlx5_1/ports/1/rate": "40 Gb/sec (4X QDR)\n"})
    assert network.has_fast_ports(tmp_path)
    assert told(network.check_fast_ports(tmp_path)) == [
        ("fast network", "ok", "mlx5_0:1 400 Gb/sec"), ("fast network", "warn", "not active: mlx5_1:1"),
    ]  # fmt: skip


def test_python():
    several = [told(software.check_python(version)) for version in ((3, 11, 9), (3, 12, 1), (3, 14, 0))]
    assert [status for ((_, status, _),) in several] == ["ok", "ok", "warn"]


def installed(monkeypatch, versions: dict[str, str], needs: dict[str, list[str]]) -> None:
    """Replaces the installed packages by others."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: needs.get(name, []))


def test_versions_of_jax_that_do_not_belong_together(monkeypatch):
    versions = {
        "jax": "0.10.2",
        "jaxlib": "0.10.2",
        "jax-cuda13-plugin": "0.10.2",
        "jax-cuda13-pjrt": "0.10.2",
        "nvidia-nccl-cu13": "2.29.7",
    }
    needs = {"jax": ["jaxlib<=0.10.2,>=0.10.1"], "jax-cuda13-plugin": ['nvidia-nccl-cu13>=2.27; extra == "with-cuda"']}
    installed(monkeypatch, versions, needs)
    assert told(software.check_jax(8)) == [
        ("jax", "ok", "jax 0.10.2, jaxlib 0.10.2, jax-cuda13-plugin 0.10.2"),
        ("NCCL", "ok", "2.29.7, of the package nvidia-nccl-cu13"),
    ]
    versions |= {"jaxlib": "0.9.0", "jax-cuda13-pjrt": "0.9.0", "jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}
    versions |= {"nvidia-nccl-cu13": "2.20.0"}
    found = told(software.check_jax(8))
    assert [(status, text) for _, status, text in found[:4]] == [
        ("fail", "jax needs jaxlib<=0.10.2,>=0.10.1 (0.9.0 is installed)"),
        ("fail", "jax-cuda13-pjrt 0.9.0, but jax is 0.10.2"),
        ("fail", "jax-cuda13-plugin needs nvidia-nccl-cu13>=2.27 (2.20.0 is installed)"),
        ("fail", "jax-cuda13-plugin and jax-cuda12-plugin are both installed"),
    ]
    del versions["nvidia-nccl-cu13"], versions["jax-cuda12-plugin"]
    assert told(software.check_jax(8))[-1][:2] == ("NCCL", "warn")
    assert told(software.check_jax(1))[-1][0] == "jax"
    del versions["jax"]
    assert told(software.check_jax(8)) == []


def test_packages_that_llamajax_needs(monkeypatch):
    assert {status for _, status, _ in told(software.check_packages())} == {"ok"}
    installed(monkeypatch, {"numpy": "1.26.4"}, {"llamajax": ["numpy>=2.0", "flax>=0.12", 'ray>=2; extra == "ray"']})
    assert [text for _, status, text in told(software.check_packages()) if status == "fail"] == [
        "llamajax needs numpy>=2.0 (1.26.4 is installed)",
        "llamajax needs flax>=0.12 (not installed)",
    ]


def test_variables_that_replace_libraries(tmp_path):
    assert told(software.check_variables({"LD_LIBRARY_PATH": f"{tmp_path}:", "NCCL_P2P_DISABLE": "0"})) == []
    (tmp_path / "libcudnn.so.9").touch()
    found = told(software.check_variables({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}", "NCCL_IB_DISABLE": "1"}))
    assert [status for _, status, _ in found] == ["warn", "warn"]
    assert f"libcudnn in {tmp_path}" in found[0][2]
