"""A Ray cluster makes the same bytes, also when one of its processes is killed."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests import runs
from tests.preprocessing.made import command, made, preprocess, write_config
from tests.preprocessing.test_run import wait_for

pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def _rays_files_go():
    """Ray leaves its logs and sockets in the directory for temporary files, whose path has to be short."""
    yield
    shutil.rmtree(Path(tempfile.gettempdir()) / "ray", ignore_errors=True)


def workers() -> list[int]:
    """Ray's processes that are at a task of ours."""
    return [
        int(process.parent.name)
        for process in Path("/proc").glob("[0-9]*/cmdline")
        if process.exists() and b"ray::_call_telling" in process.read_bytes()
    ]


@pytest.mark.slow
def test_a_cluster_of_rays_makes_the_same(tmp_path):
    config = write_config(tmp_path)
    preprocess(config, tmp_path / "one")
    out = preprocess(config, tmp_path / "rays", "--executor", "ray", "--workers", "2")
    assert re.search(r"^tokenized  [\d,]+ documents in .* by 2 processes$", out, re.M)
    assert made(tmp_path / "rays") == made(tmp_path / "one")


@pytest.mark.long
def test_a_killed_worker_of_rays_changes_nothing(tmp_path):
    config = write_config(tmp_path, num_documents=10_000)
    preprocess(config, tmp_path / "one")
    arguments = command(config, tmp_path / "rays", "--executor", "ray", "--workers", "2")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(arguments, cwd=runs.ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        wait_for(lambda: list((tmp_path / "rays").rglob("shards-2/*/lock")), timeout_s=120)
        os.kill(wait_for(workers)[0], signal.SIGKILL)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert re.search(r"^tokenized  [\d,]+ documents in .* by 2 processes$", out, re.M)
    assert made(tmp_path / "rays") == made(tmp_path / "one")


@pytest.mark.long
def test_a_mistake_in_the_data_is_one_line(tmp_path):
    config = write_config(tmp_path)
    with (tmp_path / "3.jsonl").open("a") as file:
        file.write("oops\n")
    outcome = subprocess.run(
        command(config, tmp_path / "cache", "--executor", "ray"), cwd=runs.ROOT, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 3
    assert outcome.stderr.startswith(f"{tmp_path}/3.jsonl:301: data.sources[3].paths: is not JSON")
    assert outcome.stderr.count("\n") == 1
