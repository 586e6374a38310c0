"""The command: its report, exit codes and options."""

import json

import pytest

from llamajax import doctor
from llamajax.diagnostics import devices, run, software, storage
from llamajax.diagnostics.findings import Finding
from tests import runs
from tests.diagnostics import nvidia


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Without the seconds of jax's start and of all packages' metadata, which other files test; in an empty folder."""
    monkeypatch.setattr(devices, "check_devices", lambda *_: [Finding("jax devices", "ok", "1 x cpu")])
    monkeypatch.setattr(software, "check_packages", lambda: [Finding("packages", "ok", "all")])
    monkeypatch.setattr(storage, "_TRIED_BYTES", 1 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_a_machine_without_a_run(capsys):
    assert doctor.main([]) == 0
    head, *lines, summary = capsys.readouterr().out.splitlines()
    assert head.startswith("llamajax ")
    assert summary.endswith(": no failure")
    findings = [line for line in lines if not line.startswith(" ")]
    assert len(findings) > 12
    assert {line.split()[0] for line in findings} <= {"ok", "warn"}


def test_a_failure_is_the_exit_code(capsys, tmp_path):
    path = runs.write_config(tmp_path)
    assert doctor.main(["--config", str(path)]) == 0
    assert doctor.main(["--config", str(path), "--data.tokenizer.path", "none.json", "--json"]) == 4
    found = json.loads(capsys.readouterr().out.partition("no failure\n")[2])
    assert found.keys() == {"llamajax", "host", "findings"}
    failed = [finding for finding in found["findings"] if finding["status"] == "fail"]
    assert failed == [
        {
            "check": "files", "status": "fail", "text": "data.tokenizer.path: no file matches none.json",
            "remedy": f"relative paths start at {tmp_path}",
        }
    ]  # fmt: skip


def test_cards_of_the_driver_reach_all_checks(capsys, tmp_path, monkeypatch):
    nvidia.install(tmp_path, gpu=nvidia.H100, topology=nvidia.DEGRADED)
    monkeypatch.setenv("PATH", str(tmp_path))
    doctor.main([])
    text = capsys.readouterr().out
    assert "ok    GPUs                4 x NVIDIA H100 80GB HBM3\n" in text
    assert "fewer at GPU 2\n" + " " * 26 + "-> " in text
    assert " for 4 GPUs, which need 4 each\n" in text or "processors          " in text


@pytest.mark.parametrize("arguments", [["--train.num_steps", "5"], ["--jsn"], ["--config"]])
def test_mistakes_on_the_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(arguments)
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_configuration_with_mistakes(capsys, tmp_path):
    path = runs.write_config(tmp_path)
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--config", str(path), "--train.num_steps", "0"])
    assert ended.value.code == 2
    assert "train.num_steps: 0 must be positive" in capsys.readouterr().err


def test_variables_that_do_not_describe_hosts(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "x")
    assert doctor.main([]) == 4
    assert "fail  ports               SLURM_JOB_NUM_NODES='x' must be a number\n" in capsys.readouterr().out
    assert run._num_hosts() == 1
