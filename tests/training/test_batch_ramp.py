"""A run whose batch grows: what it tells, that it reads every row once, and that it goes on exactly wherever it stopped."""

import json
import pathlib

import pytest

from llamajax.checkpoint.meta import read_meta
from llamajax.checkpoint.read import Saved
from llamajax.config.batch_ramp import BatchRampConfig
from llamajax.config.file import config_to_dict, load_config
from llamajax.config.run import Config
from llamajax.errors import CheckpointError
from llamajax.training import run as train
from llamajax.training.loop import position_meta
from llamajax.training.own_loop import prepare_loop
from llamajax.training.resume import check_settings
from llamajax.training.stages import described_phase
from tests import runs
from tests.training.test_resume import start_two
from tests.training.test_rollback import first_rows, start
from tests.training.test_stages import read, records_of

SIZES = [8, 8, 8, 16, 16, 24, 24]
"""Batch size of each step: 8 rows more after every half of the first 48."""
FIRST_ROWS = [sum(SIZES[:step]) for step in range(len(SIZES) + 1)]
RAMP = BatchRampConfig(start=8, increment=8, sequences=48)
PHASES = [(1, 0, 8), (2, 3, 16), (3, 5, 24)]
"""Number, first step, size."""


def written(directory: pathlib.Path, **train_settings: object) -> pathlib.Path:
    """`runs.write_config` with one layer, and with the ramp."""
    settings = {"num_steps": 7, "global_batch_size": 24, "grad_accum_steps": 3, "global_batch_ramp": vars(RAMP)}
    path = runs.write_config(directory, **(settings | {"eval_every": None, "eval_batches": 0} | train_settings))
    config = json.loads(path.read_text())
    config["model"] |= {"num_layers": 1, "remat": "none"}
    config["mesh"] = {"data": 8, "fsdp": 1, "num_cpu_devices": 8}
    config["checkpoint"]["save_every"] = 1
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> pathlib.Path:
    """The configuration of a run that nothing interrupted; it saved every step."""
    path = written(tmp_path_factory.mktemp("ramp"))
    train.run(load_config(path))
    return path


def test_every_step_has_its_batch_and_the_run_tells_so(unbroken):
    run_dir = unbroken.parent / "run"
    steps = [record for record in records_of(run_dir) if "train/loss" in record]
    assert [record["data/tokens"] for record in steps] == [32 * row for row in FIRST_ROWS[1:]]
    rows = [record["perf/tokens_per_sec"] * record["perf/step_time_s"] / 32 for record in steps]
    assert rows == pytest.approx(SIZES)
    metas = [read_meta(run_dir / "checkpoints" / str(step)) for step in range(1, len(SIZES) + 1)]
    assert [meta and meta["data"]["position"] for meta in metas] == FIRST_ROWS[1:]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    compiled = [(event["step"], event["global_batch_size"]) for event in events if event["event"] == "compile"]
    assert compiled == [(0, 24), (0, 8), (3, 16)], "the full batch first: it needs the most memory"
    assert [event["step"] for event in events if event.get("doing") == "compiling"] == [0, 3]
    told = [described_phase(load_config(unbroken).train, number) for number in range(3)]
    assert told == [
        "1 of 3: 8 sequences in 1 micro-batch, to step 3", "2 of 3: 16 sequences in 2 micro-batches, to step 5",
        "3 of 3: 24 sequences in 3 micro-batches, to step 7",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "step",
    [4, pytest.param(5, marks=pytest.mark.slow), *(pytest.param(step, marks=pytest.mark.long) for step in (1, 2, 3, 6))],
)
def test_a_run_goes_on_in_the_middle_of_a_phase_and_at_its_ends(unbroken, tmp_path, capsys, step):
    run_dir = runs.cut(unbroken.parent / "run", tmp_path / "run", step)
    train.run(load_config(unbroken, [f"run_dir={run_dir}"]))
    assert read(run_dir) == read(unbroken.parent / "run")
    output = capsys.readouterr().out
    assert f"start      resuming at step {step}\n" in output
    told = [line.split()[1] for line in output.splitlines() if line.startswith("phase  ")]
    at = load_config(unbroken).train.phase_at(step)
    assert told == [str(number) for number, _, _ in PHASES[at:]]


