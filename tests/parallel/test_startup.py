"""Tests of llamajax.parallel.startup."""

import functools
import os
import subprocess
import sys

from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue] (a module without types)

from llamajax.config.parallel import DistributedConfig, MeshConfig
from llamajax.parallel import startup
from llamajax.processes import heartbeat

LAUNCHES = """
import jax, jax.numpy as jnp, numpy as np
from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh, startup

startup.select_platform(MeshConfig(num_cpu_devices=8))
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


def test_connections_of_one_machine_are_made_on_loopback(monkeypatch):
    """The name in jaxlib is not public: this fails when a new version has another one."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    made: list[dict[str, object]] = []
    assert callable(getattr(_jax, startup.GLOO))
    monkeypatch.setattr(_jax, startup.GLOO, lambda **options: made.append(options))
    startup.listen_on_loopback()
    getattr(_jax, startup.GLOO)(distributed_client=None)
    assert made == [{"distributed_client": None, "hostname": "127.0.0.1"}]
    monkeypatch.delattr(_jax, startup.GLOO)
    startup.listen_on_loopback()


def test_a_program_that_has_connected_has_told_that_it_is_alive(tmp_path, monkeypatch):
    """One without a watchdog says nothing else, and must not count as one that never began."""
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path))
    monkeypatch.setenv("LLAMAJAX_PROCESS_ID", "3")
    monkeypatch.setattr(heartbeat, "of_this_process", functools.cache(heartbeat.of_this_process.__wrapped__))
    startup.connect(MeshConfig(num_cpu_devices=8), DistributedConfig())
    beat = heartbeat.read(tmp_path, 3)
    assert beat is not None
    assert (beat.phase, beat.deadline) == ("start", None)
