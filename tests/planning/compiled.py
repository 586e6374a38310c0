"""The tiny step, compiled for eight CPU devices: real buffers and scopes, though not a GPU's."""

import functools
import tempfile
from pathlib import Path

import jax

from llamajax.config.machine import HardwareConfig
from llamajax.config.parallel import PLAIN, MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import TrainConfig
from llamajax.parallel import mesh
from llamajax.planning.xla.buffers import read_buffer_assignment
from llamajax.planning.xla.compile import CompiledStep
from llamajax.step.compile import lower
from llamajax.step.resolve import resolve_planned
from llamajax.step.state import abstract_state
from tests.tiny import tiny_config

CONFIG = tiny_config(
    hardware=HardwareConfig(gpu="h100"),
    mesh=MeshConfig(fsdp=4, tensor=2),
    train=TrainConfig(num_steps=10, global_batch_size=32, grad_accum_steps=2),
)


@functools.cache
def compiled_step(config: Config = CONFIG) -> CompiledStep:
    run = resolve_planned(config.changed({"parallel": PLAIN}))
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh.make_mesh(config.mesh)):
        compiled = lower(run, abstract_state(config)).compile(
            compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
        )
        (proto,) = Path(folder).glob("*jit_train_step*after_optimizations.hlo.pb")
        buffers = read_buffer_assignment(proto.read_bytes())
    hlo = compiled.as_text()
    assert hlo is not None
    return CompiledStep(
        run=run,
        hlo=hlo,
        buffers=buffers,
        peak_bytes=0,
        options={},
        compile_s=0.0,
        jax_version=jax.__version__,
    )
