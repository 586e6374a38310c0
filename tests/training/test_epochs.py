"""A run as long as its epochs: it is the run of so many steps, and resumes as that one, where its data are the same."""

import json
import pathlib

import pytest

from llamajax.config.file import load_config
from llamajax.errors import CheckpointError, ConfigError
from llamajax.launching.run import _num_steps_of_start
from llamajax.training import run as train
from llamajax.training.own_loop import prepare_loop
from tests import runs
from tests.training.test_stages import read

EPOCHS, ROWS, STEPS = 0.5, 197, 13


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> pathlib.Path:
    """The configuration of a run in epochs that nothing interrupted; it saved every third step."""
    path = runs.write_config(
        tmp_path_factory.mktemp("epochs"), num_steps=0, num_epochs=EPOCHS, eval_every=None, eval_batches=0
    )
    config = json.loads(path.read_text())
    config["model"] |= {"num_layers": 1, "remat": "none"}
    config["mesh"] = {"data": 8, "fsdp": 1, "num_cpu_devices": 8}
    config["train"]["grad_accum_steps"] = 1
    config["checkpoint"]["save_every"] = 3
    path.write_text(json.dumps(config))
    train.run(load_config(path))
    return path


@pytest.mark.slow
def test_it_is_the_run_of_so_many_steps(unbroken, tmp_path, capsys):
    other = load_config(unbroken, [f"run_dir={tmp_path}/run", f"train.num_steps={STEPS}", "train.num_epochs=null"])
    train.run(other)
    assert read(tmp_path / "run") == read(unbroken.parent / "run")
    assert runs.committed_steps(tmp_path / "run") == runs.committed_steps(unbroken.parent / "run") == {3, 6, 9, 12, STEPS}
    assert f"in {STEPS} steps" in capsys.readouterr().out


@pytest.mark.slow
def test_it_resumes_and_tells_how_long_it_is(unbroken, tmp_path, capsys):
    run_dir = runs.cut(unbroken.parent / "run", tmp_path / "run", 3)
    assert _num_steps_of_start(run_dir) == STEPS
    train.run(load_config(unbroken, [f"run_dir={run_dir}"]))
    assert read(run_dir) == read(unbroken.parent / "run")
    output = capsys.readouterr().out
    assert f"steps      {EPOCHS:g} epochs x {ROWS} rows / 8 rows per step = {STEPS} steps, rounded up\n" in output
    assert "start      resuming at step 3\n" in output
    longer = [f"run_dir={run_dir}", "train.num_epochs=0.6"]
    with pytest.raises(CheckpointError, match=r"train.num_epochs: 0.5 -> 0.6\); choose another run_dir, or allow"):
        train.run(load_config(unbroken, longer))
    with prepare_loop(load_config(unbroken, [*longer, "checkpoint.allow_changes=[train.num_epochs]"])) as loop:
        assert loop.config.train.num_steps == 15
    assert "is now the one of 0.6 epochs" in capsys.readouterr().out


@pytest.mark.slow
def test_what_needs_a_longer_run_is_refused_once_the_rows_are_known(unbroken, tmp_path):
    with pytest.raises(ConfigError, match=rf"^optimizer.warmup_steps: .* take 50 steps, above train.num_steps={STEPS}; "):
        train.run(load_config(unbroken, [f"run_dir={tmp_path}/run", "optimizer.warmup_steps=50"]))
