"""House rules: imports run downwards, shipped configs load and trace, maps name every room, docstrings are plain."""

import ast
import functools
import graphlib
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from llamajax.config.file import load_config
from llamajax.config.parallel import AXES
from llamajax.estimates.formulas import num_params, trained_weights
from llamajax.parallel.sharding import spec
from llamajax.step.batch import fields
from llamajax.step.frozen import partition
from llamajax.step.resolve import resolve
from llamajax.step.state import init_state
from llamajax.step.step import train_step

ROOT = pathlib.Path(__file__).parent.parent
ORDER = (
    ("errors", "units", "disk"),
    "config", "estimates", "processes", "launching", "parallel", "watch", "kernels", "model", "step", "data", "checkpoint",
    "weights", "preprocessing", "planning", "generation", "serving", "evaluation", "verification", "training",
    "diagnostics", "commands",
    ("results", "library"),
    (
        "train", "launch", "preprocess", "generate", "serve", "evaluate", "plan", "verify", "report", "doctor", "completion",
        "__main__",
    ),
    "converters",
)  # fmt: skip
"""The rooms of the house, from the ground up: words for everybody, folders, commands, and what stands beside the package.
A file imports from its own room and from those before it."""


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor(module: str) -> int:
    """The room of a module, counted from the ground."""
    parts = module.split(".")
    if module == "llamajax":
        return 0
    room = parts[0] if parts[0] == "converters" else parts[1]
    return next(i for i, rooms in enumerate(ORDER) if room == rooms or (isinstance(rooms, tuple) and room in rooms))


def imports(path: pathlib.Path) -> set[str]:
    """Modules of the project that the file imports, wherever in it, `from package import module` resolved."""
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
    return {name for name in found if name.split(".")[0] in ("llamajax", "converters")}


SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
FILES = sorted(path for package in ("llamajax", "converters") for path in (ROOT / package).rglob("*.py"))
IMPORTS = {module_name(path): imports(path) for path in FILES}


def test_imports_run_downwards():
    assert not [
        f"{module} imports {imported}"
        for module, several in IMPORTS.items()
        for imported in several
        if floor(imported) > floor(module)
    ]


STATIONS = ("documents", "tokenizers", "chat", "cleaning", "tokens", "rows")
"""The folders of `data/`, in the order in which text passes through them; what lies beside them is for all."""


def station(module: str) -> int:
    """The place of a module of `data/` among the stations; 0 for what they share."""
    folder = module.split(".")[2]
    return 1 + STATIONS.index(folder) if (ROOT / "llamajax" / "data" / folder).is_dir() else 0


def test_stations_of_data_import_those_before_them():
    data = {module: several for module, several in IMPORTS.items() if module.startswith("llamajax.data.")}
    assert {station(module) for module in data} == set(range(len(STATIONS) + 1))
    assert not [
        f"{module} imports {imported}"
        for module, several in data.items()
        for imported in several & data.keys()
        if station(imported) > station(module)
    ]


def test_no_files_import_each_other():
    assert tuple(graphlib.TopologicalSorter(IMPORTS).static_order())


