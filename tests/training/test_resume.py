"""Nothing is lost: a run that is killed, stopped or moved to another mesh goes on as if nothing had happened."""

import contextlib
import dataclasses
import json
import pathlib
import random
import shutil
import signal
import subprocess
from collections.abc import Sequence

import chex
import jax
import numpy as np
import pytest

from llamajax.checkpoint.read import restore
from llamajax.config.file import load_config
from llamajax.config.run import Config
from llamajax.parallel.mesh import make_mesh
from llamajax.step.state import abstract_state
from tests import runs

NUM_STEPS = 60


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> pathlib.Path:
    """A configuration whose run went from the first step to the last without a break."""
    config = runs.write_config(tmp_path_factory.mktemp("unbroken"), num_steps=NUM_STEPS)
    runs.finish(runs.start(config))
    assert len(runs.losses(config.parent / "run")) == NUM_STEPS
    return config


def restored_arrays(config: Config, run_dir: pathlib.Path) -> list[np.ndarray]:
    """Every array of the newest checkpoint, restored on the mesh of `config`: weights, moments, counters, key."""
    jax.set_mesh(make_mesh(config.mesh))
    state = restore(run_dir, abstract_state(config).as_saved()).state
    state = dataclasses.replace(state, rng=jax.random.key_data(state.rng))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def assert_same_end(config: pathlib.Path, run_dir: pathlib.Path) -> None:
    """The run in `run_dir` has the losses of the unbroken one, and its last checkpoint the same arrays, to the bit."""
    unbroken_dir = config.parent / "run"
    assert runs.losses(run_dir) == runs.losses(unbroken_dir)
    ours, theirs = (restored_arrays(load_config(config), directory) for directory in (run_dir, unbroken_dir))
    chex.assert_trees_all_equal(ours, theirs)


def starts(run_dir: pathlib.Path) -> list[int]:
    """The step that each start of the run went on from."""
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event["step"] for event in events if event["event"] == "start"]


def kill_and_resume(config: pathlib.Path, run_dir: pathlib.Path, num_kills: int, seed: int) -> None:
    """Kills the run at random moments, starting it again with the same command each time, then lets it finish.

    One that is faster than its killer must end like the unbroken one too, and is begun anew.
    """
    draw, override = random.Random(seed), f"--run_dir={run_dir}"
    kills = 0
    while kills <= num_kills:
        committed, earlier_starts = runs.committed_steps(run_dir), starts(run_dir)
        process = runs.start(config, override)
        if kills == num_kills:
            runs.finish(process)
        elif draw.random() < 0.2:  # while it starts
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=draw.uniform(0.5, 6))
        else:  # within a few steps, so often while a checkpoint is being written
            newest = max(committed, default=0)
            wanted = newest + draw.randint(1, 8)
            runs.wait_until(lambda: len(starts(run_dir)) > len(earlier_starts), [process])  # noqa: B023  (used at once)
            runs.wait_until(lambda: runs.steps_on_record(run_dir) >= wanted, [process])  # noqa: B023
        if kills < num_kills:
            process.kill()
            output, _ = process.communicate()
            if process.returncode == 0:
                assert_same_end(config, run_dir)
                shutil.rmtree(run_dir)
                continue
            assert process.returncode == -signal.SIGKILL, output
        kills += 1
        assert committed <= runs.committed_steps(run_dir), "a committed step was lost"
        assert starts(run_dir)[len(earlier_starts) :] in ([], [max(committed, default=0)])


@pytest.mark.slow
def test_a_run_killed_twice_ends_like_the_unbroken_one(unbroken, tmp_path):
    kill_and_resume(unbroken, tmp_path / "run", num_kills=2, seed=0)
    assert_same_end(unbroken, tmp_path / "run")


@pytest.mark.timeout(1800)
@pytest.mark.long
@pytest.mark.parametrize("num_kills", [5, 20])
def test_a_run_killed_again_and_again_ends_like_the_unbroken_one(unbroken, tmp_path, num_kills):
    kill_and_resume(unbroken, tmp_path / "run", num_kills, seed=1)
    assert_same_end(unbroken, tmp_path / "run")


