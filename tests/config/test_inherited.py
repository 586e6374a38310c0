"""Settings of the model that a run leaves out are those of its weights; what it sets stays as it is."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import jax
import pytest

from converters.hf_import import open_import
from llamajax.config.file import load_config
from llamajax.config.model import ModelConfig
from llamajax.errors import ConfigError
from tests import runs
from tests.converters.models import LLAMA3, tiny, write_model
from tests.tiny import single_device_mesh

MODEL = tiny(num_kv_heads=2, rope_theta=5e5, rope_scaling=LLAMA3, norm_eps=1e-6, init_std=0.3)
OWN = dataclasses.replace(MODEL, compute_dtype="bfloat16")
"""As a run has it that sets nothing: types are its own."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, pathlib.Path]:
    """One model as a Hugging Face directory, as an imported run, and as its step."""
    directory = tmp_path_factory.mktemp("weights")
    write_model(directory / "hf", MODEL)
    (directory / "run").mkdir()
    with jax.set_mesh(single_device_mesh()):
        open_import(directory / "hf", None).write(directory / "run")
    return {"hf": directory / "hf", "run": directory / "run", "step": directory / "run/checkpoints/0"}


def read(directory: pathlib.Path, init_from: pathlib.Path, model: dict[str, Any] | None, **settings: str) -> ModelConfig:
    """The model of a run whose file has this section `model`; None: it has none."""
    path = runs.write_config(directory)
    body = json.loads(path.read_text())
    del body["model"]
    path.write_text(
        json.dumps(body | settings | {"init_from": str(init_from)} | ({} if model is None else {"model": model}))
    )
    return load_config(path).model


@pytest.mark.parametrize("kind", ["hf", "run", "step"])
def test_what_is_left_out_is_that_of_the_weights(kind, sources, tmp_path):
    assert read(tmp_path, sources[kind], None) == OWN
    sizes = {name: getattr(MODEL, name) for name in ("vocab_size", "embed_dim", "num_layers", "rope_theta", "norm_eps")}
    assert read(tmp_path, sources[kind], sizes) == OWN


def test_what_is_set_stays(sources, tmp_path):
    mine = {"max_seq_len": 64, "remat": "none", "rope_scaling": {"kind": "linear", "factor": 2.0}, "rope_theta": 1.0}
    found = read(tmp_path, sources["hf"], mine)
    rope = {name: getattr(found, name) for name in ("max_seq_len", "remat", "rope_theta")}
    assert rope == {"max_seq_len": 64, "remat": "none", "rope_theta": 1.0}
    assert (found.rope_scaling.kind, found.rope_scaling.factor) == ("linear", 2.0)


def test_a_run_that_was_begun_keeps_its_model_where_the_weights_are_gone(sources, tmp_path):
    begun = tmp_path / "begun/checkpoints/5"
    begun.mkdir(parents=True)
    model = dataclasses.asdict(OWN) | {"max_seq_len": 128}
    (begun / "meta.json").write_text(json.dumps({"config": {"model": model}}))
    (begun.parent / "7").mkdir()
    (begun.parent / "7/meta.json").write_text("damaged")
    for init_from in (tmp_path / "gone", sources["hf"]):
        found = read(tmp_path, init_from, {}, run_dir=str(begun.parents[1]))
        assert found == dataclasses.replace(OWN, max_seq_len=128)


def test_weights_that_are_not_here_leave_what_is_required_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.vocab_size: required, but missing"):
        read(tmp_path, tmp_path / "elsewhere", {})


def test_a_config_json_that_is_not_read_is_told_where_it_is_named(sources, tmp_path):
    shutil.copytree(sources["hf"], tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "mixtral"}))
    with pytest.raises(ConfigError, match=r":1: init_from: .*config.json: model_type: mixtral is not one of") as error:
        read(tmp_path, tmp_path / "hf", {})
    assert "vocab_size" not in str(error.value)


def test_a_hugging_face_directory_is_no_run_dir(sources, tmp_path):
    config = load_config(runs.write_config(tmp_path), [f"run_dir={sources['hf']}"])
    expected = f"run_dir: {sources['hf']} holds a Hugging Face model (config.json); choose another directory"
    assert expected in config.file_problems()
