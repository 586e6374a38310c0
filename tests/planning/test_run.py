"""`python -m llamajax.plan`: files, exit codes, messages; with XLA's compiler for GPUs where it is installed."""

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from typing import get_args

import pytest

from llamajax.config.batch_ramp import BatchRampConfig
from llamajax.config.data import StageConfig
from llamajax.config.file import dump_config
from llamajax.config.machine import HardwareConfig, PlannedGpu
from llamajax.estimates.formulas import num_params
from llamajax.plan import main as plan_command
from llamajax.planning import run as plan
from llamajax.planning.report import figures
from llamajax.planning.xla import compile as planning_compile
from llamajax.step.resolve import resolve_planned
from llamajax.units import format_duration
from tests.estimates.test_calibration import MEASUREMENT
from tests.planning import plans
from tests.tiny import tiny_config


@pytest.fixture
def planned(monkeypatch):
    """A compiler in place of the real one."""
    monkeypatch.setattr(plan, "check_compiler", lambda: None)
    monkeypatch.setattr(plan, "make_plan", lambda config, **_: plans.plan(config=config))
    monkeypatch.setattr(plan, "run_sweep", lambda sweep, base, **_: (base,) * len(sweep.values))


def test_all_files_are_written(planned, tmp_path, capsys):
    names = {"--json": "a.json", "--trace": "b.json", "--hlo": "c.hlo", "--picture": "d.html"}
    files = {option: str(tmp_path / name) for option, name in names.items()}
    options = files | {"--sweep": "hardware.node_bandwidth=1e11,4e11"}
    assert plan.main(plans.CONFIG, options=options) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("verdict    fits")
    assert captured.err == ""
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["num_devices"] == 16
    assert [row["value"] for row in told["sweep"]["rows"]] == ["1e11", "4e11"]
    assert json.loads((tmp_path / "b.json").read_text())["traceEvents"]
    assert (tmp_path / "c.hlo").read_text() == plans.HLO
    assert (tmp_path / "d.html").read_text().startswith("<!DOCTYPE html>")


