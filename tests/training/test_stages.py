"""A run whose mixture and rows change: what it tells, and that it goes on exactly, wherever it was interrupted."""

import json
import pathlib
import random
import subprocess
from typing import Any

import jax
import numpy as np
import pytest

from llamajax.checkpoint.meta import checkpoint_meta, read_meta
from llamajax.checkpoint.read import Saved
from llamajax.config.file import load_config
from llamajax.config.machine import HardwareConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.data.rows.dataset import prepare
from llamajax.errors import CheckpointError, ConfigError
from llamajax.parallel.mesh import make_mesh
from llamajax.planning import scheduling
from llamajax.step.state import init_state
from llamajax.step.step import train_step
from llamajax.training import run as train
from llamajax.training import stages
from llamajax.training.resume import check_data
from llamajax.training.stages import described
from llamajax.watch import run_log
from tests import runs
from tests.tiny import random_rows, tiny_config, to_device
from tests.training.test_resume import start_two
from tests.training.test_rollback import first_rows, start

NUM_STEPS = 14
STAGES = [
    {"from_step": 4, "weights": [0.25, 0.75], "name": "mid-training"},
    {"from_step": 8, "seq_len": 64, "name": "long context"},
    {"from_step": 11, "weights": [3, 1], "seq_len": 32},
]
BOUNDARIES = (4, 8, 11)


