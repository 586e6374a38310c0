"""Hundreds of damaged model directories: no traceback, no signal, nothing written, memory capped."""

import subprocess
import sys

PROCESSES, EACH = 2, 150


def test_mutated_directories(tmp_path):
    processes = []
    for seed in range(PROCESSES):
        (tmp_path / str(seed)).mkdir()
        command = [sys.executable, "-m", "tests.converters.mutate", str(seed), str(EACH), str(tmp_path / str(seed))]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True))
    for process in processes:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert EACH // 3 < int(output.splitlines()[-1]) < EACH