def saved_after(config: Config, step: int) -> Saved:
    meta = {"config": config_to_dict(config), "data": position_meta(config, step, ())}
    return Saved(step=step, meta=meta, files=pathlib.Path())


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {"train.global_batch_ramp.sequences": 96},
            "train.global_batch_ramp: {start: 8, increment: 8, sequences: 96} would skip or repeat data, because the run's 4"
            " steps end before row 40, not 32; keep {start: 8, increment: 8, sequences: 48}, or choose another run_dir",
        ),
        (
            {"train.global_batch_ramp": BatchRampConfig()},
            "train.global_batch_ramp: {start: null, increment: null, sequences: null} would skip or repeat data, because",
        ),
        (
            {"train.global_batch_size": 32, "train.grad_accum_steps": 4},
            "train.global_batch_size: 32 would skip or repeat data, because the run's 4 steps end before row 40, not 56;"
            " keep 24, or choose another run_dir",
        ),
    ],
)
def test_another_ramp_is_refused_where_rows_would_be_skipped_or_repeated(unbroken, changes, refusal):
    config = load_config(unbroken)
    with pytest.raises(CheckpointError) as caught:
        check_settings(config.changed(changes), saved_after(config, 4))
    assert str(caught.value).startswith(refusal)
    assert "\n" not in str(caught.value)


def test_a_ramp_that_leaves_the_rows_so_far_alone_may_be_allowed(unbroken):
    """A run in its first phase may still take a slower ramp, or begin one."""
    config = load_config(unbroken)
    slower = config.changed({"train.global_batch_ramp.sequences": 96})
    with pytest.raises(CheckpointError, match=r"\(train.global_batch_ramp.sequences: 48 -> 96\); choose another run_dir"):
        check_settings(slower, saved_after(config, 2))
    check_settings(slower.changed({"checkpoint.allow_changes": ("train.global_batch_ramp",)}), saved_after(config, 2))
    older = saved_after(config.changed({"train": config.train.in_batches_of(8)}), 2)
    del older.meta["config"]["train"]["global_batch_ramp"]
    with pytest.raises(CheckpointError, match=r"global_batch_ramp.start: null -> 8; train.global_batch_size: 8 -> 24\);"):
        check_settings(config, older)
    check_settings(config.changed({"checkpoint.allow_changes": ("train",)}), older)


@pytest.mark.slow
def test_phases_compute_what_runs_with_their_batches_compute(unbroken, tmp_path):
    config = load_config(unbroken)
    changes = {"run_dir": str(tmp_path / "run"), "train": config.train.in_batches_of(8)}
    train.run(config.changed(changes))
    ours, theirs = runs.losses(unbroken.parent / "run"), runs.losses(tmp_path / "run")
    assert [ours[step] == theirs[step] for step in range(1, 6)] == [True] * 3 + [False] * 2


