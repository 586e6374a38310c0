"""The workflow of GitHub: each supported Python runs `.ci/run`, with the interpreter that the run takes as `python3`."""

import pathlib
import re
import tomllib
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).parent.parent


def test_each_supported_python_runs_the_whole_of_ci():
    workflow: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow[True] == {"push": {"branches": ["main"]}, "pull_request": None, "workflow_dispatch": None}  # `on`
    (job,) = workflow["jobs"].values()
    pythons = job["strategy"]["matrix"]["python"]
    assert pythons == ["3.11", "3.12"]  # as texts: 3.10 would be the number 3.1
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert oldest == f">={pythons[0]}"
    assert job["timeout-minutes"] > 0
    checkout, setup, run = job["steps"]
    assert re.fullmatch("actions/checkout@[0-9a-f]{40}", checkout["uses"])  # a tag may be moved to other code
    assert re.fullmatch("actions/setup-python@[0-9a-f]{40}", setup["uses"])
    assert setup["with"]["python-version"] == "${{ matrix.python }}"
    assert run == {"run": "bash .ci/run"}
    assert (ROOT / ".ci" / "run").is_file()
