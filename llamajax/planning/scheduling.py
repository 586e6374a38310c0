"""By what XLA schedules training's step: its own guesses, or latencies, where these help.

Plans and training decide alike.
"""

import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from llamajax import disk
from llamajax.config.run import Config
from llamajax.data import cache
from llamajax.errors import EnvironmentMismatchError
from llamajax.parallel import compilation_cache
from llamajax.parallel.allowance import MEMORY_FRACTION, told_fraction
from llamajax.parallel.processes import everyones
from llamajax.planning.cost.attention import scores_of_calls
from llamajax.planning.cost.gpu import planned_machine
from llamajax.planning.judge import GUESSES, judged
from llamajax.planning.latencies import FILE_NAME, read_latencies, text_costs
from llamajax.step.compile import Option, compile_with, compiler_options


def latency_source(config: Config, num_devices: int) -> str | None:
    """What is asked of the step on so many devices: `auto`, a file of latencies, or None for XLA's own guesses."""
    source = config.xla.latency_profile
    return None if source == "auto" and (config.hardware.gpu == "none" or num_devices == 1) else source


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Training's step, compiled for the devices of this run, or loaded."""

    step: jax.stages.Compiled
    options: dict[str, Option]
    """What the compiler was told."""
    from_cache: bool
    """Whether jax had it from an earlier compilation."""

    @property
    def facts(self) -> dict[str, Any]:
        """What decides how the program came out, for the run's log."""
        return {
            "jaxlib": jaxlib.version.__version__,
            "device_kind": jax.devices()[0].device_kind,
            "options": self.options,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        }


def compile_here(config: Config, lowered: jax.stages.Lowered) -> Compilation:
    """Compiles training's step for the devices of the current mesh; all processes call this together.

    Args:
        config: the run.
        lowered: its step, lowered for that mesh.

    Raises:
        ConfigError: `config.xla` says what this jaxlib does not know; see `gpu_options` too.
    """
    options = gpu_options(config, lowered) if jax.default_backend() == "gpu" else {}
    with compilation_cache.loaded() as loaded:
        step = compile_with(lowered, options)
    return Compilation(step=step, options=options, from_cache=bool(loaded))


def gpu_options(config: Config, lowered: jax.stages.Lowered) -> dict[str, Option]:
    """What XLA is told of training's step on GPUs, the same in all processes, which call this together.

    What the cost model tells of a program, and whether it helps, is kept in `data.cache_dir`; it takes two or three more
    compilations when the first process does not have it.

    Raises:
        ConfigError: see `read_latencies`.
        EnvironmentMismatchError: the processes were given different files of latencies.
    """
    mesh = dict(jax.sharding.get_mesh().shape)
    num_devices = math.prod(mesh.values())
    options = functools.partial(compiler_options, config, num_devices)
    source = latency_source(config, num_devices)
    folder = Path(config.data.cache_dir).expanduser() / "latencies"
    if source is None:
        return options()
    if source != "auto":
        text = _same_file(source)
        path = folder / cache.key_of(text) / FILE_NAME
        disk.keep(path, text.encode())
        return options(latencies=str(path))
    machine = planned_machine(config)
    budget = (told_fraction() or MEMORY_FRACTION) * machine.gpu.memory_bytes
    scores = scores_of_calls(config)
    described = [lowered.as_text(), options(), repr(machine), repr(machine.calibration), mesh, scores, jax.__version__]
    path = folder / cache.key_of("latencies-3", described) / FILE_NAME
    # Those of the first process: two hosts may choose other kernels.
    text = everyones(path.read_text() if path.exists() else "")[0]
    if text != GUESSES and not text_costs(text.encode()):
        text = everyones(judged(lowered, options, machine, mesh, scores, budget))[0]
    disk.keep(path, text.encode())
    return options(latencies=None if text == GUESSES else str(path))


def _same_file(source: str) -> str:
    """The latencies in a file, which must be those of every process."""
    text = read_latencies(source)
    digests = everyones(cache.key_of(text))
    if other := next((number for number, digest in enumerate(digests) if digest != digests[0]), None):
        raise EnvironmentMismatchError(
            f"xla.latency_profile: {source} of process {other} is not that of process 0; give all the same file"
        )
    return text
