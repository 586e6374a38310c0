"""Training on from weights: they, the tokenizer and the small files come along; the optimizer starts fresh."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from converters import convert
from converters.arguments import hf_arguments
from llamajax.checkpoint.read import restore
from llamajax.config.file import load_config
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.model import Llama
from llamajax.parallel.arrays import named_arrays
from llamajax.step.state import init_state
from llamajax.training import run as train
from tests import runs


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Config:
    """A finished run of two steps."""
    config = load_config(runs.write_config(tmp_path_factory.mktemp("base"), num_steps=2, eval_every=None, eval_batches=0))
    train.run(config)
    return config


def going_on(base: Config, directory: pathlib.Path, init_from: pathlib.Path, **changes) -> Config:
    """A run that starts from `init_from` with steps too small to move a weight."""
    still = {"optimizer.learning_rate": 1e-30, "optimizer.warmup_steps": 0, "optimizer.weight_decay": 0.0}
    return base.changed(still | {"run_dir": str(directory / "run"), "init_from": str(init_from), "seed": 7} | changes)


def weights(run_dir: pathlib.Path | str, config: Config) -> dict[str, np.ndarray]:
    abstract = jax.eval_shape(lambda key: Llama(config.model, key), jax.random.key(0))
    model = restore(run_dir, {"model": abstract}, partial=True).state["model"]
    return {name: np.asarray(array) for name, array in named_arrays(model).items()}


def assert_same_weights(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def export(run_dir: str, out: pathlib.Path) -> pathlib.Path:
    assert convert.main(hf_arguments(["export", run_dir, str(out), "--no-verify"])) == 0
    return out


def test_a_run_goes_on_from_a_hugging_face_directory_that_may_then_go(base, tmp_path, capsys):
    source = export(base.run_dir, tmp_path / "model")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 5], "temperature": 0.6}')
    config = going_on(base, tmp_path, source, **{"train.num_steps": 1})
    train.run(config)
    assert f"start      from {source}" in capsys.readouterr().out
    assert_same_weights(weights(config.run_dir, config), weights(base.run_dir, base))

    restored = restore(config.run_dir, jax.eval_shape(lambda: init_state(config)))
    state, meta = restored.state, restored.meta
    assert int(state.step) == 1
    counts = [int(leaf) for name, leaf in named_arrays(state.opt_state).items() if name.endswith("count")]
    assert counts
    assert set(counts) == {1}, "the optimizer starts fresh"
    assert meta["hf"]["source"] == "model"
    assert meta["config"]["init_from"] == str(source)

    shutil.rmtree(source)
    train.run(config.changed({"train.num_steps": 2, "checkpoint.allow_changes": ("train.num_steps",)}))
    assert "resuming at step 1" in capsys.readouterr().out
    files = pathlib.Path(config.run_dir) / "checkpoints/2/files"
    assert json.loads((files / "generation_config.json").read_text())["temperature"] == 0.6
    again = export(config.run_dir, tmp_path / "again")
    assert json.loads((again / "generation_config.json").read_text())["eos_token_id"] == [2, 5]


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_in_another_type(base, tmp_path):
    step = pathlib.Path(base.run_dir) / "checkpoints/2"
    config = going_on(base, tmp_path, step, **{"model.param_dtype": "bfloat16"})
    train.run(config)
    expected = {name: array.astype(jax.numpy.bfloat16) for name, array in weights(base.run_dir, base).items()}
    assert_same_weights(weights(config.run_dir, config), expected)


def test_another_model_is_refused_before_anything_is_compiled(base, tmp_path, capsys):
    run_dir = pathlib.Path(base.run_dir)
    with pytest.raises(ConfigError) as caught:
        train.run(going_on(base, tmp_path, run_dir, **{"model.num_layers": 3, "model.rope_theta": 5e5}))
    theirs = f"differs from {run_dir / 'checkpoints/2'}; it must be"
    assert str(caught.value).splitlines() == [
        f"model.num_layers: 3 {theirs} 2",
        f"model.rope_theta: 500000.0 {theirs} 10000.0, or init_changes must name rope_theta",
    ]
    assert "compile" not in capsys.readouterr().out


def test_nothing_to_start_from(base, tmp_path):
    with pytest.raises(ConfigError, match="there is no such directory"):
        train.run(going_on(base, tmp_path, tmp_path / "nowhere"))
    assert not list((tmp_path / "run/checkpoints").glob("*"))
