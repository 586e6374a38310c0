"""Tests of llamajax.mesh."""

import logging
import os
import subprocess
import sys

import pytest

from llamajax.parallel import mesh
from llamajax.step.step import one_behind

LAUNCHES = """
import jax, jax.numpy as jnp, numpy as np
from llamajax.parallel import mesh
from llamajax.config.parallel import MeshConfig

mesh.select_platform(MeshConfig(num_cpu_devices=8))
jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=8)))
row = jax.P("fsdp")


@jax.jit
def step(x):
    for _ in range(8):
        x = jax.sharding.reshard(jnp.tanh(jax.sharding.reshard(x, jax.P()) + 1), row)
    return x


x = jax.device_put(np.ones((64, 64), np.float32), row)
for _ in range(500):
    x = step(x)
print(float(x.sum()))
"""


def test_programs_may_be_queued_without_end():
    # A deadlock of jaxlib's own, in its threads: only another process can be given up.
    # XLA's options of this process would make every launch slower, so that none has to wait.
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")}
    child = subprocess.run([sys.executable, "-c", LAUNCHES], capture_output=True, text=True, timeout=60, env=environment)
    assert child.returncode == 0, child.stderr
    assert 0 < float(child.stdout) < 64 * 64


def test_one_behind():
    taken = []

    def results():
        for number in range(4):
            taken.append(number)
            yield number

    late = one_behind(results())
    assert [(number, taken[-1]) for number in late] == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert list(one_behind([])) == []
    assert list(one_behind([7])) == [7]


@pytest.mark.parametrize("has_driver", [False, True])
def test_a_plugin_for_gpus_is_missed_only_where_there_is_a_driver(has_driver, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(mesh, "_DRIVER", tmp_path if has_driver else tmp_path / "none")
    logger = logging.getLogger("jax._src.xla_bridge")
    try:
        raise RuntimeError("Unable to load cuFFT. Is it installed?")
    except RuntimeError:
        logger.exception("Jax plugin configuration error: Exception when calling jax_plugins.xla_cuda13.initialize()")
    logger.error("something else")
    assert len(caplog.records) == (2 if has_driver else 1)
