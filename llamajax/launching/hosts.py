"""Finds the hosts of a run, with one launcher on each, from variables of Slurm, Open MPI, Kubernetes or our own."""

import glob
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from llamajax.errors import EnvironmentMismatchError
from llamajax.processes.addresses import join

COORDINATOR = "JAX_COORDINATOR_ADDRESS"


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run."""

    count: int = 1
    own: int = 0
    """Number of this host."""
    coordinator: str = ""
    """`host:port` where the processes meet; empty with one host, where they meet on loopback."""
    told_by: str = "defaults, without cluster variables"
    """Source of this information, for people."""


def find_hosts(environment: Mapping[str, str]) -> Hosts:
    """Returns the hosts according to the innermost launcher; our own `LLAMAJAX_NUM_HOSTS` and `LLAMAJAX_HOST_ID` come first.

    Raises:
        EnvironmentMismatchError: the variables do not describe one launcher per host, or are incomplete.
    """
    for find in (_plain, _open_mpi, _slurm):
        if (hosts := find(environment)) is not None:
            break
    else:
        hosts = Hosts()
    if hosts.own >= hosts.count:
        raise EnvironmentMismatchError(f"{hosts.told_by}: host {hosts.own} must be below the number of hosts, {hosts.count}")
    if hosts.count > 1 and not hosts.coordinator:
        raise EnvironmentMismatchError(
            f"{hosts.told_by}: {hosts.count} hosts, but no address where they meet; set {COORDINATOR} to host:port of host 0"
        )
    return hosts


def _plain(environment: Mapping[str, str]) -> Hosts | None:
    if "LLAMAJAX_NUM_HOSTS" not in environment:
        return None
    own = "LLAMAJAX_HOST_ID" if "LLAMAJAX_HOST_ID" in environment else "JOB_COMPLETION_INDEX"  # from a Kubernetes Job
    return Hosts(
        count=_number(environment, "LLAMAJAX_NUM_HOSTS"),
        own=_number(environment, own),
        coordinator=environment.get(COORDINATOR, ""),
        told_by=f"LLAMAJAX_NUM_HOSTS and {own}",
    )


def _open_mpi(environment: Mapping[str, str]) -> Hosts | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    if _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") > 1:
        raise EnvironmentMismatchError("Open MPI starts several launchers on this host; use mpirun --map-by ppr:1:node")
    count = _number(environment, "OMPI_COMM_WORLD_SIZE")
    # The machine of mpirun, which is the machine of rank 0 by default. Absent from Open MPI 5 on.
    root = re.match(r"(\d+)\.\d+;(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    found = join(root[2] or root[3], _port(int(root[1]) >> 12)) if root else ""
    return Hosts(
        count=count,
        own=_number(environment, "OMPI_COMM_WORLD_RANK"),
        coordinator=environment.get(COORDINATOR, found),
        told_by="Open MPI",
    )


def _slurm(environment: Mapping[str, str]) -> Hosts | None:
    if "SLURM_JOB_ID" not in environment:
        return None
    in_step = "SLURM_STEP_NUM_TASKS" in environment  # started by srun, not in the batch script or the shell of salloc
    nodes = "SLURM_STEP_NUM_NODES" if in_step else "SLURM_JOB_NUM_NODES"
    count = _number(environment, nodes) if nodes in environment else 1
    if in_step and _number(environment, "SLURM_STEP_NUM_TASKS") > count:
        raise EnvironmentMismatchError("Slurm starts several launchers on this host; use srun --ntasks-per-node=1")
    if not in_step and count > 1:
        raise EnvironmentMismatchError(f"Slurm gave {count} nodes to this job; start one launcher on each, by srun")
    own = _number(environment, "SLURM_NODEID") if in_step else 0
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    port = _port(_number(environment, "SLURM_JOB_ID") + (_number(environment, "SLURM_STEP_ID") if in_step else 0))
    found = f"{first_host(names)}:{port}" if names else ""
    return Hosts(count=count, own=own, coordinator=environment.get(COORDINATOR, found), told_by="Slurm")


def first_host(names: str) -> str:
    """Returns the first host of a Slurm list: `gpu003` of `gpu[003-010,12],login1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", names)
    assert first is not None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _port(job: int) -> int:
    """Returns a port that all hosts of a job compute, and other jobs rarely do: one of the last 4,096."""
    return 65_536 - 4_096 + job % 4_096


def _number(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable, "")
    if not text.isdecimal():
        raise EnvironmentMismatchError(f"{variable}={text!r} must be a number; set it")
    return int(text)


def num_gpus(environment: Mapping[str, str]) -> int:
    """Returns the number of NVIDIA GPUs visible to processes started here, without asking the driver, which takes
    seconds."""
    if environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(glob.glob("/dev/nvidia[0-9]*"))
    return sum(1 for _ in itertools.takewhile(lambda name: name.strip() not in ("", "-1", "NoDevFiles"), visible.split(",")))
