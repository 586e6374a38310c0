"""Every test runs on eight emulated CPU devices, strictly: implicit rank promotion raises; and nothing stays behind."""

import dataclasses
import gc
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh, startup
from llamajax.planning.xla.compile import CompilerMissingError, check_compiler

# The tests compile hundreds of tiny steps and run each for milliseconds. Unoptimised code compiles three times as fast, and
# without the emitters of fusions that go through MLIR, which later versions cannot do without, three times as fast again.
QUICK = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):
    QUICK += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"
startup.select_platform(MeshConfig(num_cpu_devices=8))
# For scripts/faults.py, which asks whether a test fails; the smallest example that does can take minutes to find.
hypothesis.settings.register_profile("first-failure", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate))
jax.config.update("jax_numpy_rank_promotion", "raise")
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where `tmp_path` is
# A shell ignores interrupts for what it starts in the background, and nohup ignores hang-ups: all processes that the tests
# start and signal would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _seldom_collects():
    """Tracing makes many small objects and few cycles: to look for these seldom makes tests a twentieth faster."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def _nothing_stays(request, tmp_path_factory):
    """The session has a directory for temporary files of its own, which goes with it, and by which the processes that it
    starts are known; with `--nothing-stays` it is an error if tests leave either."""
    folder = Path(tempfile.mkdtemp(prefix="llamajax-tests-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv(
            "TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor"))
        )  # torch keeps it for later sessions
        patch.setattr(tempfile, "tempdir", None)
        yield
    ends = time.monotonic() + 5  # what was just killed may take a moment to go
    while (processes := processes_of(folder)) and time.monotonic() < ends:
        time.sleep(0.1)
    files = [path.name for path in folder.iterdir()]
    shutil.rmtree(folder, ignore_errors=True)
    if not request.config.getoption("--nothing-stays"):
        return
    assert not files, f"tests left in the directory for temporary files: {files}"
    assert not processes, f"tests left running: {processes}"


def processes_of(folder: Path) -> list[str]:
    """The commands that were started with `folder`, or one within it, as the directory for temporary files and still run,
    where Linux tells."""
    found, own = [], f"TMPDIR={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended, or is another user's
            continue
        started_by = any(variable == own or variable.startswith(own + b"/") for variable in variables)
        if started_by and command and "multiprocessing.resource_tracker" not in command:  # which ends with this process
            found.append(command)
    return found


@pytest.fixture(autouse=True)
def _mesh():
    """Every test starts on the same mesh, whatever the one before it left behind."""
    jax.set_mesh(mesh.make_mesh(MeshConfig()))


def pytest_addoption(parser):
    parser.addoption("--nothing-stays", action="store_true", help="fail if tests leave a temporary file or a process")
    parser.addoption("--order-seed", type=int, help="run files in a random order, and the tests of each: none needs another")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "gpu_compiler" in item.fixturenames:
            item.add_marker("gpu_compiler")
    # Files are given to workers in this order: those that take longest must not be the last.
    longest = ("test_campaign.py", "test_mesh_equivalence.py", "test_resume.py")
    items.sort(key=lambda item: item.path.name not in longest)
    if (seed := config.getoption("--order-seed")) is not None:
        draw = random.Random(seed)
        places = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (places[item.path], draw.random()))


def pytest_make_parametrize_id(val):
    """Short ids of settings: `fsdp=2,tensor=4` of a section or of changes, `2x1x2x2` of sizes; the rest is pytest's."""
    text = in_short(val) if isinstance(val, dict | tuple) or is_settings(val) else None
    return text if text and len(text) <= 100 else None


def is_settings(value: Any) -> bool:
    return type(value).__module__.startswith("llamajax.config.") and dataclasses.is_dataclass(value)


def in_short(value: Any) -> str | None:
    """None if something in it has no short text."""
    if isinstance(value, tuple):
        items = [in_short(item) for item in value]
        return (
            None if None in items else ("x" if all(isinstance(item, int) for item in value) else "+").join(map(str, items))
        )
    if is_settings(value):
        fields = {field.name: field.default for field in dataclasses.fields(value)}
        value = {name: getattr(value, name) for name, default in fields.items() if getattr(value, name) != default}
    if isinstance(value, dict):
        items = {str(name).rpartition(".")[2]: in_short(item) for name, item in value.items()}
        return None if None in items.values() else ",".join(f"{name}={item}" for name, item in items.items()) or "default"
    return str(value) if isinstance(value, str | int | float | None) else None


@pytest.fixture(scope="session")
def gpu_compiler():
    """Skips where XLA's compiler for GPUs (extra `plan`) is not installed; CI has it for the tests so marked."""
    try:
        check_compiler()
    except CompilerMissingError as missing:
        pytest.skip(str(missing))
