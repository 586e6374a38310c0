"""The benchmark of the kernels that multiply by experts' matrices: the whole of it at toy size on the CPU, and what it
compares."""

import json
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from scripts import bench_grouped
from scripts.bench.case import ROOT
from scripts.bench.compare import Rounds
from scripts.bench_grouped import MODELS, TOY, Case, Shape, main, measure, parse, random_groups, table
from tests.tiny import single_device_mesh

SMALL = Rounds(rounds=2, calls=1)


@pytest.fixture(autouse=True)
def _one_device(_mesh):
    jax.set_mesh(single_device_mesh())


def test_groups_are_uneven_and_their_tokens_lie_in_any_order():
    groups = random_groups(Shape(4, 8, 8), 100)
    assert int(groups.sizes.sum()) == 400
    assert len(set(groups.sizes.tolist())) > 1
    assert len(groups.order) % 128 == 0
    rows = np.asarray(groups.order[:400])
    assert len(set(rows.tolist())) == 400
    assert np.any(np.diff(rows) != 1)
    np.testing.assert_array_equal(np.asarray(groups.place)[rows], np.arange(400))
    assert int(groups.is_row.sum()) == 400 < len(groups.is_row)


@pytest.mark.slow
def test_every_kernel_is_compared_and_one_that_is_wrong_is_not_measured(monkeypatch):
    """Here of a CPU, whose times say nothing."""
    monkeypatch.setattr(bench_grouped, "KERNELS", ("dense", "plain", "tokamax"))
    dense, plain, tokamax = measure(Case("toy", 8), TOY["toy"], SMALL, 1e12, timed=True)
    assert plain["error"] <= bench_grouped.TOLERANCE["bfloat16"]
    assert tokamax["cannot"] == "it needs NVIDIA GPUs"
    for way, products in bench_grouped.PASSES.items():
        assert dense[f"{way}_of_dense"] == 1
        flops = products * 2 * 4 * 8 * (40 * 2 * 24 + 24 * 40)
        assert plain[f"{way}_tflops"] == pytest.approx(flops / plain[f"{way}_ms"] / 1e9)
        assert plain[f"{way}_of_peak"] == pytest.approx(plain[f"{way}_tflops"])
    own: Any = bench_grouped.experts_on_rows
    monkeypatch.setattr(bench_grouped, "experts_on_rows", lambda *arguments: 1.2 * own(*arguments))
    _, plain, _ = measure(Case("toy", 8), TOY["toy"], SMALL, None, timed=True)
    assert plain["wrong"] == "off the definition by more than 0.02"
    assert "forward_ms" not in plain


def test_a_table_has_what_any_kernel_has():
    pallas = {"kernel": "pallas", "error": 1e-3, "forward_ms": 1.5, "forward_of_peak": 0.512, "forward_of_dense": 0.8}
    shown = table([Case("toy", 8)._asdict() | row for row in (pallas, {"kernel": "plain", "cannot": "it is slow"})])
    assert {str(column.header): list(column.cells) for column in shown.columns} == {
        "kernel": ["pallas", "plain"], "error": ["1.0e-03", "-"], "forward ms": ["1.500", "-"],
        "forward of peak": ["51.2%", "-"], "forward of dense": ["80%", "-"], "cannot": ["-", "it is slow"],
    }  # fmt: skip


def test_cases_are_those_that_are_asked_for():
    assert parse(["--models", "mixtral_8x7b", "--rows", "512,64"])[1] == [Case("mixtral_8x7b", n) for n in (512, 64)]
    assert len(parse([])[1]) == 4 * len(MODELS)
    assert parse(["--toy"])[1] == [Case("toy", 40)]
    assert str(Case("mixtral_8x7b", 8192)) == "mixtral_8x7b, 8,192 tokens per expert"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "llama"], "--models: 'llama' is unknown; choose from qwen3_30b_a3b, mixtral_8x7b"),
        (["--rows", "0"], "--rows: '0' is not a whole number from 1 to 131072"),
        (["--toy", "--rows", "8"], "--toy sets its own experts and tokens; leave out --models and --rows"),
    ],
)
def test_cases_that_cannot_be_are_refused(arguments: list[str], message: str, capsys: Any):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main([]) == 2
    assert re.fullmatch(r"no GPU to measure on \(nvidia-smi was not found\); .*\n", capsys.readouterr().err)


@pytest.mark.slow
def test_the_whole_of_it_at_toy_size(tmp_path):
    command = [sys.executable, "scripts/bench_grouped.py", "--toy", "--json", str(tmp_path / "toy.json")]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    device, *_, verdict = outcome.stdout.splitlines()
    assert device.endswith("CPU cores; times: not measured")
    assert verdict == "no kernel is wrong"
    found = json.loads((tmp_path / "toy.json").read_text())
    assert [row["kernel"] for row in found["rows"]] == list(bench_grouped.KERNELS)
    assert not any("forward_ms" in row for row in found["rows"])
