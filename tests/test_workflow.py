"""The workflow of GitHub: each supported Python runs `.ci/run`, with the interpreter that the run takes as `python3`; and
other files about the project for people and programs."""

import pathlib
import re
import tomllib
from typing import Any

import yaml

import llamajax

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
    checkout, setup, run, audit = job["steps"]
    assert re.fullmatch("actions/checkout@[0-9a-f]{40}", checkout["uses"])  # a tag may be moved to other code
    assert re.fullmatch("actions/setup-python@[0-9a-f]{40}", setup["uses"])
    assert setup["with"]["python-version"] == "${{ matrix.python }}"
    assert run == {"run": "bash .ci/run"}
    assert (ROOT / ".ci" / "run").is_file()
    assert audit == {"run": "python3 scripts/audit.py --required"}  # where there is a network, nothing may be left out


def test_ci_runs_the_scripts_that_the_workflow_runs():
    """With everything else that people run by hand: CI is one script, on every machine."""
    script = (ROOT / ".ci" / "run").read_text()
    for command in (
        "python3 .ci/docs.py", "mkdocs build --strict\n", "scripts/licences.py", "scripts/audit.py", "ruff check",
        "ruff format --check", "hadolint Dockerfile\n", "pyright", "pytest -m '(slow or gpu_compiler) and not long'",
    ):  # fmt: skip
        assert command in script, command


def test_forms_of_issues_ask_for_what_a_maintainer_needs():
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    for name in ("bug", "feature", "question"):
        form = yaml.safe_load((folder / f"{name}.yml").read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert "python -m llamajax.train --config YOUR.yaml --dry_run" in str(form["body"])
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids))
    assert "Versions" in (folder / "bug.yml").read_text()


def test_hooks_need_no_network():
    """A hook of another repository is fetched when it first runs."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    assert all(hook["language"] == "system" for hook in hooks["repos"][0]["hooks"])


def test_versions_agree():
    """The citation and the changelog name the version of the package."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == llamajax.__version__
    assert f"\n## {llamajax.__version__} - {citation['date-released']}\n" in (ROOT / "CHANGELOG.md").read_text()
