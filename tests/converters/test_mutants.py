"""Hundreds of damaged model directories: no traceback, no signal, nothing written, memory capped."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("processes", "each"), [(1, 60), pytest.param(2, 150, marks=pytest.mark.long)])
def test_mutated_directories(processes, each, tmp_path):
    running = []
    for seed in range(processes):
        (tmp_path / str(seed)).mkdir()
        command = [sys.executable, "-m", "tests.converters.mutate", str(seed), str(each), str(tmp_path / str(seed))]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True))
    for process in running:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert each // 3 < int(output.splitlines()[-1]) < each