def test_every_folder_is_a_room():
    folders = {path.name for path in (ROOT / "llamajax").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == {room for room in ORDER if isinstance(room, str)} - {"converters"}


def test_no_drawer_for_everything():
    assert not [path for path in FILES if path.stem in {"utils", "common", "helpers", "misc", "util"}]


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_says_what_it_is_for(path):
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert re.search(rf"python -m llamajax\.(train|launch --) --config configs/{re.escape(path.name)}\b", header)
    assert "\n# Hardware: " in header
    assert "\n# Expected: " in header


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if load_config(path).mesh.num_cpu_devices], ids=lambda path: path.stem
)
def test_every_config_for_this_machine_compiles(path):
    """In a fresh process, as its user starts it."""
    command = [sys.executable, "-m", "llamajax.train", "--config", str(path), "--dry_run"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert "parameters" in outcome.stdout


TRACED = {"llama3_1_70b_256xh100": []} | dict.fromkeys(
    (
        "gpt_39b_ib_roce_32xa100_80gb", "llama2_7b_1mi_8xa100_80gb", "llama3_1_405b_pipeline_1024xh100",
        "llama3_1_70b_qlora_8xa100_40gb", "llama3_1_8b_dpo_8xh100", "llama3_1_8b_grpo_8xh100",
        "llama3_1_8b_lora_1xrtx_4090", "llama3_1_8b_reward_8xh100", "llama3_70b_float8_64xh100",
        "llama_530b_2240xa100_80gb",
    ),
    pytest.mark.slow,
)  # fmt: skip
"""Configurations of all forms; `long` traces the others."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=TRACED.get(path.stem, pytest.mark.long))
        for path in CONFIGS
        if not load_config(path).mesh.num_cpu_devices
    ],
)
def test_every_config_for_a_cluster_traces_on_its_mesh(path):
    """The whole step, in its full size, for all devices of the cluster that it names."""
    config = load_config(path)
    num_devices = config.hardware.num_devices
    assert config.hardware.gpu != "none"
    assert not config.placement_problems(num_devices)
    sizes = config.mesh.axis_sizes(num_devices)
    mesh = AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    shape = (config.train.grad_accum_steps, config.train.micro_batch_size, config.data.seq_len)
    with jax.set_mesh(None), jax.sharding.use_abstract_mesh(mesh):  # None: the tests' own mesh has another size
        sharding = jax.NamedSharding(mesh, spec(None, "micro_batch", "seq"))
        batch = {name: jax.ShapeDtypeStruct(shape, of, sharding=sharding) for name, of in fields(config).items()}
        state = jax.eval_shape(functools.partial(init_state, config))
        state, metrics = jax.eval_shape(functools.partial(train_step, resolve(config, sizes)), state, batch)
    # Of a quantized base there are codes instead of numbers, so what is trained is counted.
    trained, frozen = partition(config, state.model)
    assert sum(leaf.size for leaf in jax.tree.leaves(trained)) == sum(trained_weights(config, config.model).values())
    if not config.adapters.enabled:
        assert sum(leaf.size for leaf in jax.tree.leaves((trained, frozen))) == num_params(config.model)
    assert metrics["loss"].shape == ()


def tracked_folders() -> set[str]:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {parent.as_posix() for name in tracked for parent in pathlib.PurePath(name).parents} - {"."}


def rooms_of(table: str) -> list[str]:
    """Rooms of the package that a Markdown table has a row for, in its order."""
    return re.findall(r"^\| `llamajax/([a-z]+)/` ", table, flags=re.MULTILINE)


def test_the_longer_map_names_every_folder():
    """Every folder has a row, or a row names it."""
    longer_map = (ROOT / "docs" / "contributing" / "rooms.md").read_text()
    assert not [
        folder
        for folder in sorted(tracked_folders())
        if not folder.startswith((".", "tests/", "docs/")) and f"`{folder}/`" not in longer_map
    ]


def test_the_maps_are_in_the_order_of_imports():
    in_order = [room for room in ORDER if isinstance(room, str) and room != "converters"]
    for document in ("README.md", "docs/contributing/rooms.md"):
        assert rooms_of((ROOT / document).read_text()) == in_order, document


def test_tests_mirror_the_package():
    """Tests of a folder of the package, or of what stands beside it, lie in the folder of the same name."""
    lone = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder, stem = path.relative_to(ROOT / "tests").parent, path.stem.removeprefix("test_")
        package = ROOT / folder if folder.parts[:1] in (("converters",), ("scripts",)) else ROOT / "llamajax" / folder
        if not package.is_dir() or not (any(package.glob("*.py"))):
            lone.append(f"{folder}/{stem}")
    assert not lone


def test_files_can_be_read_in_one_go():
    """Budgets in lines; files that outgrow theirs want a second part, not a larger budget."""
    lengths = {path: len(path.read_text().splitlines()) for path in [*FILES, *SCRIPTS, *(ROOT / "tests").rglob("*.py")]}
    assert not [path for path, length in lengths.items() if length > 500]
    assert not [path for path, length in lengths.items() if path.parent == ROOT / "llamajax" / "config" and length > 300]
    converters = ["converters/hf.py", "converters/tokenizer.py", "converters/megatron.py"]
    commands = [*(f"llamajax/{name}.py" for name in ORDER[-2]), *converters]
    assert not [command for command in commands if lengths[ROOT / command] > 40]
    of_packages = [lengths[path] for path in FILES]
    assert sum(of_packages) / len(of_packages) < 180


def docstrings(path: pathlib.Path) -> list[str]:
    """Every docstring of a file: of modules, classes and functions, and the texts under fields."""
    bodies = [getattr(node, "body", None) for node in ast.walk(ast.parse(path.read_text()))]
    statements = [statement for body in bodies if isinstance(body, list) for statement in body]
    texts = [statement.value for statement in statements if isinstance(statement, ast.Expr)]
    return [text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)]


def test_docstrings_say_their_subject_first():
    """At most 3% begin with a word that postpones it; docs/style.md says how to write them."""
    folders = ("llamajax", "converters", "scripts", "tests", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    texts = [(path, text) for path in files for text in docstrings(path)]
    late = [found for found in texts if re.match(r"\s*(of|what|that|by|whose)\b", found[1], re.IGNORECASE)]
    assert len(late) <= 0.03 * len(texts), "\n".join(f"{path.relative_to(ROOT)}: {text}" for path, text in late)
