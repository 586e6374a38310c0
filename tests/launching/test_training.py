"""The launcher with training itself: what is killed goes on, and what fails says why."""

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests import runs

BREAKS = """
import os
from llamajax.train import main as train
from llamajax.data.rows.loader import Loader

load = Loader.__next__

def breaks(self):
    step, batch = load(self)
    if step == 3 and os.environ["LLAMAJAX_PROCESS_ID"] == "1":
        raise RuntimeError("a loader that breaks")
    return step, batch

Loader.__next__ = breaks
train()
"""


def start(directory: pathlib.Path, *options: str, arguments: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A launch of two processes, whose compiled steps are kept in `directory`."""
    config = runs.write_config(directory, num_steps=12, eval_every=None, eval_batches=0)
    environment = runs.environment(directory.parent) | {"PYTHONPATH": f"{runs.ROOT}:{directory}"}
    command = [sys.executable, "-m", "llamajax.launch", "-n", "2", *options, "--", "--config", str(config)]
    return subprocess.Popen(
        [*command, "--mesh.num_cpu_devices", "4", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def rank(launcher: subprocess.Popen[str], number: int) -> int:
    """The process id of a rank."""
    children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    told = f"LLAMAJAX_PROCESS_ID={number}".encode()
    return next(int(pid) for pid in children if told in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


@pytest.mark.slow
def test_a_run_of_which_a_process_is_killed_goes_on_by_itself_with_the_same_losses(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = start(tmp_path / "whole")
    output, errors = whole.communicate(timeout=600)
    assert whole.returncode == 0, errors
    assert "finished" in output
    killed = start(tmp_path / "killed")
    run_dir = tmp_path / "killed" / "run"
    runs.wait_until(lambda: 5 in runs.committed_steps(run_dir) and runs.steps_on_record(run_dir) > 6, [killed])
    pid = rank(killed, 1)
    os.kill(pid, signal.SIGKILL)
    _, errors = killed.communicate(timeout=600)
    assert killed.returncode == 0, errors
    lines = [line.removeprefix("launch     ") for line in errors.splitlines() if line.startswith("launch ")]
    assert lines[1:3] == [
        f"process 1 (pid {pid}) was ended by SIGKILL, by a user or because memory ran out",
        "process 0 ended because of process 1",
    ]
    assert lines[3].startswith("restart in 1 s, from step ")
    assert runs.losses(run_dir) == runs.losses(tmp_path / "whole" / "run")


@pytest.mark.long
def test_a_run_begun_on_fewer_devices_goes_on_with_other_micro_batches(tmp_path):
    """The first batch, two of four rows, has too few micro-batches for all devices."""
    mesh = ("--mesh.fsdp=-1", "--mesh.sequence=1", "--mesh.tensor=1")
    config = runs.write_config(tmp_path, num_steps=12, eval_every=None, eval_batches=0)
    begun = runs.start(config, *mesh, "--mesh.num_cpu_devices=4", "--metrics.log_every=1")
    runs.wait_until(lambda: 5 in runs.committed_steps(tmp_path / "run"), [begun])
    begun.kill()
    begun.communicate()
    output, errors = start(tmp_path, arguments=mesh).communicate(timeout=600)
    said = "8 devices instead of 4: mesh fsdp 8, 1 accumulation step of 8 rows (was 2 of 4), same global batch and rows"
    assert f"elastic    {said}" in output, errors
    assert list(runs.losses(tmp_path / "run")) == list(range(1, 13))


@pytest.mark.long
def test_an_exception_is_told_once_with_its_traceback_and_then_why_the_others_end(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "breaks.py").write_text(BREAKS)
    launcher = start(tmp_path / "run", "--module", "breaks")
    _, errors = launcher.communicate(timeout=600)
    assert launcher.returncode == 70
    lines = [line for line in errors.splitlines() if not line.startswith("waiting ")]
    assert lines[1] == "[1] Traceback (most recent call last):"
    told = [line.removeprefix("[1] ") for line in lines if "a loader that breaks" in line]
    assert told[1] == "RuntimeError: a loader that breaks"  # after the line of the program that raises it
    assert told[2].startswith("process 1 (pid ")
    assert errors.count("Traceback") == 1
    assert [line.partition(" ended ")[2] for line in lines[-2:]] == [
        "with exit code 70, a defect in llamajax",
        "because of process 1",
    ]
