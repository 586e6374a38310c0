"""The benchmark of attention's kernels: the whole of it at toy size on the CPU, what it compares, counts and tells."""

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from llamajax.config.machine import HardwareConfig
from llamajax.config.parallel import MeshConfig
from llamajax.errors import ConfigError
from llamajax.kernels.attention import Mask, with_sight
from llamajax.kernels.choice import Kernel
from llamajax.parallel.sharding import spec
from llamajax.planning.xla.compile import planned_mesh
from scripts import bench_attention
from scripts.bench.case import ROOT
from scripts.bench.compare import Rounds, take_turns
from scripts.bench.jax_rows import fused_calls
from scripts.bench_attention import Case, Size, compiled, main, measure, parse, seen_pairs, segment_ids, table
from tests.planning.plans import CONFIG
from tests.tiny import single_device_mesh

SMALL = Size(64, 2, 1, Rounds(rounds=2, calls=1))


@pytest.fixture(autouse=True)
def _one_device(_mesh):
    jax.set_mesh(single_device_mesh())


def test_every_kernel_is_compared_and_what_is_there_is_measured():
    """Here of a CPU, whose times say nothing."""
    plain, pallas, *others = measure(Case(8, 32, 6, rows=2), SMALL, timed=True)
    assert [row["kernel"] for row in others] == ["cudnn", "tokamax", "triton"]
    for row in others:
        is_here = row["kernel"] == "cudnn" or importlib.util.find_spec(row["kernel"])
        assert row["cannot"].startswith("it needs NVIDIA GPUs" if is_here else "not installed")
    assert plain["error"] == 0 < pallas["error"] <= bench_attention.TOLERANCE
    for way in ("forward", "backward"):
        assert max(row[f"{way}_of_best"] for row in (plain, pallas)) == 1
        slower, faster = sorted((plain, pallas), key=lambda row: row[f"{way}_of_best"])
        assert slower[f"{way}_of_best"] == pytest.approx(faster[f"{way}_ms"] / slower[f"{way}_ms"])
        assert slower[f"{way}_of_best"] == pytest.approx(slower[f"{way}_tflops"] / faster[f"{way}_tflops"])
        assert plain[f"{way}_peak"] > 64 * 2 * 8 * 2 * 2  # queries and output


@pytest.mark.parametrize("failure", [None, ConfigError("no shared memory is left\nfor it")])
def test_a_kernel_that_is_wrong_is_not_measured(monkeypatch, failure):
    attend = bench_attention.attend

    def wrong(*arguments, kernel):
        out, lse = attend(*arguments, kernel="plain")
        if kernel == "pallas" and failure is not None:
            raise failure
        return (out * jnp.nan if kernel == "pallas" else out), lse

    monkeypatch.setattr(bench_attention, "attend", wrong)
    plain, pallas, *_ = measure(Case(8, 32, 0), SMALL, timed=True)
    assert "forward_ms" in plain
    assert "forward_ms" not in pallas
    assert pallas["wrong"] == ("no shared memory is left" if failure else "off the plain form by more than 0.02")


def test_pairs_are_counted_one_by_one():
    ids = segment_ids(Case(8, 40, 7), 3)
    assert ids is not None
    alike = ids[:, :, None] == ids[:, None, :]
    assert seen_pairs(ids, 3, 40) == np.sum(alike & np.tri(40, dtype=bool))
    assert seen_pairs(None, 3, 40) == 3 * np.tri(40).sum()


def test_kernels_take_turns_there_and_back():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    taken = take_turns(calls, Rounds(rounds=2, calls=3))
    assert [name for name, _ in itertools.groupby(called)] == ["a", "b", "c", "b", "a"]
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 2, "b": 2, "c": 2}


def test_a_table_has_what_any_kernel_has():
    cudnn = {"kernel": "cudnn", "error": 1e-3, "forward_ms": 1.5, "forward_of_best": 0.987, "forward_peak": 3 * 2**29}
    shown = table([Case(128, 8192, 0)._asdict() | row for row in (cudnn, {"kernel": "tokamax", "cannot": "not installed"})])
    assert {str(column.header): list(column.cells) for column in shown.columns} == {
        "kernel": ["cudnn", "tokamax"], "error": ["1.0e-03", "-"], "forward ms": ["1.500", "-"],
        "forward of best": ["99%", "-"], "forward peak": ["1.50 GiB", "-"], "cannot": ["-", "not installed"],
    }  # fmt: skip


