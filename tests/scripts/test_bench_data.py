"""Processes that start on many shards open few files, and the benchmark counts them; packing is measured."""

import json
import subprocess
import sys

import pytest

from tests.runs import ROOT


def figures(tmp_path, *arguments):
    command = [sys.executable, str(ROOT / "scripts/bench_data.py"), *arguments, "--directory", str(tmp_path)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert list(tmp_path.iterdir()) == []
    return json.loads(outcome.stdout)


@pytest.mark.long
def test_others_are_told_what_process_0_finds(tmp_path):
    """None of them opens a file for every shard, or for every file of the source."""
    found = figures(tmp_path, "start", "--shards", "640", "--processes", "2")
    assert [process["rank"] for process in found["processes"]] == [0, 1]
    for process in found["processes"]:
        assert 0 < process["of_them_shards"] <= 64  # of the rows of two batches
        assert process["opened"] - process["of_them_shards"] <= 10


def test_packing_is_measured(tmp_path):
    found = figures(tmp_path, "packing", "--documents", "2e5", "--seq_len", "2048")
    assert found["documents"] == 200_000
    assert found["fill"] >= 0.98
    assert found["documents_per_s"] > 0
