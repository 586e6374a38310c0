"""The benchmark of preprocessing measures what it says, and leaves nothing."""

import json
import subprocess
import sys

import pytest

from tests.runs import ROOT


@pytest.mark.long
def test_a_toy_is_measured_whole(tmp_path):
    script = str(ROOT / "scripts/bench_preprocess.py")
    command = [sys.executable, script, "--toy", "--kills", "2", "--compare", "--directory", str(tmp_path)]
    outcome = subprocess.run(
        [*command, "--json", str(tmp_path / "figures.json")], capture_output=True, text=True, timeout=300, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures["rates"]) == {
        "library alone", "Megatron-LM's flow", "gigatoken alone", "Megatron-LM's fast flow", "work of a process",
        "llamajax.preprocess",
    }  # fmt: skip
    assert all(rate > 0 for rate in figures["rates"].values())
    assert figures["kills"] == 2
    assert figures["same_files"] == figures["compared_files"] == figures["files"] >= 4
    assert 18e6 < figures["bytes"] <= 20e6
    assert 15 < figures["text_megabytes"] < 25
    assert figures["tokens"] > 100 * figures["documents"] > 10**5
    assert figures["processor_seconds"] > 0
    assert set(figures["libraries"]) == {"gigatoken", "sentencepiece", "tokenizers"}
    assert 50e6 < figures["peak_worker_bytes"] < 1e9
    assert "of the library" in outcome.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
