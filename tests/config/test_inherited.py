"""Settings of the model that a run leaves out are those of its weights; what it sets stays as it is."""

import dataclasses
import errno
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import pytest

from converters.hf_import import open_import
from llamajax import disk
from llamajax.config import left_out
from llamajax.config.command import parse_run
from llamajax.config.experts import ExpertsConfig
from llamajax.config.file import load_config
from llamajax.config.model import ModelConfig
from llamajax.errors import ConfigError, DiskError
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


def read(
    directory: pathlib.Path, init_from: pathlib.Path | str, model: dict[str, Any] | None, **settings: str
) -> ModelConfig:
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


def test_experts_may_be_trained_in_another_way(tmp_path):
    """Settings of a section that the weights fill in, too: those of the run do not hide those of the model."""
    own = ExpertsConfig(num_experts=4, top_k=1)
    write_model(tmp_path / "hf", tiny(experts=own))
    mine = {"experts": {"balance_loss": 0.01, "kernel": "plain"}}
    assert read(tmp_path, tmp_path / "hf", mine).experts == dataclasses.replace(own, balance_loss=0.01, kernel="plain")
    whole = dataclasses.asdict(tiny(experts=own)) | mine
    del whole["preset"]
    assert read(tmp_path, tmp_path / "hf", whole).experts == dataclasses.replace(own, balance_loss=0.01, kernel="plain")


def test_what_a_base_sets_stays_too(sources, tmp_path):
    """It is compared with the weights when the run starts, as what the file itself sets."""
    (tmp_path / "shape.yaml").write_text("model: {max_seq_len: 64, num_layers: 7}\n")
    path = runs.write_config(tmp_path)
    body = json.loads(path.read_text())
    del body["model"]
    body |= {"base": "shape.yaml", "init_from": str(sources["hf"])}
    path.write_text(json.dumps(body))
    assert load_config(path).model == dataclasses.replace(OWN, max_seq_len=64, num_layers=7)
    path.write_text(json.dumps(body | {"model": {"num_layers": OWN.num_layers}}))
    assert load_config(path).model == dataclasses.replace(OWN, max_seq_len=64)


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


@pytest.mark.parametrize("model", [None, {}, {"num_layers": 2, "remat": "none"}])
@pytest.mark.parametrize(
    ("init_from", "rule"),
    [
        ("elsewhere", "no run and no config.json in elsewhere"),
        ("run.yaml", "no run and no config.json in run.yaml"),
        ("~nobody-of-that-name/m", "~nobody-of-that-name/m is in no known home directory"),
        ("a" * 300, f"{'a' * 300} cannot be read: File name too long"),
        ("a\0b", "no run and no config.json in 'a\\x00b'"),
    ],
)
def test_where_no_weights_are_one_line_says_so(tmp_path, monkeypatch, model, init_from, rule):
    """In place of all that is missing of the model; whatever else is wrong is told beside it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        read(tmp_path, init_from, model, sead="1")
    lines = str(error.value).splitlines()
    expected = f":1: init_from: {rule}; correct the path, or write model out"
    assert [line for line in lines if "init_from" in line and line.endswith(expected)]
    assert ["sead" in line for line in lines if "init_from" not in line] == [True]


def test_a_home_that_is_not_known_is_a_problem_of_its_own_setting(sources, tmp_path):
    """And none where a run that was begun tells its model."""
    begun = tmp_path / "begun/checkpoints/5"
    begun.mkdir(parents=True)
    (begun / "meta.json").write_text(json.dumps({"config": {"model": dataclasses.asdict(OWN)}}))
    assert read(tmp_path, "~nobody-of-that-name/m", {}, run_dir=str(begun.parents[1])) == OWN
    assert read(tmp_path, sources["hf"], {}, run_dir="~nobody-of-that-name/r") == OWN


def test_checkpoints_that_do_not_tell_their_model_are_named(tmp_path):
    (tmp_path / "begun/checkpoints/5").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"init_from: .*/checkpoints/5/meta.json is missing or damaged; name another"):
        read(tmp_path, tmp_path / "begun", {})


@pytest.mark.parametrize("name", ["stat", "listdir"])
def test_weights_that_may_not_be_read_are_a_problem_and_a_failing_disk_is_the_disks(tmp_path, monkeypatch, name):
    (tmp_path / "weights").mkdir()
    real = getattr(os, name)

    def failing(number):
        def look(path, **options):
            if str(path).startswith(str(tmp_path / "weights/")):
                raise OSError(number, os.strerror(number), path)
            return real(path, **options)

        return look

    monkeypatch.setattr(disk, "_PAUSES_S", (0, 0, 0))
    monkeypatch.setattr(os, name, failing(errno.EACCES))
    with pytest.raises(ConfigError, match=r":1: init_from: .*/weights cannot be read: Permission denied; correct the path"):
        read(tmp_path, tmp_path / "weights", {})
    assert read(tmp_path, tmp_path / "weights", dataclasses.asdict(OWN)) == OWN
    monkeypatch.setattr(os, name, failing(errno.ESTALE))
    with pytest.raises(DiskError, match=r"^/.*Stale file handle; check the disk and run the same command again$"):
        read(tmp_path, tmp_path / "weights", {})


def test_a_failing_disk_ends_a_command_with_its_own_code(tmp_path, monkeypatch, capsys):
    path = runs.write_config(tmp_path)

    def fail(*_: object) -> None:
        raise DiskError("the disk")

    monkeypatch.setattr(left_out, "inherit", fail)
    with pytest.raises(SystemExit) as ended:
        parse_run(["--config", str(path)])
    assert (ended.value.code, capsys.readouterr().err) == (DiskError.exit_code, "the disk\n")


def test_a_section_whose_lines_are_commented_out_is_left_out(sources, tmp_path):
    path = runs.write_config(tmp_path)
    body = json.loads(path.read_text()) | {"init_from": str(sources["hf"]), "model": None}
    path.write_text(json.dumps(body))
    assert load_config(path).model == OWN
    assert load_config(path, ["model.max_seq_len=64"]).model == dataclasses.replace(OWN, max_seq_len=64)
    path.write_text(json.dumps(body | {"init_from": None}))
    with pytest.raises(ConfigError, match=r":1: model: must be a section with keys of its own, not null$"):
        load_config(path)


def test_a_config_json_that_is_not_read_is_told_where_it_is_named(sources, tmp_path):
    shutil.copytree(sources["hf"], tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gemma"}))
    with pytest.raises(ConfigError, match=r":1: init_from: .*config.json: model_type: gemma is not one of") as error:
        read(tmp_path, tmp_path / "hf", {})
    assert "vocab_size" not in str(error.value)


def test_a_hugging_face_directory_is_no_run_dir(sources, tmp_path):
    config = load_config(runs.write_config(tmp_path), [f"run_dir={sources['hf']}"])
    expected = f"run_dir: {sources['hf']} holds a Hugging Face model (config.json); choose another directory"
    assert expected in config.file_problems()


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ('{"model_type": "llama"}', "holds a Hugging Face model (config.json); move config.json to a directory of its own"),
        ('{"architectures": null}', "holds a Hugging Face model (config.json); move config.json to a directory of its own"),
        ('{"run": 5}', None),
        ("[]", None),
        ("damaged", None),
    ],
)
def test_a_run_goes_on_beside_a_config_json_of_no_model(tmp_path, content, rule):
    """And where it is one, it is not told to begin anew."""
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.json").write_text(content)
    problems = load_config(runs.write_config(tmp_path)).file_problems()
    assert problems == ([] if rule is None else [f"run_dir: {tmp_path}/run {rule}"])
