"""The benchmark of checkpoints measures what it says, and leaves nothing."""

import json
import subprocess
import sys

import pytest

from tests.runs import ROOT


@pytest.mark.slow
def test_a_toy_is_measured_whole(tmp_path):
    command = [sys.executable, str(ROOT / "scripts/bench_checkpoint.py"), "--toy", "--directory", str(tmp_path)]
    outcome = subprocess.run(
        [*command, "--json", str(tmp_path / "figures.json")], capture_output=True, text=True, timeout=300
    )
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert 31e6 < figures["bytes"] < 33e6
    assert all(figures[key] > 0 for key in figures if key.endswith("_s"))
    assert figures["stall_s"] < figures["write_s"]
    assert "0.03 GB in " in outcome.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
