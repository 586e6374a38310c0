"""Every test runs on eight emulated CPU devices, strictly: implicit rank promotion raises."""

import dataclasses
import os
from typing import Any

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
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def _mesh():
    """Every test starts on the same mesh, whatever the one before it left behind."""
    jax.set_mesh(mesh.make_mesh(MeshConfig()))


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu_compiler" in item.fixturenames:
            item.add_marker("gpu_compiler")
    # Files are given to workers in this order: those that take longest must not be the last.
    longest = ("test_campaign.py", "test_mesh_equivalence.py")
    items.sort(key=lambda item: item.path.name not in longest)


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
