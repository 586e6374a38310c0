"""`python -m llamajax.verify`: exit codes, messages, files; and whole verifications."""

import json
import subprocess
import sys
from typing import Any

import pytest

from llamajax.config.data import StageConfig
from llamajax.config.file import dump_config, load_config
from llamajax.config.parallel import PLAIN, MeshConfig
from llamajax.config.run import Config
from llamajax.verification import run as verification
from llamajax.verification.variants import possible_forms
from tests.tiny import tiny_config
from tests.verification import faults
from tests.verification.test_scaling import CONFIGS


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Other tests do not see the flags that a verification sets for XLA."""
    monkeypatch.setenv("XLA_FLAGS", "")


def config(**mesh: Any) -> Config:
    return tiny_config(mesh=MeshConfig(**mesh, num_cpu_devices=8), parallel=PLAIN)


def test_a_mesh_is_verified(tmp_path, capsys):
    files = {"--json": str(tmp_path / "a.json"), "--page": str(tmp_path / "a.html")}
    assert verification.main(config(data=2, fsdp=2, tensor=2), files) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith(
        "run        unused\nmesh       data 2 x fsdp 2 x tensor 2, verified as data 2 x fsdp 2 x tensor 2\n"
    )
    assert "verdict    equal: " in captured.out
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["equal"]
    assert len(told["steps"]) == 5
    assert 0 < told["largest_difference"] < told["tolerance"]
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")


def test_of_a_run_in_stages_the_longest_rows_are_verified(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(verification, "certify", lambda config, *_: seen.append(config) or {"equal": True})
    monkeypatch.setattr(verification.text, "print_verification", lambda told: None)
    stages = StageConfig(from_step=5, seq_len=64), StageConfig(from_step=7, seq_len=32)
    assert verification.main(config(fsdp=4, sequence=2).changed({"data.stages": stages}), {}) == 0
    assert "\nrows       of 64 tokens, the longest of the run's stages\n" in capsys.readouterr().out
    assert [(of.data.seq_len, of.data.stages) for of in seen] == [(64, ())]


@pytest.mark.slow
def test_a_fault_ends_with_code_1_and_its_cause(tmp_path, capsys):
    with faults.turned_gather("sequence"):
        assert verification.main(config(fsdp=4, sequence=2), {"--json": str(tmp_path / "a.json")}) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("step 1: loss differs by ")
    assert "likely cause: the forward pass is already wrong; it goes away with mesh.sequence: 1; it stays with" in line
    assert not json.loads((tmp_path / "a.json").read_text())["equal"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_verified_in_the_forms_that_it_is_trained_in(path):
    scaled = verification.scale(load_config(path), None)
    if scaled is not None:
        trained = possible_forms(scaled.verified, scaled.forms)["trained"]
        assert (trained.parallel, trained.mesh) == (scaled.forms, scaled.verified.mesh)


@pytest.mark.slow
def test_a_balance_loss_over_micro_batches_is_verified(capsys):
    """Experts of a run that sums up several micro-batches."""
    own = config(fsdp=4, expert=2).changed(
        {"train.grad_accum_steps": 2, "model.experts.num_experts": 4, "model.experts.balance_loss": 0.1}
    )
    assert verification.main(own, {}) == 0, capsys.readouterr().err


def test_one_device_has_nothing_to_verify(capsys):
    assert verification.main(tiny_config(mesh=MeshConfig(num_cpu_devices=1)), {}) == 0
    assert capsys.readouterr().out.startswith("verdict    nothing to verify: the run has one device;")


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ({"fsdp": 8}, {"--devices": "1"}, "--devices: 1 must be a number from 2 to 64"),
        ({"fsdp": 8}, {"--devices": "65"}, "--devices: 65 must be a number from 2 to 64"),
        ({"fsdp": 8}, {"--devices": "eight"}, "--devices: eight must be a number from 2 to 64"),
        ({"fsdp": 2, "sequence": 2, "tensor": 2}, {"--devices": "4"}, "take 8 or more"),
        ({"fsdp": 8}, {"--page": "a.png"}, "--page: a.png: the output is an HTML page"),
        ({"fsdp": 8}, {"--json": "missing/a"}, "--json: missing/a: there is no directory missing"),
    ],
)
def test_mistakes_end_with_code_2_before_anything_runs(mesh, options, message, monkeypatch, capsys):
    monkeypatch.setattr(verification, "certify", None)
    assert verification.main(config(**mesh), options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_a_mesh_that_the_run_does_not_divide_over_is_refused(capsys):
    assert verification.main(tiny_config(mesh=MeshConfig(fsdp=3)).changed({"model.embed_dim": 128}), {}) == 2
    assert "model.embed_dim: 128 must be divisible by mesh.fsdp=3" in capsys.readouterr().err


def test_the_command_line_answers_without_jax(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config(fsdp=8)))
    command = [sys.executable, "-X", "importtime", "-m", "llamajax.verify", "--config", str(file), "--device", "4"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 2
    assert outcome.stderr.splitlines()[-1] == "--device: is not an option; did you mean --devices?"
    assert "| jax" not in outcome.stderr
