"""Behaviour that all commands share."""

import io
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from converters import arguments
from llamajax import completion, report
from llamajax.config.command import parse_args
from llamajax.config.file import load_config
from llamajax.config.generate import GenerateConfig
from llamajax.errors import WHEELS, importing, missing_package
from tests import runs

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "begin",
    [
        lambda: parse_args(["--model=x", "--prompt=a"], prog="any", root=GenerateConfig),
        lambda: report.main(["nowhere"]),
        lambda: completion.main(["bash"]),
        lambda: arguments.hf_arguments(["export", "a", "b"]),
        lambda: arguments.tokenizer_arguments(["grow", "a", "b", "--corpus=c", "--num_pieces=1"]),
        lambda: arguments.megatron_arguments(["info", "a"]),
    ],
    ids=["parse_args", "report", "completion", "hf", "tokenizer", "megatron"],
)
def test_no_command_ends_for_a_letter_that_its_output_lacks(begin: Callable[[], object], monkeypatch):
    """All others begin with `parse_args`."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict"))
    begin()
    for stream in (sys.stdout, sys.stderr):
        print("caf\u00e9 \u2581 \ud800", file=stream, flush=True)
        assert isinstance(stream, io.TextIOWrapper)
        assert stream.buffer.getvalue().endswith(b"caf\\xe9 \\u2581 \\ud800\n")  # pyright: ignore[reportAttributeAccessIssue]


PROGRAM = """
import contextlib, io, json, runpy, sys
absent = ["grain", "array_record", "portpicker", "tensorboardX"]
sys.modules.update(dict.fromkeys(absent))  # as if they were not installed
found = {}
for command, *arguments in json.loads(sys.argv[1]):
    sys.argv = [command, *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_module(command, run_name="__main__")
        except SystemExit as ended:
            found[command] = [ended.code, said.getvalue()]
print(json.dumps(found))
"""


def test_wheels_that_an_image_lacks_are_named_in_one_line(tmp_path):
    config = f"--config={runs.write_config(tmp_path)}"
    commands = [
        ["llamajax.train", config], ["llamajax.preprocess", config], ["llamajax.evaluate", "--model=x"],
        ["llamajax.verify", config],
    ]  # fmt: skip
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)], check=True, capture_output=True, text=True, cwd=ROOT
    )
    line = "grain: is not installed; run pip install array_record grain portpicker tensorboardX\n"
    assert json.loads(process.stdout) == {command: [4, line] for command, *_ in commands}


def test_a_package_that_is_too_old_is_told_from_one_that_is_missing():
    old, unknown, own = (ModuleNotFoundError(name=name) for name in ("json.future", "no_package.inner", "llamajax.gone"))
    assert str(missing_package(old)) == "json.future: is not in the installed json; run pip install -U json"
    assert str(missing_package(unknown)) == "no_package.inner: is not installed; run pip install no_package"
    assert missing_package(own) is None
    with pytest.raises(ModuleNotFoundError), importing():
        raise own


def test_every_package_that_is_needed_has_a_wheel():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split("[^A-Za-z0-9_-]", requirement)[0] for requirement in needed} <= set(WHEELS.values())
    told = [str(missing_package(ModuleNotFoundError(name=f"{module}.x"))) for module in WHEELS]
    assert not [line for line in told if "is not installed" in line]


def test_tensorboard_is_asked_for_before_the_run(tmp_path, monkeypatch):
    config = load_config(runs.write_config(tmp_path), ["metrics.tensorboard=true"])
    assert config.file_problems() == []
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    (problem,) = config.file_problems()
    assert problem == "metrics.tensorboard: tensorboardX is missing; run pip install tensorboardX, or turn it off"
