"""Tests of llamajax.launching.hosts: what clusters say, as they were seen to say it."""

import pytest

from llamajax.errors import EnvironmentMismatchError
from llamajax.launching.hosts import Hosts, find_hosts, first_host, num_gpus

SLURM = {
    "SLURM_JOB_ID": "70001", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "gpu[003-005]", "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[004-005]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1",
}  # fmt: skip
"""In a step on two of a job's three nodes (Slurm 22.05)."""
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
MEET = "run-hosts-0-0.run:8476"
POD = {"LLAMAJAX_NUM_HOSTS": "4", "JOB_COMPLETION_INDEX": "3", "JAX_COORDINATOR_ADDRESS": MEET}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Hosts()),
        (SLURM, Hosts(count=2, own=1, coordinator=f"gpu004:{61440 + 70003 % 4096}", told_by="Slurm")),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "ib4:99"}, Hosts(count=2, own=1, coordinator="ib4:99", told_by="Slurm")),
        (MPI, Hosts(count=4, own=2, coordinator=f"10.96.0.1:{61440 + (1531576320 >> 12) % 4096}", told_by="Open MPI")),
        (SLURM | MPI, find_hosts(MPI)),
        (
            MPI | {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620::2]:43370"},
            Hosts(count=4, own=2, coordinator=f"[fe80::b9b]:{61440 + (1314521088 >> 12) % 4096}", told_by="Open MPI"),
        ),
        (POD, Hosts(count=4, own=3, coordinator=MEET, told_by="LLAMAJAX_NUM_HOSTS and JOB_COMPLETION_INDEX")),
        (
            SLURM | POD | {"LLAMAJAX_HOST_ID": "0"},
            Hosts(count=4, own=0, coordinator=MEET, told_by="LLAMAJAX_NUM_HOSTS and LLAMAJAX_HOST_ID"),
        ),
    ],
)  # fmt: skip
def test_hosts_are_those_that_the_cluster_names(environment, expected):
    assert find_hosts(environment) == expected


def test_a_batch_script_on_one_node_needs_no_srun_whatever_tasks_it_has():
    batch = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "8", "SLURM_NODEID": "0"}
    assert find_hosts(batch).count == 1


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        (SLURM | {"SLURM_STEP_NUM_TASKS": "16"}, "Slurm starts several launchers on this host; use srun"),
        ({"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2"}, "Slurm gave 2 nodes to this job; start one launcher on"),
        (SLURM | {"SLURM_NODEID": "x"}, "SLURM_NODEID='x' must be a number; set it"),
        (SLURM | {"SLURM_NODEID": "2"}, "Slurm: host 2 must be below the number of hosts, 2"),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "Open MPI starts several launchers on this host; use"),
        (MPI | {"OMPI_MCA_orte_hnp_uri": ""}, "Open MPI: 4 hosts, but no address where they meet; set JAX_COO"),
        ({"LLAMAJAX_NUM_HOSTS": "2"}, "JOB_COMPLETION_INDEX='' must be a number; set it"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(environment, line):
    with pytest.raises(EnvironmentMismatchError) as caught:
        find_hosts(environment)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("gpu003", "gpu003"),
        ("gpu003,login1", "gpu003"),
        ("gpu[003-010,12]", "gpu003"),
        ("gpu[7,9],x[1-2]", "gpu7"),
        ("r[1-2]n[04-08]-ib,y", "r1n04-ib"),
    ],
)
def test_the_first_host_of_a_list(names, first):
    assert first_host(names) == first


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,1,2,3", 4), ("3", 1), ("GPU-8932f937,MIG-1", 2), ("", 0), ("-1", 0), ("0,-1,2", 1), ("NoDevFiles", 0)],
)
def test_gpus_are_those_that_cuda_sees(visible, count):
    assert num_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count
    assert num_gpus({"CUDA_VISIBLE_DEVICES": visible, "JAX_PLATFORMS": "cpu"}) == 0