def test_shapes_are_those_that_are_asked_for():
    _, cases = parse(["--head_dims", "64", "--seq_lens", "2048,4096", "--rows", "0"])
    assert cases == [Case(64, 2048, 0), Case(64, 2048, 1000), Case(64, 4096, 0), Case(64, 4096, 1000)]
    assert len(parse([])[1]) == 24
    assert {case.rows for case in parse([])[1]} == {0, 1}
    assert {case.seq_len for case in parse(["--toy"])[1]} == {64}
    arguments = ["--head_dims", "80", "--seq_lens", "32768", "--documents", "0", "--rows", "1"]
    assert parse(arguments)[1] == [Case(80, 32768, 0, rows=1)]
    assert str(Case(80, 32768, 0, rows=1)) == "heads of 80, 1 row of 32,768, one document each"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head_dims", "wide"], "--head_dims: 'wide' is not a whole number from 1 to 256"),
        (["--head_dims", "64,0"], "--head_dims: '0' is not a whole number from 1 to 256"),
        (["--seq_lens", "1e3"], "--seq_lens: '1e3' is not a whole number from 1 to 1048576"),
        (["--documents", "-1"], "--documents: '-1' is not a whole number from 0 to 1048576"),
        (["--toy", "--documents", "0"], "--toy sets its own rows and documents; leave out --seq_lens and --documents"),
    ],
)
def test_shapes_that_cannot_be_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(
        r"no GPU to measure on \(nvidia-smi was not found\); .* give --toy to try it on a CPU\n", printed.err
    )


@pytest.mark.slow
def test_the_whole_of_it_at_toy_size(tmp_path):
    command = [
        sys.executable,
        "scripts/bench_attention.py",
        "--toy",
        "--head_dims",
        "64",
        "--json",
        str(tmp_path / "toy.json"),
    ]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    device, *_, verdict = outcome.stdout.splitlines()
    assert device.endswith("CPU cores; times and memory: not measured")
    assert verdict == "no kernel is wrong"
    found = json.loads((tmp_path / "toy.json").read_text())
    assert found["toy"]
    assert [row["kernel"] for row in found["rows"]] == 2 * ["plain", "pallas", "cudnn", "tokamax", "triton"]
    assert not any("forward_ms" in row or "forward_peak" in row for row in found["rows"])


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    ("kernel", "closes_documents", "backward"),
    [
        ("pallas", True, ["attention_backward_keys", "attention_backward_queries"]),
        ("cudnn", False, ["fmhaSoftmaxBackward"]),
    ],
)
def test_a_pass_has_its_own_kernels_alone(kernel: Kernel, closes_documents, backward):
    """Compiled for a GPU that is not there."""
    mesh = planned_mesh(CONFIG.changed({"hardware": HardwareConfig(gpu="h100", gpus_per_node=1), "mesh": MeshConfig()}))
    with jax.set_mesh(mesh):

        def shape(*dims: int) -> jax.ShapeDtypeStruct:
            lies = NamedSharding(mesh, spec("batch", "seq", "kv_heads", *(None,) * (len(dims) - 3)))
            return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=lies)

        q, k = shape(1, 512, 2, 2, 64), shape(1, 512, 2, 64)
        ids: Any = jax.ShapeDtypeStruct((1, 512), jnp.int32, sharding=NamedSharding(mesh, spec("batch", "seq")))
        bare = Mask(segment_ids=ids if closes_documents else None)
        seen = jax.eval_shape(lambda mask: with_sight(mask, q, kernel=kernel), bare)
        programs = compiled(kernel, seen, (q, k, k), q)
    called = {way: fused_calls(programs[way].as_text() or "") for way in ("forward", "backward")}
    assert called["backward"] == {"forward": [], "backward": backward}
    assert len(called["forward"]["forward"]) == 1
    assert called["forward"]["backward"] == []