def test_alternatives_are_a_matter_of_the_command_line(planned, monkeypatch, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(dump_config(plans.CONFIG))
    told = []

    def make_plan(config, *, alternatives, doing):
        told.append(alternatives)
        return plans.plan(config=config)

    monkeypatch.setattr(plan, "make_plan", make_plan)
    for more in ([], ["--alternatives"], ["--alternatives", "--json", str(tmp_path / "a.json")]):
        monkeypatch.setattr(sys, "argv", ["plan", "--config", str(tmp_path / "run.yaml"), *more])
        assert plan_command() == 0, capsys.readouterr().err
    assert told == [False, True, True]


def test_a_plan_that_does_not_fit_is_a_plan(planned, monkeypatch, capsys):
    monkeypatch.setattr(plan, "make_plan", lambda config, **_: plans.plan(config=config, peak_bytes=90 * plans.GIB))
    assert plan.main(plans.CONFIG, options={}) == 0
    assert capsys.readouterr().out.startswith("verdict    does not fit")


def test_of_a_run_with_a_ramp_the_full_batch_is_planned(planned, tmp_path, capsys):
    ramp, output = BatchRampConfig(start=16, increment=16, sequences=128), tmp_path / "a.json"
    changes = {"train.global_batch_ramp": ramp, "train.grad_accum_steps": 2, "train.num_steps": 28}
    config = plans.CONFIG.changed(changes | {"hardware.token_budget": None})
    assert plan.main(config, options={"--json": str(output)}) == 0
    told, seq_len = json.loads(output.read_text()), config.data.seq_len
    assert (told["tokens_per_step"], told["token_budget"]) == (32 * seq_len, (8 * 16 + 20 * 32) * seq_len)
    last = capsys.readouterr().out.splitlines()[-1]
    took = format_duration(24 * 3600 * told["days"] * 4 / 24)
    assert last == (
        "ramp       16 to 32 sequences by 16 in 2 phases; full after 8 of 28 steps, 128 sequences and 131k tokens, which"
        f" take {took} if a step takes time in proportion to its micro-batches; with it, all tokens take"
        f" {told['days']:,.1f} days"
    )
    assert told["ramp"] == pytest.approx(
        {"phases": 2, "steps": 8, "tokens": 8 * 16 * seq_len, "days": told["days"] / 6, "budget_days": told["days"]}
    )


@pytest.mark.parametrize(("chunks", "waits"), [(1, 3), (3, 1)])
def test_small_batches_of_a_pipeline_wait_more(chunks, waits):
    """The ramp has 2, 4, 6 and 8 micro-batches on 4 stages; the first and the third cannot be interleaved."""
    ramp = BatchRampConfig(start=8, increment=8, sequences=96)
    mesh = {"mesh.data": 1, "hardware.nodes": 2}
    config = plans.CONFIG.changed({"train.global_batch_ramp": ramp, "train.grad_accum_steps": 8, **mesh})
    run = resolve_planned(config.in_largest_steps())
    order = {"pipeline": "interleaved", "pipeline_chunks": chunks} if chunks > 1 else {}
    parallel = dataclasses.replace(run.config.parallel, **order)
    staged = dataclasses.replace(run.config, parallel=parallel)
    run = dataclasses.replace(run, config=staged, mesh={**run.mesh, "pipeline": 4})
    found = figures.ramp(config, run, {"days": 3.0, "token_budget": 1e6})
    assert found is not None
    sizes = [config.train.batch_size_at(step) for step in range(found["steps"])]
    steps_in_days = 3.0 * 32 * 1024 / 1e6 / (8 + waits)
    times = {8: 2 + 3, 16: 4 + waits, 24: 6 + 3}
    assert found["days"] == pytest.approx(sum(times[size] for size in sizes) * steps_in_days)
    assert found["budget_days"] == pytest.approx(3.0 * (1 - found["tokens"] / 1e6) + found["days"])


def test_of_a_run_in_stages_the_longest_rows_are_planned(planned, tmp_path, capsys):
    stages = StageConfig(from_step=5, seq_len=2 * plans.CONFIG.data.seq_len), StageConfig(from_step=7, seq_len=16)
    changes, output = {"data.stages": stages, "train.num_steps": 10, "hardware.token_budget": None}, tmp_path / "a.json"
    config = plans.CONFIG.changed(changes)
    assert plan.main(config, options={"--json": str(output)}) == 0
    told, short, rows = json.loads(output.read_text()), plans.CONFIG.data.seq_len, config.train.global_batch_size
    assert told["tokens_per_step"] == 2 * short * rows
    assert told["token_budget"] == (5 * short + 2 * 2 * short + 3 * 16) * rows
    last = capsys.readouterr().out.splitlines()[-1]
    lengths = ",".join(map(str, sorted({16, short, 2 * short})))
    assert last.startswith(f"stages     planned with rows of {2 * short:,} tokens, the longest")
    assert last.endswith(f"--sweep data.seq_len={lengths} compares all lengths")
    assert plan.main(plans.CONFIG, options={}) == 0
    assert "stages  " not in capsys.readouterr().out


def test_without_the_compiler_formulas_are_told(monkeypatch, tmp_path, capsys):
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(planning_compile.importlib.metadata, "version", version)
    assert plan.main(plans.CONFIG, options={"--json": str(tmp_path / "a.json")}) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("verdict    probably fits")
    assert captured.err.count("\n") == 1
    assert "pip install 'llamajax[plan]'" in captured.err
    assert json.loads((tmp_path / "a.json").read_text())["missing"] in captured.err


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (tiny_config(), {}, "hardware.gpu: a plan needs a GPU; set it to one of a100-40gb, "),
        (tiny_config(hardware=HardwareConfig(gpu="h100", nodes=3)), {}, "model.embed_dim: 32 must be divisible"),
        (plans.CONFIG, {"--json": "missing/a.json"}, "--json: missing/a.json: there is no directory missing"),
        (plans.CONFIG, {"--picture": "a.png"}, "name a file that ends with .html"),
        (plans.CONFIG, {"--sweep": "hardware.gpu=h300"}, "--sweep: hardware.gpu=h300: must be one of"),
        (plans.CONFIG, {"--hlo": "."}, "--hlo: . cannot be written: Is a directory; name another file"),
        (plans.CONFIG, {"--json": "a", "--hlo": "./a"}, "--json: a: another option names this file too"),
        (plans.CONFIG, {"--sweep": "hardware.gpu=h100,none"}, "--sweep: hardware.gpu=none: a plan needs"),
    ],
)
def test_mistakes_end_with_code_2_before_anything_is_compiled(
    planned, tmp_path, monkeypatch, capsys, config, options, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "make_plan", None)
    assert plan.main(config, options=options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_measured_constants_that_break_a_rule_end_with_code_2(planned, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "make_plan", None)
    broken = dump_config(MEASUREMENT).replace("matmul_efficiency: 0.7", "matmul_efficiency: 7")
    (tmp_path / "h100.yaml").write_text(broken)
    config = plans.CONFIG.changed({"hardware.calibration": "h100.yaml"})
    line = 1 + broken.splitlines().index("  matmul_efficiency: 7")
    assert plan.main(config, options={}) == 2
    assert capsys.readouterr().err == f"h100.yaml:{line}: constants.matmul_efficiency: 7.0 must be above 0 and at most 1\n"
    (tmp_path / "h100.yaml").write_text(dump_config(MEASUREMENT))
    assert plan.main(config.changed({"hardware.gpu": "h200"}), options={}) == 2
    assert capsys.readouterr().err.startswith("h100.yaml:1: gpu: measured on h100, but hardware.gpu is h200; ")


def test_a_file_that_is_there_already_is_kept_until_there_is_something_to_write(planned, monkeypatch, tmp_path, capsys):
    kept, told = tmp_path / "a.json", []
    kept.write_text("before")

    def make_plan(config, **_):
        told.append(kept.read_text())
        return plans.plan(config=config)

    monkeypatch.setattr(plan, "make_plan", make_plan)
    assert plan.main(plans.CONFIG, options={"--json": str(kept)}) == 0
    assert told == ["before"]
    assert json.loads(kept.read_text())["fits"]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamajax.plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_line_answers_without_jax(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(plans.CONFIG))
    outcome = run_command("--config", str(file), "--hardware.gpu", "b300", "--pictur", "a.html")
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    assert outcome.stderr.splitlines() == [
        "--pictur: is not an option; did you mean --picture?",
        f"--hardware.gpu: must be one of none, {', '.join(get_args(PlannedGpu))}, not b300; did you mean b200?",
    ]


@pytest.mark.long
@pytest.mark.usefixtures("gpu_compiler")
def test_a_real_plan(tmp_path):
    """All four files from the real compiler; the data that the configuration names exist nowhere."""
    file, config = tmp_path / "run.yaml", plans.CONFIG.changed({"model.num_layers": 2})
    file.write_text(dump_config(config))
    files = {f"--{name}": str(tmp_path / name) for name in ("json", "trace", "hlo", "picture.html")}
    files["--picture"] = files.pop("--picture.html")
    outcome = run_command("--config", str(file), *(text for pair in files.items() for text in pair))
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.startswith("verdict    fits")
    told = json.loads((tmp_path / "json").read_text())
    assert told["not_understood"] == {}
    assert told["num_params"] == num_params(config.model)
    assert told["argument_bytes"] == pytest.approx(told["zero_minimum_bytes"], rel=0.05)
    assert told["with_profile"] is not None
