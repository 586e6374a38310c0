"""The wheel: built from the checkout, installed without it, used in an empty directory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT

pytestmark = pytest.mark.slow


def output(command: list[str], folder: Path, **variables: str) -> str:
    """What a command prints that must succeed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    outcome = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the installed wheel and nothing else, for PYTHONPATH."""
    source, wheels, installed = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "installed"))
    listed = output(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():  # not what was removed
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    output([*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(wheels), str(source)], wheels)
    shutil.rmtree(source)
    (wheel,) = wheels.glob("llamajax-*.whl")
    output([*pip, "install", "--no-deps", "--no-index", "--target", str(installed), str(wheel)], wheels)
    return installed


def python(installed: Path, folder: Path, *arguments: str) -> str:
    """What Python prints in `folder`, where the wheel is found before any other llamajax."""
    return output([sys.executable, *arguments], folder, PYTHONPATH=str(installed))


def test_the_package_is_found_whole(installed, tmp_path):
    code = """
import importlib, pkgutil
import llamajax, converters
from llamajax.config import shipped
for package in (llamajax, converters):
    print(package.__file__)
print(shipped.FOLDER)
config = llamajax.load_config("llama2_7b_8xa100_80gb", {"train.num_steps": 5000})
assert config.model.embed_dim == 4096, config
for module in pkgutil.iter_modules(converters.__path__):
    importlib.import_module(f"converters.{module.name}")
"""
    paths = python(installed, tmp_path, "-c", code).splitlines()
    assert len(paths) == 3
    assert all(Path(path).is_relative_to(installed) for path in paths)
    for suffix in ("css", "html", "js", "json", "pyi", "yaml", "jinja", "md", "bash", "zsh", "fish"):
        ours = {path.relative_to(ROOT) for path in (ROOT / "llamajax").rglob(f"*.{suffix}")}
        assert {path for path in ours if not (installed / path).is_file()} == set()
    assert (installed / "llamajax" / "py.typed").is_file()
    for folder, pattern in (("configs", "*.yaml"), ("docs", "*.md")):
        ours = {path.relative_to(ROOT) for path in (ROOT / folder).rglob(pattern)}
        assert {path for path in ours if not (installed / "llamajax" / path).is_file()} == set()


@pytest.mark.parametrize("command", ["train", "plan", "verify", "preprocess", "generate", "serve", "evaluate"])
def test_help_names_a_manual_that_exists(installed, tmp_path, command):
    told = python(installed, tmp_path, "-m", f"llamajax.{command}", "--help")
    manual = re.search(r"^ *manual:? +(\S+)", told, flags=re.MULTILINE)
    assert manual is not None, told
    assert Path(manual[1]).is_relative_to(installed)
    assert Path(manual[1]).is_file()


def test_the_console_script_runs_verbs(installed, tmp_path):
    script = next(path for path in (installed / "bin").iterdir() if path.name == "llamajax")
    told = python(installed, tmp_path, str(script), "completion", "--", "convert", "hf", "ex")
    assert told.startswith("export\t")


def test_it_trains_and_generates_in_an_empty_directory(installed, tmp_path):
    few = ["--train.num_steps", "20", "--train.eval_batches", "2", "--sample.max_tokens", "5"]
    few += ["--optimizer.warmup_steps", "4", "--optimizer.decay_steps", "8"]
    told = python(installed, tmp_path, "-m", "llamajax.train", "--config", "quickstart", *few)
    assert "steps          20 of 20" in told
    text = python(
        installed, tmp_path, "-m", "llamajax.generate", "--model", "runs/quickstart", "--prompt", "def ", "--max_tokens", "5"
    )
    assert text.startswith("def ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "runs"]


def test_it_plans_a_shipped_configuration(installed, gpu_compiler, tmp_path):
    told = python(
        installed, tmp_path, "-m", "llamajax.plan", "--config", "llama3_2_1b_8xh100", "--model.num_layers", "1",
        "--picture", "plan.html",
    )  # fmt: skip
    assert told.startswith("verdict    fits: ")
    assert "<svg" in (tmp_path / "plan.html").read_text()
