"""Every test runs on eight emulated CPU devices, strictly: implicit rank promotion raises."""

import os

import jax
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh, startup
from llamajax.planning.xla.compile import CompilerMissingError, check_compiler

# The tests compile hundreds of tiny steps and run each for milliseconds; unoptimised code compiles three times as fast.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
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


@pytest.fixture(scope="session")
def gpu_compiler():
    """Skips where XLA's compiler for GPUs (extra `plan`) is not installed; CI has it for the tests so marked."""
    try:
        check_compiler()
    except CompilerMissingError as missing:
        pytest.skip(str(missing))
