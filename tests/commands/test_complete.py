"""Completion: the candidates, and the scripts in real shells."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamajax import completion
from llamajax.commands.complete import FILES, SCRIPTS, TABLE, candidates
from llamajax.config.shipped import names
from tests.runs import ROOT


def words(*line: str) -> list[str]:
    return [candidate.partition("\t")[0] for candidate in candidates(line)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["pre"], ["preprocess"]),
        (["--v"], ["--version"]),
        (["convert", ""], ["hf", "tokenizer", "megatron"]),
        (["convert", "hf", "e"], ["export"]),
        (["convert", "hf", "export", "--dt"], ["--dtype"]),
        (["convert", "hf", "export", "--dtype", "f"], ["float32", "float16"]),
        (["convert", "megatron", "export", "out", "--train.num_"], ["--train.num_steps", "--train.num_epochs"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["report", "ru"], [FILES]),
        (["train", "--config", "quick"], ["quickstart", "quickstart_moe", FILES]),
        (["train", "--config=quick"], ["--config=quickstart", "--config=quickstart_moe", FILES]),
        (["train", "--tra"], ["--train."]),
        (["train", "--train.num_s"], ["--train.num_steps"]),
        (["train", "--train.num_steps", ""], []),
        (["train", "--train.num_steps", "5", "--dry"], ["--dry_run"]),
        (["train", "--hardware.gpu", "h"], ["h100", "h200"]),
        (["train", "--hardware.gpu=h2"], ["--hardware.gpu=h200"]),
        (["train", "--metrics.tensorboard", ""], ["true", "false"]),
        (["train", "--metrics.tensorboard", "--dry"], ["--dry_run"]),
        (["train", "--data.so"], ["--data.sources", "--data.sources."]),
        (["train", "--data.sources.12.ki"], ["--data.sources.12.kind"]),
        (["train", "--data.sources.12.kind", "js"], ["jsonl"]),
        (["train", "--run_dir", "runs/"], [FILES]),
        (["train", "--help", "offload.ti"], ["offload.tiers", "offload.tiers."]),
        (["train", "--init_from", ""], [FILES]),
        (["train", "--data.sources", ""], []),
        (["plan", "--picture", ""], [FILES]),
        (["launch", "-n", ""], []),
        (["launch", "-n", "2", "--dry"], []),
        (["launch", "-n", "2", "--", "--dry"], ["--dry_run"]),
        (["generate", "--temp"], ["--temperature"]),
        (["nonsense", "--x"], []),
        (["train", "nonsense"], []),
    ],
)
def test_candidates(line, expected):
    assert words(*line) == expected


def test_all_shipped_configurations_are_candidates():
    assert words("plan", "--config", "") == [*names(), FILES]


def test_candidates_have_their_meaning():
    meaning = "Number of optimizer steps; 0: as many as `num_epochs` takes."
    assert candidates(["train", "--train.num_s"]) == [f"--train.num_steps\t{meaning}"]
    assert all(
        text and "\n" not in text for spec in json.loads(TABLE.read_text())["verbs"].values() for text in [spec["text"]]
    )


def test_completing_imports_neither_jax_nor_the_settings():
    code = "import sys; from llamajax.completion import main; main(['--', 'train', '--tr']); print(sorted(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert told.startswith("--train.\t")
    assert not [name for name in ("jax", "numpy", "yaml", "llamajax.config") if f"'{name}'" in told]


BASH = """
eval "$(llamajax completion bash)"
compopt() { options+=("$2"); }  # works within a completion only
ask() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) options=()
    _llamajax
    printf '%s|' "${COMPREPLY[@]}" "${options[@]}"
    echo
}
ask llamajax train --conf
ask llamajax train --config = quick
ask llamajax train --config =
ask llamajax train --config run
ask llamajax train --config = run
ask llamajax train --opti
complete -p llamajax
"""


@pytest.fixture
def path_with_script(tmp_path: Path) -> dict[str, str]:
    """Variables with which a shell finds a `llamajax` of this checkout."""
    script = tmp_path / "bin" / "llamajax"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m llamajax "$@"\n')
    script.chmod(0o755)
    return {"PATH": f"{script.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "TERM": "dumb"}


def test_bash_completes(tmp_path, path_with_script):
    """`=` splits words in bash, and replies replace what follows it; names of files may have spaces."""
    (tmp_path / "run one.yaml").touch()
    outcome = subprocess.run(
        ["bash", "--norc", "-c", BASH], env=path_with_script, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert outcome.stderr == ""
    *lines, registered = outcome.stdout.splitlines()
    everything = "|".join([*names(), "bin", "run one.yaml", "filenames"]) + "|"
    assert sorted(lines.pop(2).split("|")) == sorted(everything.split("|"))
    assert lines == [
        "--config|",
        "quickstart|quickstart_moe|filenames|",
        "run one.yaml|filenames|",
        "run one.yaml|filenames|",
        "--optimizer.|nospace|",
    ]
    assert registered == "complete -F _llamajax llamajax"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_are_valid(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed; CI installs it")
    subprocess.run([shell, "-n", str(SCRIPTS[shell])], check=True)


def test_fish_completes(tmp_path, path_with_script):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed; CI installs it")
    asked = "complete -C 'llamajax train --hardware.gpu=h2'; complete -C 'llamajax train --op'"
    code = f"llamajax completion fish | source; {asked}"
    outcome = subprocess.run(
        ["fish", "-N", "-c", code], env=path_with_script, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    first, second = outcome.stdout.splitlines()
    assert first == "--hardware.gpu=h200"
    assert second.startswith("--optimizer.\tOptimizer")


def test_each_script_is_printed(capsys):
    for shell, path in SCRIPTS.items():
        assert completion.main([shell]) == 0
        assert capsys.readouterr().out == path.read_text()
