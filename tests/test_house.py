"""House rules: imports run downwards, shipped configs load and trace, the README's map is complete."""

import ast
import functools
import pathlib
import subprocess
import sys

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from llamajax.config.file import load_config
from llamajax.parallel.axes import AXES
from llamajax.parallel.sharding import spec
from llamajax.step.batch import FIELDS, micro_batch_size
from llamajax.step.step import init_state, train_step

ROOT = pathlib.Path(__file__).parent.parent
FLOORS = (
    {"llamajax.errors", "llamajax"},
    {"llamajax.config.run", "llamajax.units", "llamajax.watch.run_log"},
    {
        "llamajax.config.yaml_text",
        "llamajax.watch.chart",
        "llamajax.parallel.exit",
        "llamajax.parallel.meeting",
        "llamajax.parallel.processes",
        "llamajax.config.generate",
        "llamajax.parallel.allowance",
        "llamajax.config.gpus",
        "llamajax.step.compile",
    },
    {"llamajax.config.file"},
    {"llamajax.config.command", "llamajax.parallel.mesh"},
    {"llamajax.parallel.sharding", "llamajax.checkpoint.manifest"},
    {"llamajax.step.batch", "llamajax.generation.sampling"},
    {
        "llamajax.model.rope",
        "llamajax.model.layers",
        "llamajax.model.kv_cache",
        "llamajax.step.optim",
        "llamajax.data",
        "llamajax.kernels",
    },
    {"llamajax.model.attention", "llamajax.watch.console", "llamajax.watch.metrics", "llamajax.generation.prompts"},
    {"llamajax.model", "llamajax.model.llama", "llamajax.training.stop"},
    {"llamajax.step.loss", "llamajax.generation.completion"},
    {
        "llamajax.step.step",
        "llamajax.checkpoint.read",
        "llamajax.checkpoint.run_lock",
        "llamajax.checkpoint.array_writer",
        "llamajax.checkpoint.write",
        "llamajax.evaluation.scoring",
    },
    {"llamajax.planning", "llamajax.weights.pretrained", "llamajax.weights.origin"},
    {"llamajax.evaluation.document_loss"},
    {"llamajax.evaluation.harness"},
    {"llamajax.train", "llamajax.plan", "llamajax.generate", "llamajax.evaluate", "llamajax.report"},
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


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_says_what_it_is_for(path):
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert f"python -m llamajax.train --config configs/{path.name}" in header
    assert "\n# Hardware: " in header
    assert "\n# Expected: " in header


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if load_config(path).mesh.num_cpu_devices], ids=lambda path: path.stem
)
def test_every_config_for_this_machine_compiles(path):
    """In a fresh process, as its user starts it."""
    command = [sys.executable, "-m", "llamajax.train", "--config", str(path), "--dry_run"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert "parameters" in outcome.stdout


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if not load_config(path).mesh.num_cpu_devices], ids=lambda path: path.stem
)
def test_every_config_for_a_cluster_traces_on_its_mesh(path):
    """The whole step, in its full size, for all devices of the cluster that it names."""
    config = load_config(path)
    num_devices = config.hardware.num_devices
    assert config.hardware.gpu != "none"
    assert not config.placement_problems(num_devices)
    sizes = config.mesh.axis_sizes(num_devices)
    mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    shape = (config.train.grad_accum_steps, micro_batch_size(config), config.data.seq_len)
    with jax.set_mesh(None), jax.sharding.use_abstract_mesh(mesh):  # None: the tests' own mesh has another size
        sharding = jax.NamedSharding(mesh, spec(None, "batch", "seq"))
        batch = dict.fromkeys(FIELDS, jax.ShapeDtypeStruct(shape, jax.numpy.int32, sharding=sharding))
        state = jax.eval_shape(functools.partial(init_state, config))
        state, metrics = jax.eval_shape(functools.partial(train_step, config), state, batch)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.model)) == config.model.num_params
    assert metrics["loss"].shape == ()


def test_the_readme_maps_every_folder():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {parent.as_posix() for name in tracked for parent in pathlib.PurePath(name).parents} - {"."}
    readme = (ROOT / "README.md").read_text()
    assert not [folder for folder in sorted(folders) if not folder.startswith(".") and f"{folder}/" not in readme]
