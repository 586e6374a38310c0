"""Settings that a configuration leaves out: the run's directory, and the description of a released model."""

import dataclasses
import json
import re
import typing

import pytest

from llamajax.config import shipped
from llamajax.config.command import parse_run
from llamajax.config.file import load_config
from llamajax.config.inherited import INHERITED
from llamajax.config.left_out import preset_file
from llamajax.config.model import ModelConfig, Preset
from llamajax.errors import ConfigError
from llamajax.estimates.formulas import num_active_params, num_params
from llamajax.units import format_count
from tests import runs
from tests.config.broken import LLAMA_2_7B

NAMES = typing.get_args(Preset)


def run(directory, model, **settings):
    """The configuration of a run with this section `model`."""
    path = runs.write_config(directory)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model} | settings))
    return path


def test_every_shipped_model_is_a_preset():
    assert sorted(map(preset_file, NAMES)) == sorted((shipped.FOLDER / "models").glob("*.yaml"))


def test_the_manual_lists_every_preset(tmp_path):
    text = (shipped.MANUAL.parent / "reference/models.md").read_text()
    rows = [line for line in text[text.index("## Presets") :].splitlines() if line.startswith("| `")]
    models = {name: load_config(run(tmp_path, {"preset": name})).model for name in NAMES}
    assert rows == [f"| `{name}` | {size(model)} | {model.max_seq_len:,} |" for name, model in models.items()]


def size(model):
    """Parameters, and those that process one token if these are fewer."""
    active = f" ({format_count(num_active_params(model))} active)" if model.experts.enabled else ""
    return format_count(num_params(model)) + active


@pytest.mark.parametrize("name", ["llama-2-70b", "llama-3.2-1b", "llama-530b"])
def test_a_preset_describes_the_model_as_its_file_does(name, tmp_path):
    size = name.rpartition("-")[2]
    assert size in preset_file(name).name
    found = load_config(run(tmp_path, {"preset": name})).model
    by_base = load_config(run(tmp_path, {}, base=str(preset_file(name)))).model
    assert found == by_base
    assert found.preset is None


def test_what_the_run_and_its_base_set_stays(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {preset: llama-3.2-1b, num_layers: 3}\n")
    path = run(tmp_path, {"remat": "none", "rope_scaling": {"factor": 16.0}}, base="base.yaml")
    model = load_config(path).model
    assert (model.num_layers, model.remat, model.embed_dim, model.tie_embeddings) == (3, "none", 2048, True)
    assert (model.rope_scaling.kind, model.rope_scaling.factor) == ("llama3", 16.0)
    assert load_config(path, ["model.preset=llama-3.1-8b"]).model.embed_dim == 4096
    assert load_config(run(tmp_path, {"preset": None} | dataclasses.asdict(LLAMA_2_7B))).model == LLAMA_2_7B


def test_a_preset_leaves_nothing_to_the_weights(tmp_path):
    """So their config.json, which may be on another machine, is not looked for."""
    found = load_config(run(tmp_path, {"preset": "llama-3.1-8b"}, init_from="hf://meta-llama/Llama-3.1-8B")).model
    assert found == load_config(run(tmp_path, {"preset": "llama-3.1-8b"})).model


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("Llama-3.1-8B", "did you mean llama-3.1-8b?"), ("llama-4-8b", "did you mean llama-3-8b?"), (["a"], "not a list")],
)
def test_an_unknown_preset_is_one_line(name, remedy, tmp_path):
    path = run(tmp_path, {"preset": name})
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path}:1: model.preset: must be one of llama-2-7b, ")
    assert str(error.value).endswith(remedy)
    assert "\n" not in str(error.value)


def test_a_reward_model_has_a_score_head(tmp_path):
    data = {"sources": [{"kind": "preference", "paths": ["x"]}], "seq_len": 8, "chat_template": "x"}
    reward = {"objective": {"kind": "reward"}, "data": data, "sample": {}}
    found = load_config(run(tmp_path, {"preset": "llama-3.2-1b"}, **reward))
    assert (found.model.head, found.model.tie_embeddings) == ("score", True)
    with pytest.raises(ConfigError, match="vocabulary gives no scores for objective"):
        load_config(run(tmp_path, {"preset": "llama-3.2-1b", "head": "vocabulary"}, **reward))


def test_a_preset_in_python_is_refused():
    with pytest.raises(ConfigError, match=r"^preset: llama-2-7b means something in files"):
        dataclasses.replace(LLAMA_2_7B, preset="llama-2-7b")
    assert "preset" not in INHERITED
    assert {field.name for field in dataclasses.fields(ModelConfig)} > set(INHERITED)


def test_help_lists_the_presets(capsys):
    with pytest.raises(SystemExit):
        parse_run(["--help", "model.preset"])
    assert f"--model.preset {'|'.join(NAMES)}|null " in capsys.readouterr().out


def test_a_run_is_called_like_its_file(tmp_path):
    path = run(tmp_path, {"preset": "llama-2-7b"})
    body = json.loads(path.read_text())
    del body["run_dir"]
    (tmp_path / "mine.v2.yaml").write_text(json.dumps(body))
    assert load_config(tmp_path / "mine.v2.yaml").run_dir == "runs/mine.v2"
    assert load_config(tmp_path / "mine.v2.yaml", ["run_dir=x"]).run_dir == "x"
    assert load_config("llama3_1_8b_sft_8xh100").run_dir == "runs/llama3_1_8b_sft_8xh100"
    (tmp_path / "fifo").write_text(json.dumps(body))
    with pytest.raises(ConfigError, match=r"run_dir: must not be empty; name a directory$"):
        load_config(tmp_path / "fifo")


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(shipped.FOLDER.glob("*.yaml")) if "init_from: hf://" in path.read_text()]
)
def test_a_fine_tuning_run_takes_fifteen_lines(name):
    lines = (shipped.FOLDER / f"{name}.yaml").read_text().splitlines()
    assert len([line for line in lines if not re.match(r"\s*(#|$)", line)]) <= 15
    config = load_config(name)
    assert config.init_from is not None
    assert config.init_from.startswith("hf://meta-llama/Llama-3.1-")
    assert config.run_dir == f"runs/{name}"
    assert config.adapters.enabled == ("lora_" in name)
