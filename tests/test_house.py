"""House rules: imports run downwards, shipped configs load and trace, the README's map is complete."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FLOORS = (
    {"llamajax.errors", "llamajax"},
    {"llamajax.config", "llamajax.planning.hardware", "llamajax.planning", "llamajax.units", "llamajax.run_log"},
    {"llamajax.yaml_text", "llamajax.chart"},
    {"llamajax.config_file"},
    {"llamajax.cli", "llamajax.mesh"},
    {"llamajax.sharding", "llamajax.manifest"},
    {"llamajax.batch"},
    {"llamajax.model.rope", "llamajax.model.layers", "llamajax.optim", "llamajax.data"},
    {"llamajax.model.attention", "llamajax.console", "llamajax.metrics"},
    {"llamajax.model", "llamajax.model.llama"},
    {"llamajax.loss"},
    {"llamajax.step", "llamajax.restore", "llamajax.checkpoint"},
    {"llamajax.train", "llamajax.generate", "llamajax.report"},
)
"""A module imports only from floors below its own, or from its own folder on its own floor."""


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor(module: str) -> int:
    """The floor of the module, or of the nearest package around it."""
    name = module
    while name:
        for level, modules in enumerate(FLOORS):
            if name in modules and (name != "llamajax" or module == "llamajax"):
                return level
        name = name.rpartition(".")[0]
    raise AssertionError(f"{module} is on no floor of FLOORS")


def imports(path: pathlib.Path) -> set[str]:
    """Modules of the package that the file imports, `from package import module` resolved."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = (ROOT / inner.replace(".", "/")).is_dir() or (ROOT / f"{inner.replace('.', '/')}.py").is_file()
                found.add(inner if is_module else node.module)
    return {name for name in found if name.split(".")[0] == "llamajax"}


def test_imports_run_downwards():
    upwards = []
    for path in sorted((ROOT / "llamajax").rglob("*.py")):
        module = module_name(path)
        for imported in imports(path):
            own_part = path.stem == "__init__" and imported.startswith(f"{module}.")
            same_room = imported.rpartition(".")[0] == module.rpartition(".")[0]
            too_high = floor(imported) > floor(module) or (floor(imported) == floor(module) and not same_room)
            if too_high and not own_part:
                upwards.append(f"{module} imports {imported}")
    assert not upwards


def test_no_drawer_for_everything():
    drawers = {"utils", "common", "helpers", "misc", "util"}
    assert not [path for path in (ROOT / "llamajax").rglob("*.py") if path.stem in drawers]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_traces(path):
    """The step is lowered, for the mesh of the config, in a fresh process."""
    command = [sys.executable, "-m", "llamajax.train", "--config", str(path), "--dry_run"]
    assert path.read_text().startswith("#"), "a config starts with its command, hardware and expected result"
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert "parameters" in outcome.stdout


def test_the_readme_maps_every_folder():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {parent.as_posix() for name in tracked for parent in pathlib.PurePath(name).parents} - {"."}
    readme = (ROOT / "README.md").read_text()
    assert not [folder for folder in sorted(folders) if not folder.startswith(".") and f"{folder}/" not in readme]