def staged_config(directory: pathlib.Path, stages: Any = STAGES, **train_settings: object) -> pathlib.Path:
    """`runs.write_config` with a second source, which comes with the first of the stages."""
    path = runs.write_config(directory, num_steps=NUM_STEPS, eval_every=4, **train_settings)
    draw = random.Random(1)
    texts = [" ".join(draw.choices(runs.WORDS[::-1], k=draw.randint(3, 30))) for _ in range(100)]
    (directory / "late.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = json.loads(path.read_text())
    config["data"]["sources"].append({"kind": "jsonl", "paths": [str(directory / "late.jsonl")], "weight": 0})
    config["data"]["stages"] = stages
    config["checkpoint"]["save_every"] = 1
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> pathlib.Path:
    """The configuration of a run through all stages that nothing interrupted; it saved every step."""
    path = staged_config(tmp_path_factory.mktemp("stages"))
    (path.parent / "said").write_text(runs.finish(runs.start(path, "--metrics.log_every=1")))
    return path


def records_of(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read(run_dir: pathlib.Path) -> list[dict[str, float]]:
    """Records of a run's training and evaluation, without times; the last one of a repeated evaluation."""
    found = {}
    for record in records_of(run_dir):
        kept = {key: value for key, value in record.items() if key.startswith(("step", "data/", "train/", "eval/"))}
        found[record["step"], "eval/loss" in record] = kept
    return list(found.values())


def test_every_stage_is_compiled_before_the_first_step_and_told_when_it_begins(unbroken):
    said = (unbroken.parent / "said").read_text()
    for length in (32, 64):
        assert said.count(f"\ncompile    rows of {length} tokens: ") == 1
        assert said.index(f"\ncompile    rows of {length}") < said.index("\nstep  1/14")
    assert said.count("\nsequence  ") == 1, "forms of longer rows are told where they are others"
    lines = [line for line in said.splitlines() if line.startswith(("stage  ", "step ")) and "waited" not in line]
    told = {"1": 0, "2": 4, "3": 8, "4": 11}
    for number, step in told.items():
        at = next(i for i, line in enumerate(lines) if line.startswith(f"stage      {number} of 4"))
        assert step == 0 or lines[at - 1].startswith(f"step {step:>2}/14"), lines
        assert lines[at + 1].startswith(f"step {step + 1:>2}/14")
    both = "weights 0.25 data.sources[0], 0.75 data.sources[1]"
    assert f'stage      3 of 4 "long context": rows of 64 tokens, {both}' in lines
    config = load_config(unbroken).data
    assert described(config, 0) == "1 of 4: rows of 32 tokens, weights 1 data.sources[0]"
    events = [json.loads(line) for line in (unbroken.parent / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["seq_len"] for event in events if event["event"] == "compile"] == [32, 64]


def test_tokens_and_epochs_add_up_over_the_stages(unbroken):
    run_dir, rows = unbroken.parent / "run", 8
    steps = [record for record in records_of(run_dir) if "train/loss" in record]
    lengths = [32] * 8 + [64] * 3 + [32] * 3
    assert [record["data/tokens"] for record in steps] == (np.cumsum(lengths) * rows).tolist()
    passes = np.array([[record["data/epochs/0"], record["data/epochs/1"]] for record in steps])
    assert (passes[:4, 1] == 0).all(), "the second source comes with the second stage"
    said = (unbroken.parent / "said").read_text().splitlines()
    counts = {
        int(words[1][len("data.sources[")]): int(line.split("; ")[1].split(" rows")[0])
        for line in said
        if (words := line.split())[:1] == ["data"] and "in rows of" not in line
    }
    assert passes[7].tolist() == pytest.approx([(4 * 8 + 8) / counts[0], 24 / counts[1]])
    (line,) = [line for line in said if line.startswith("epochs     ") and "in 14 steps" in line]
    assert line == f"epochs     {passes[-1][0]:.2f} of data.sources[0], {passes[-1][1]:.2f} of data.sources[1] in 14 steps"
    assert f"steps          14 of 14, {sum(lengths) * rows:,} tokens" in said
    assert run_log.summarize(run_log.read_run(run_dir)).epochs == tuple(passes[-1])
    meta = json.loads((run_dir / "checkpoints" / "9" / "meta.json").read_text())
    assert (meta["data"]["position"], meta["data"]["tokens"]) == (9 * rows, (8 * 32 + 64) * rows)
    assert [step for step, _ in meta["data"]["stages"]] == list(BOUNDARIES)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(8, marks=pytest.mark.slow),
        *(pytest.param(step, marks=pytest.mark.long) for step in (3, 4, 6, 7, 9, 11)),
    ],
)
def test_a_run_goes_on_in_the_middle_of_a_stage_at_its_boundary_and_beside_it(unbroken, tmp_path, step):
    runs.cut(unbroken.parent / "run", tmp_path / "run", step)
    output = runs.finish(runs.start(unbroken, f"--run_dir={tmp_path / 'run'}"))
    assert f"start      resuming at step {step}" in output
    stage = 1 + load_config(unbroken).data.stage_at(step)
    assert next(line for line in output.splitlines() if line.startswith("stage  ")).startswith(f"stage      {stage} of 4")
    assert read(tmp_path / "run") == read(unbroken.parent / "run")


@pytest.mark.long
def test_a_run_killed_around_boundaries_ends_like_the_unbroken_one(unbroken, tmp_path):
    run_dir = tmp_path / "run"
    for at_least in (3, 4, 8, 10):
        process = runs.start(unbroken, f"--run_dir={run_dir}")
        runs.wait_until(lambda: runs.steps_on_record(run_dir) >= at_least, [process])  # noqa: B023  (used at once)
        process.kill()
        process.communicate()
    runs.finish(runs.start(unbroken, f"--run_dir={run_dir}"))
    assert read(run_dir) == read(unbroken.parent / "run")


@pytest.mark.long  # tests/training/test_batch_ramp.py has it with longer rows and larger batches in CI
def test_other_devices_take_over_in_every_stage(tmp_path):
    """Eight, four, two and eight again: same rows, tokens and epochs to the bit, losses but for the order of sums."""
    path, run_dir = staged_config(tmp_path, grad_accum_steps=1), tmp_path / "elastic"
    mesh = ("--mesh.fsdp=-1", "--mesh.sequence=1", "--mesh.tensor=1")
    runs.finish(runs.start(path, *mesh))
    for at_least, devices in ((3, 8), (7, 4), (9, 2)):
        process = runs.start(path, f"--run_dir={run_dir}", *mesh, f"--mesh.num_cpu_devices={devices}")
        runs.wait_until(lambda: runs.steps_on_record(run_dir) >= at_least, [process])  # noqa: B023  (used at once)
        process.kill()
        output, _ = process.communicate()
        assert ("elastic    " in output) == (devices < 8)
    runs.finish(runs.start(path, f"--run_dir={run_dir}", *mesh))
    ours, theirs = (read(directory) for directory in (run_dir, tmp_path / "run"))
    for own, other in zip(ours, theirs, strict=True):
        assert own == pytest.approx(other, rel=1e-4)
        exact = [key for key in own if key.startswith(("step", "data/", "train/tokens"))]
        assert [own[key] for key in exact] == [other[key] for key in exact]


@pytest.mark.long
def test_two_processes_go_through_the_stages_like_one(unbroken, tmp_path):
    outputs = [runs.finish(process) for process in start_two(unbroken, f"--run_dir={tmp_path / 'run'}")]
    assert sum(output.count("stage      ") for output in outputs) == 4
    for own, other in zip(read(tmp_path / "run"), read(unbroken.parent / "run"), strict=True):
        assert own == pytest.approx(other, rel=1e-4)


POISON = {"nan": [60, 68]}
"""Steps 8 and 9 are skipped, on both sides of a boundary, and the second is one too many; the run goes on from step 5."""


@pytest.mark.slow
def test_a_run_goes_back_across_a_boundary_and_kills_change_nothing(tmp_path):
    path = staged_config(tmp_path)
    every = "--checkpoint.save_every=5"
    output = runs.finish(start(path, every, nan=POISON["nan"], spike=[], rows=str(tmp_path / "rows")))
    assert "going back to step 5, passing over rows 40 to 71 (1 of at most 3 times)" in output
    rows = first_rows(tmp_path / "rows")
    assert [rows[step] for step in range(1, NUM_STEPS + 1)] == [8 * n + 32 * (n >= 5) for n in range(NUM_STEPS)]
    told = [line.split()[1] for line in output.splitlines() if line.startswith("stage  ")]
    assert told == ["1", "2", "3", "2", "3", "4"]
    steps = [record for record in records_of(tmp_path / "run") if "train/loss" in record]
    assert [record["data/tokens"] for record in steps][-1] == (8 * 32 + 3 * 64 + 3 * 32) * 8

    broken = f"--run_dir={tmp_path / 'broken'}"
    process = start(path, every, broken, nan=POISON["nan"], spike=[], kill="after")
    output, _ = process.communicate(timeout=600)
    assert process.returncode != 0, output
    runs.finish(start(path, every, broken, nan=POISON["nan"], spike=[]))
    assert read(tmp_path / "broken") == read(tmp_path / "run")


def changed(unbroken: pathlib.Path, run_dir: pathlib.Path, changes: dict[str, Any]) -> Config:
    return load_config(unbroken).changed({"run_dir": str(run_dir), **changes})


@pytest.mark.parametrize(
    ("step", "key", "value", "refusal"),
    [
        (8, "data.stages.1.from_step", 9, None),
        (8, "data.stages.1.seq_len", 48, None),
        (8, "data.stages.2.weights", (0.0, 1.0), None),
        (8, "data.stages.0.name", "", None),
        (4, "data.stages.0.weights", (0.5, 0.5), None),
        (5, "data.stages.0.weights", (0.5, 0.5), "data.stages: other ones before this step; only later stages may"),
        (8, "data.stages.0.from_step", 3, "data.stages: other ones before this step"),
        (9, "data.stages.1.from_step", 9, "data.stages: other ones before this step"),
        (9, "data.stages.1.seq_len", 48, "data.stages: other ones before this step"),
        (14, "data.stages.2.weights", (0.0, 1.0), "data.stages: other ones before this step"),
        (4, "data.sources.1.weight", 1.0, "data: other documents, tokenizer, weights or data.seq_len"),
    ],
)
def test_stages_that_are_to_come_may_change_and_those_that_have_begun_may_not(unbroken, step, key, value, refusal):
    config = changed(unbroken, unbroken.parent / "run", {key: value})
    meta = read_meta(unbroken.parent / "run" / "checkpoints" / str(step))
    assert meta is not None
    saved = Saved(step=step, meta=meta, files=pathlib.Path())
    own = checkpoint_meta(config, prepare(config, log=lambda line: None), None, {})
    if refusal is None:
        check_data(config, saved, own)
        return
    with pytest.raises(CheckpointError) as caught:
        check_data(config, saved, own)
    assert f"holds a run with other settings ({refusal}" in str(caught.value)
    assert "\n" not in str(caught.value)
    check_data(config.changed({"checkpoint.allow_changes": ("data",)}), saved, own)


@pytest.mark.slow
def test_a_run_goes_on_with_stages_that_were_planned_anew(unbroken, tmp_path):
    runs.cut(unbroken.parent / "run", tmp_path / "run", 8)
    train.run(changed(unbroken, tmp_path / "run", {"data.stages.1.from_step": 9, "data.stages.2.weights": (0.0, 1.0)}))
    before, after = read(unbroken.parent / "run"), read(tmp_path / "run")
    assert [r for r in after if r["step"] <= 8] == [r for r in before if r["step"] <= 8]
    assert [r["data/tokens"] for r in after if r["step"] in (9, 10)] == [9 * 256, 9 * 256 + 512]


def test_a_source_that_would_be_gone_through_too_often_ends_the_start(unbroken, tmp_path):
    config = changed(unbroken, tmp_path / "run", {"data.sources.1.max_epochs": 0.5})
    with pytest.raises(
        ConfigError, match=r"data.sources.1.max_epochs: 0.5 is below the [\d.]+ epochs that the run's 14 steps"
    ):
        train.run(config)
    assert not runs.committed_steps(tmp_path / "run")


def test_the_command_line_sets_stages(unbroken):
    stages = "[{from_step: 5, weights: [1, 2], seq_len: 64}]"
    shown = subprocess.run(
        [*runs.command(unbroken, "--data.stages", stages, "--data.stages.0.weights", "[0.5, 2]"), "--print_config"],
        capture_output=True, text=True, check=False, cwd=runs.ROOT,
    )  # fmt: skip
    assert "- from_step: 5\n    weights:\n    - 0.5\n    - 2.0\n    seq_len: 64" in shown.stdout, shown.stderr


@pytest.mark.parametrize("remat", ["auto", pytest.param("full", marks=pytest.mark.slow)])
def test_the_library_lowers_the_program_that_the_command_runs(monkeypatch, remat):
    config = tiny_config(mesh=MeshConfig(fsdp=8), hardware=HardwareConfig(gpu="h100")).changed({"model.remat": remat})
    jax.set_mesh(make_mesh(config.mesh))
    lowered_texts = []

    def compile_here(run, lowered) -> scheduling.Compilation:
        lowered_texts.append(lowered.as_text())
        return compile_step(run, lowered)

    compile_step = stages.compile_here
    monkeypatch.setattr(stages, "compile_here", compile_here)
    stages.compile_steps(stages.resolve_stages(config))
    run, batch = scheduling.resolve_here(config), to_device(config, random_rows(config, 0))
    assert lowered_texts == [train_step.lower(run, init_state(config), batch).as_text()]
    assert run.config.model.remat == ("none" if remat == "auto" else remat)  # the tiny model fits as it is