@pytest.mark.parametrize("distributed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_sigterm_saves_the_step_in_progress_and_exits_with_0(unbroken, tmp_path, distributed):
    """Also where jax.distributed takes the signal, as in a Slurm job of one task."""
    run_dir = runs.cut(unbroken.parent / "run", tmp_path / "run", NUM_STEPS // 2)
    override = f"--run_dir={run_dir}"
    alone = ["--distributed.num_processes=1", "--distributed.process_id=0", "--distributed.enabled=true"]
    address = f"--distributed.coordinator_address={runs.free_address()}"
    process = runs.start(unbroken, override, *([*alone, address] if distributed else []))
    runs.wait_until(lambda: NUM_STEPS // 2 + 5 in runs.committed_steps(run_dir), [process])
    process.terminate()
    output = runs.finish(process)
    stopped_at = len(runs.losses(run_dir))
    assert NUM_STEPS // 2 + 5 <= stopped_at < NUM_STEPS
    assert f"stopped    at step {stopped_at}" in output
    assert max(runs.committed_steps(run_dir)) == stopped_at
    output = runs.finish(runs.start(unbroken, override))
    assert f"loaded from {unbroken.parent / 'programs' / 'llamajax-programs'}; memory" in output
    if distributed:  # adds up in another order, so its losses differ in the last bits
        assert_close_to_unbroken(unbroken, run_dir)
    else:
        assert_same_end(unbroken, run_dir)


def assert_close_to_unbroken(config: pathlib.Path, run_dir: pathlib.Path) -> None:
    ours, theirs = ([float.fromhex(x) for x in runs.losses(path).values()] for path in (run_dir, config.parent / "run"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


@pytest.mark.slow
def test_another_mesh_takes_over_with_the_same_arrays_and_rows(unbroken, tmp_path):
    """From fsdp x sequence x tensor to data x fsdp, half way: equal arrays, then the losses of the unbroken run."""
    run_dir = runs.cut(unbroken.parent / "run", tmp_path / "run", NUM_STEPS // 2)
    mesh = ["mesh.data=2", "mesh.fsdp=4", "mesh.sequence=1", "mesh.tensor=1", "train.grad_accum_steps=1"]
    before, after = (restored_arrays(load_config(unbroken, overrides), run_dir) for overrides in ([], mesh))
    chex.assert_trees_all_equal(before, after)

    runs.finish(runs.start(unbroken, f"--run_dir={run_dir}", *(f"--{override}" for override in mesh)))
    before, after = ([*runs.losses(path).values()][: NUM_STEPS // 2] for path in (unbroken.parent / "run", run_dir))
    assert before == after
    assert_close_to_unbroken(unbroken, run_dir)


@pytest.mark.long
def test_a_pipeline_continues_without_stages_and_with_them_again(unbroken, tmp_path):
    """Stopped on two stages, then on fsdp 8, and finished on the stages: rows and losses stay."""
    run_dir = runs.cut(unbroken.parent / "run", tmp_path / "run", NUM_STEPS // 2)
    rest = ("--mesh.sequence=1", f"--run_dir={run_dir}", "--parallel.zero=1")
    stages = ("--mesh.pipeline=2", "--mesh.fsdp=2", "--mesh.tensor=2", "--train.grad_accum_steps=4", *rest)
    alone = ("--mesh.fsdp=8", "--mesh.tensor=1", "--train.grad_accum_steps=1", *rest)
    for overrides, last in ((stages, NUM_STEPS // 2 + 10), (alone, NUM_STEPS - 10)):
        process = runs.start(unbroken, *overrides)
        runs.wait_until(lambda last=last: last in runs.committed_steps(run_dir), [process])
        process.terminate()
        runs.finish(process)
    runs.finish(runs.start(unbroken, *stages))
    assert_close_to_unbroken(unbroken, run_dir)


@pytest.mark.long
def test_devices_without_stages_take_over_from_stages_of_unequal_speed(tmp_path):
    """From programs of two stages to fsdp 8, half way: equal arrays, then the losses of the unbroken run."""
    config, run_dir = runs.write_config(tmp_path, num_steps=10), tmp_path / "taken over"
    model = "--model.num_layers=8"
    stages = ["mesh.pipeline=2", "mesh.stages=[3, 5]", "mesh.fsdp=2", "mesh.sequence=1", "mesh.tensor=2", "parallel.zero=1"]
    runs.finish(runs.start(config, model, *(f"--{override}" for override in stages)))
    runs.cut(tmp_path / "run", run_dir, 5)
    mesh = ["mesh.fsdp=8", "mesh.sequence=1", "mesh.tensor=1", "train.grad_accum_steps=1"]
    overrides = ([model[2:], *stages], [model[2:], *mesh])
    before, after = (restored_arrays(load_config(config, own), run_dir) for own in overrides)
    chex.assert_trees_all_equal(before, after)

    runs.finish(runs.start(config, f"--run_dir={run_dir}", model, *(f"--{override}" for override in mesh)))
    assert starts(run_dir)[-1] == 5
    assert_close_to_unbroken(config, run_dir)


def start_two(
    config: pathlib.Path,
    *overrides: str,
    directories: Sequence[pathlib.Path | None] = (None, None),
    num_devices: int = 4,
) -> list[subprocess.Popen[str]]:
    """Two processes with so many devices each, joined over loopback, each in its own working directory."""
    together = [
        *overrides, f"--mesh.num_cpu_devices={num_devices}", "--distributed.enabled=true",
        f"--distributed.coordinator_address={runs.free_address()}", "--distributed.num_processes=2",
    ]  # fmt: skip
    return [
        runs.start(config, *together, f"--distributed.process_id={rank}", directory=directory)
        for rank, directory in enumerate(directories)
    ]


@pytest.mark.slow
def test_other_processes_and_devices_take_over_without_a_hand(tmp_path):
    """One process of eight devices, two of two each, one of eight: the same command, killed in between; same losses."""
    config, run_dir = runs.write_config(tmp_path, num_steps=30, grad_accum_steps=1), tmp_path / "elastic"
    mesh = ("--mesh.fsdp=-1", "--mesh.sequence=1", "--mesh.tensor=1")
    runs.finish(runs.start(config, *mesh))
    together, outputs = (f"--run_dir={run_dir}", *mesh), [""]
    for saved, begin in {
        5: lambda: [runs.start(config, *together)],
        15: lambda: start_two(config, *together, num_devices=2),
    }.items():
        processes = begin()
        runs.wait_until(lambda: saved in runs.committed_steps(run_dir), processes)  # noqa: B023  (used at once)
        for process in processes:
            process.kill()
        outputs = [process.communicate()[0] for process in processes]
    said = "4 devices instead of 8: mesh fsdp 4, 2 accumulation steps of 4 rows (was 1 of 8), same global batch and rows"
    assert f"elastic    {said}" in outputs[0]
    assert "elastic    " not in runs.finish(runs.start(config, *together))
    ours, theirs = ([float.fromhex(x) for x in runs.losses(path).values()] for path in (run_dir, tmp_path / "run"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    ours, theirs = (eval_losses(path) for path in (run_dir, tmp_path / "run"))
    assert list(ours) == list(theirs) == [10, 20, 30]
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)


def eval_losses(run_dir: pathlib.Path) -> dict[int, float]:
    """Held-out losses by step; the last one where a step was evaluated twice."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["eval/loss"] for record in records if "eval/loss" in record}


@pytest.mark.long
def test_two_processes_train_like_one(unbroken, tmp_path):
    """Four devices each, joined over loopback; stopped by a SIGTERM to one of them, then resumed to the end."""
    run_dir = runs.cut(unbroken.parent / "run", tmp_path / "run", NUM_STEPS // 2)

    processes = start_two(unbroken, f"--run_dir={run_dir}")
    runs.wait_until(lambda: NUM_STEPS // 2 + 5 in runs.committed_steps(run_dir), processes)
    processes[1].terminate()
    for process in processes:
        runs.finish(process)
    assert max(runs.committed_steps(run_dir)) == len(runs.losses(run_dir)) < NUM_STEPS

    for process in start_two(unbroken, f"--run_dir={run_dir}"):
        runs.finish(process)
    assert_close_to_unbroken(unbroken, run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_process_ends_the_others_training_with_one_line(unbroken, tmp_path, victim):
    run_dir = tmp_path / "run"
    processes = start_two(unbroken, f"--run_dir={run_dir}")
    runs.wait_until(lambda: runs.steps_on_record(run_dir) >= 4, processes)
    processes[victim].kill()
    output = runs.finish(processes[1 - victim], expected_code=75)
    assert output.splitlines()[-1].startswith(f"process {victim} (pid {processes[victim].pid} on ")
    assert "Traceback" not in output
    assert "Check failure" not in output
    processes[victim].communicate()


@pytest.mark.long
def test_processes_in_other_directories_are_not_one_run(unbroken, tmp_path):
    """A relative run directory: the first process would go on from a checkpoint, the second begin."""
    directories = (tmp_path / "first", tmp_path / "second")
    for directory in directories:
        directory.mkdir()
    shutil.copytree(unbroken.parent / "run", directories[0] / "run")
    before = runs.committed_steps(directories[0] / "run")
    init_from = f"--init_from={unbroken.parent / 'run'}"
    for process in start_two(unbroken, "--run_dir=run", init_from, directories=directories):
        last = runs.finish(process, expected_code=4).splitlines()[-1]
        assert last.startswith(f"run_dir: process 1 sees different contents in {directories[1]}/run/checkpoints (pid ")
    assert runs.committed_steps(directories[0] / "run") == before


@pytest.mark.long
def test_bad_data_at_one_process_is_told_by_all(unbroken, tmp_path):
    """And the other tells what it does itself, as no cache is shared."""
    directories = (tmp_path / "first", tmp_path / "second")
    for directory in directories:
        directory.mkdir()
    shutil.copy(unbroken.parent / "text.jsonl", directories[1] / "text.jsonl")
    (directories[0] / "text.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    overrides = ("--data.cache_dir=cache", '--data.sources=[{"kind": "jsonl", "paths": ["text.jsonl"]}]')
    first, second = start_two(unbroken, f"--run_dir={tmp_path / 'run'}", *overrides, directories=directories)
    reason = "text.jsonl:2: "
    assert runs.finish(first, expected_code=3).splitlines()[-1].startswith(reason)
    lines = [line for line in runs.finish(second, expected_code=3).splitlines() if "peer ranks" not in line]
    assert lines[-1].startswith(f"process 0 (pid {first.pid} on ")
    assert reason in lines[-1]
    assert [line.split()[0] for line in lines[:-1]] == ["tokenizer", "tokenized"]
    assert all(line.endswith(" (process 1)") for line in lines[:-1])
