"""The first hour on a GPU: on a machine with several, all parts take the same one."""

import os
import subprocess

import pytest

from tests.runs import ROOT

SEEN = """\
#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES" >>"$SEEN"
"""


@pytest.mark.parametrize(("visible", "expected"), [(None, "0"), ("3,1", "3"), ("GPU-5", "GPU-5"), ("", "")])
def test_of_several_gpus_all_parts_see_the_first(tmp_path, visible, expected):
    """In place of the interpreter: a program that tells which GPUs it sees."""
    (tmp_path / "python").write_text(SEEN)
    (tmp_path / "python").chmod(0o700)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PYTHON": str(tmp_path / "python"), "SEEN": str(tmp_path / "seen")}
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    command = ["scripts/first_gpu_hour.sh", str(tmp_path / "out")]
    outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    seen = (tmp_path / "seen").read_text().splitlines()
    assert len(seen) == 11  # two facts, five parts, and three runs with their comparison
    assert set(seen) == {expected}