@pytest.mark.slow
def test_a_loop_of_ones_own_takes_the_same_steps(unbroken, tmp_path):
    with prepare_loop(load_config(unbroken, [f"run_dir={tmp_path / 'run'}"])) as loop:
        state, losses, shapes = loop.state, {}, []
        for step, batch in loop.batches():
            state, metrics = loop.train_step(state, batch)
            losses[step] = float(metrics["loss"]).hex()
            shapes.append(batch["tokens"].shape)
    assert shapes == [(size // 8, 8, 32) for size in SIZES]
    assert losses == runs.losses(unbroken.parent / "run")


@pytest.mark.long  # tests/training/test_stages.py has it for rows of several lengths in CI
def test_a_run_killed_around_boundaries_ends_like_the_unbroken_one(tmp_path):
    path, run_dir = written(tmp_path), tmp_path / "killed"
    runs.finish(runs.start(path))
    for at_least in (3, 5):
        process = runs.start(path, f"--run_dir={run_dir}")
        runs.wait_until(lambda at_least=at_least: runs.steps_on_record(run_dir) >= at_least, [process])
        process.kill()
        process.communicate()
    runs.finish(runs.start(path, f"--run_dir={run_dir}"))
    assert read(run_dir) == read(tmp_path / "run")


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param(((2, 8), (6, 4)), marks=pytest.mark.long, id="8, 4, 8"),
        pytest.param(((2, 8), (4, 4), (6, 2)), marks=pytest.mark.long, id="8, 4, 2, 8"),
    ],
)
def test_other_devices_and_longer_rows_take_over_in_every_phase(tmp_path, legs):
    """Fewer devices, and all of them again: same rows and tokens to the bit, losses but for the order of sums."""
    path, run_dir = written(tmp_path, eval_batches=1), tmp_path / "elastic"
    config = json.loads(path.read_text())
    config["data"]["stages"] = [{"from_step": 4, "seq_len": 64}]
    config["mesh"] = {"data": 1, "fsdp": -1, "num_cpu_devices": 8}
    path.write_text(json.dumps(config))
    runs.finish(runs.start(path))
    for step, devices in legs:
        process = runs.start(path, f"--run_dir={run_dir}", f"--mesh.num_cpu_devices={devices}")
        runs.wait_until(lambda step=step: step in runs.committed_steps(run_dir), [process])
        process.kill()
        output, _ = process.communicate()
        assert ("elastic    " in output) == (devices < 8)
    runs.finish(runs.start(path, f"--run_dir={run_dir}"))
    ours, theirs = (read(directory) for directory in (run_dir, tmp_path / "run"))
    for own, other in zip(ours, theirs, strict=True):
        assert own == pytest.approx(other, rel=1e-4)
        exact = [key for key in own if key.startswith(("step", "data/", "train/tokens"))]
        assert [own[key] for key in exact] == [other[key] for key in exact]


@pytest.mark.long
def test_stages_of_a_pipeline_take_the_same_steps(unbroken, tmp_path):
    """Also with fewer micro-batches than stages."""
    config = load_config(unbroken, ["model.num_layers=2", f"run_dir={tmp_path / 'one'}"])
    pipeline = {"mesh.pipeline": 2, "mesh.data": 4, "parallel.zero": 1, "run_dir": str(tmp_path / "pipeline")}
    for of_mesh in (config, config.changed(pipeline)):
        train.run(of_mesh)
    for own, other in zip(read(tmp_path / "pipeline"), read(tmp_path / "one"), strict=True):
        assert own == pytest.approx(other, rel=1e-4)


@pytest.mark.long
def test_two_processes_go_through_the_phases_like_one(tmp_path):
    path = written(tmp_path)
    runs.finish(runs.start(path))
    outputs = [runs.finish(process) for process in start_two(path, f"--run_dir={tmp_path / 'two'}")]
    assert sum(output.count("phase      ") for output in outputs) == 3
    for own, other in zip(read(tmp_path / "two"), read(tmp_path / "run"), strict=True):
        assert own == pytest.approx(other, rel=1e-4)


@pytest.mark.long
def test_a_run_goes_back_across_a_phase_and_passes_over_what_the_steps_took(tmp_path):
    """Rows 30 and 41 spoil steps 4 and 5, the second is one too many, and the run goes on from step 2."""
    path = written(tmp_path, max_nonfinite_steps=1)
    output = runs.finish(start(path, "--checkpoint.save_every=2", nan=[30, 41], spike=[], rows=str(tmp_path / "rows")))
    assert "going back to step 2, passing over rows 16 to 55 (1 of at most 3 times)" in output
    rows = first_rows(tmp_path / "rows")
    assert [rows[step] for step in range(1, 8)] == [row + 40 * (row >= 16) for row in FIRST_ROWS[:-1]]
    told = [line.split()[1] for line in output.splitlines() if line.startswith("phase  ")]
    assert told == ["1", "2", "1", "2", "3"]
