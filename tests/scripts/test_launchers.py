"""slurm.sh and jobset.yaml start the launcher as it must be: what each of their hosts would start, it says itself."""

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from llamajax.config.file import load_config
from tests import runs

CONFIG = "configs/llama2_13b_32xa100_80gb.yaml"  # for four nodes of eight GPUs, as both files
GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
SRUN = """#!{python}
# Like that of Slurm 22.05: the command once per task, with what it sets there; one after the other.
import os, subprocess, sys
end = sys.argv.index(".venv/bin/python")
options = dict(option.partition("=")[::2] for option in sys.argv[1:end])
nodes = int(options["--nodes"])
tasks = nodes * int(options["--ntasks-per-node"])
for task in range(tasks):
    told = {{
        "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_NODES": nodes, "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_STEP_NUM_TASKS": tasks, "SLURM_NTASKS": tasks, "SLURM_NODEID": task * nodes // tasks, "SLURM_PROCID": task,
    }}
    environment = os.environ | {gpus} | {{name: str(value) for name, value in told.items()}}
    subprocess.run(sys.argv[end:], env=environment, check=True)
"""
PYTHON = """#!/bin/sh
# python -m llamajax.launch ..., which tells what it would start.
shift 2
exec {python} -m llamajax.launch --check "$@"
"""


@pytest.fixture
def workspace(tmp_path) -> pathlib.Path:
    """A directory to start from, with the configurations and the files that the one here names."""
    (tmp_path / "configs").symlink_to(runs.ROOT / "configs")
    (tmp_path / "scripts").symlink_to(runs.ROOT / "scripts")
    data = load_config(runs.ROOT / CONFIG).data
    assert data.tokenizer.path is not None
    for pattern in (data.tokenizer.path, *(path for source in data.sources for path in source.paths)):
        file = tmp_path / pattern.replace("**/", "").replace("*", "x")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path


def make_program(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(python=sys.executable, gpus=GPUS))
    path.chmod(0o755)


def start(command: list[str], workspace: pathlib.Path, told: dict[str, str]) -> list[str]:
    """The lines that the launchers print."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {"PYTHONPATH": str(runs.ROOT)} | told
    outcome = subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.splitlines()


def expected(host: int, told_by: str, address: str) -> list[str]:
    ranks = f"ranks {8 * host} to {8 * host + 7} of 32"
    return [
        f"hosts      4, this is host {host}; from {told_by}",
        f"processes  8 processes of llamajax.train on host {host} of 4: {ranks}, 1 GPU each",
        f"meet at    {address}",
        *([f"listens on [::]:{address.rpartition(':')[2]} (process 0)"] if host == 0 else []),  # no such name here
    ]


def test_slurm_starts_one_launcher_per_node(workspace):
    make_program(workspace / "bin" / "srun", SRUN)
    make_program(workspace / ".venv" / "bin" / "python", PYTHON)
    script = (runs.ROOT / "scripts" / "slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script, flags=re.MULTILINE))
    assert (options["nodes"], options["gpus-per-node"], options["signal"]) == ("4", "8", "TERM@120")
    assert "requeue" in options
    job = {"SLURM_JOB_ID": "4103", "SLURM_JOB_NUM_NODES": options["nodes"], "SLURM_JOB_NODELIST": "gpu[003-005,12].invalid"}
    path = {"PATH": f"{workspace / 'bin'}:{os.environ['PATH']}"}
    lines = start(["bash", "scripts/slurm.sh", CONFIG, "--seed", "7"], workspace, job | path)
    commands = [line for line in lines if line.startswith("command ")]
    assert commands == [f"command    python -m llamajax.train --config {CONFIG} --seed 7 --distributed.enabled true"] * 4
    of_hosts = [line for host in range(4) for line in expected(host, "Slurm", "gpu003.invalid:61447")]
    assert [line for line in lines if line not in commands] == of_hosts


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """Objects that `jobset.yaml` declares, by kind."""
    documents = yaml.safe_load_all((runs.ROOT / "scripts" / "jobset.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_kubernetes_starts_one_launcher_per_pod(manifest, workspace):
    job_set = manifest["JobSet"]
    assert job_set["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    (hosts,) = job_set["spec"]["replicatedJobs"]
    job = hosts["template"]["spec"]
    assert (job["completionMode"], hosts["replicas"]) == ("Indexed", 1)
    assert job["parallelism"] == job["completions"] == 4
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    told = {variable["name"]: variable["value"] for variable in container["env"]} | GPUS
    # The name that JobSet gives to the first pod, within the headless service.
    first_pod = f"{job_set['metadata']['name']}-{hosts['name']}-0-0.{job_set['spec']['network']['subdomain']}"
    (port,) = [port["containerPort"] for port in container["ports"]]
    python, *command = container["command"]
    assert python == "python"
    end = command.index("--")
    for index in range(job["completions"]):
        pod = told | {"JOB_COMPLETION_INDEX": str(index)}
        lines = start([sys.executable, *command[:end], "--check", *command[end:]], workspace, pod)
        assert lines[:-1] == expected(index, "LLAMAJAX_NUM_HOSTS and JOB_COMPLETION_INDEX", f"{first_pod}:{port}")
        assert lines[-1].startswith(f"command    python -m llamajax.train --config={CONFIG} --run_dir=/runs/")


def test_kubernetes_gives_up_where_another_start_cannot_help(manifest):
    spec = manifest["JobSet"]["spec"]
    assert [rule["action"] for rule in spec["failurePolicy"]["rules"]] == ["FailJobSet"]
    (job,) = (hosts["template"]["spec"] for hosts in spec["replicatedJobs"])
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]["values"]
    assert rule["action"] == "FailJob"
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # which the rule needs
    assert {2, 3, 6, 65, 70, 93} <= set(codes)
    assert not {0, 4, 74, 75}.intersection(codes)  # stopped, hosts that did not come, disks, processes that were lost
    (container,) = job["template"]["spec"]["containers"]
    assert "--stopped_code=75" in container["command"]


def test_pods_may_do_what_they_must_and_write_where_they_should(manifest):
    pod = manifest["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted.keys() == volumes.keys()
    claim = volumes["runs"]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest["PersistentVolumeClaim"]["metadata"]["name"]
    written = [argument.partition("=")[2] for argument in container["command"] if "/" in argument.partition("=")[2]]
    assert all(path.startswith((mounted["runs"], "configs/")) for path in written)
    name = manifest["JobSet"]["metadata"]["name"]
    selected = manifest["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert selected == {"jobset.sigs.k8s.io/jobset-name": name}
