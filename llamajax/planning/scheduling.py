"""By what XLA schedules training's step: its own guesses, or latencies, where these help.

Plans and training decide alike.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from llamajax import disk
from llamajax.config.model import REMATS, Remat
from llamajax.config.run import Config
from llamajax.data import cache
from llamajax.errors import EnvironmentMismatchError
from llamajax.estimates.calibration import read_measurement
from llamajax.estimates.gpu_memory_budget import MEMORY_FRACTION, told_fraction
from llamajax.parallel import compilation_cache
from llamajax.planning.cost.attention import scores_of_calls
from llamajax.planning.cost.gpu import planned_machine
from llamajax.planning.latencies import FILE_NAME, read_latencies, text_costs
from llamajax.planning.schedule_choice import GUESSES, Judge, Judged
from llamajax.processes.peers import everyones, of_first
from llamajax.step.compile import Option, check_flags, compile_with, compiler_options, lower
from llamajax.step.forms import remat_policy, with_forms
from llamajax.step.state import TrainState


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


def check_told(config: Config) -> None:
    """Refuses what only the compiler for GPUs would be told, before it begins; all processes call this together.

    Raises:
        ConfigError: this jaxlib does not know `xla.flags`, or a file cannot be used: see `read_latencies` and
            `read_measurement`.
        EnvironmentMismatchError: the processes were given different files of latencies.
    """
    if config.xla.flags:
        check_flags(config)
    if config.xla.latency_profile not in (None, "auto"):
        _same_file(config.xla.latency_profile)
    read_measurement(config.hardware)


def compile_here(config: Config, lowered: jax.stages.Lowered) -> Compilation:
    """Compiles training's step for the devices of the current mesh; all processes call this together.

    Args:
        config: the run.
        lowered: its step, lowered for that mesh.

    Raises:
        ConfigError: `config.xla` says what this jaxlib does not know; see `gpu_options` too.
    """
    options, judged = gpu_options(config, lowered) if jax.default_backend() == "gpu" else ({}, None)
    if judged is not None:
        return Compilation(step=judged.step, options=options, from_cache=judged.from_cache)
    with compilation_cache.loaded() as loaded:
        step = compile_with(lowered, options)
    return Compilation(step=step, options=options, from_cache=bool(loaded))


def gpu_options(config: Config, lowered: jax.stages.Lowered) -> tuple[dict[str, Option], Judged | None]:
    """What XLA is told of training's step on GPUs, the same in all processes, which call this together; and the step, if it
    was compiled like this in order to be judged.

    What the cost model tells of a program, and whether it helps, is kept in `data.cache_dir`; it takes two or three
    compilations when the first process does not have it.

    Raises:
        ConfigError: see `read_latencies`.
        EnvironmentMismatchError: the processes were given different files of latencies.
    """
    num_devices = jax.sharding.get_mesh().size
    options = functools.partial(compiler_options, config, num_devices)
    source = latency_source(config, num_devices)
    folder = Path(config.data.cache_dir).expanduser() / "latencies"
    if source is None:
        return options(), None
    if source != "auto":
        text = _same_file(source)
        path = folder / cache.key_of(text) / FILE_NAME
        disk.keep(path, text.encode())
        return options(latencies=str(path)), None
    judge = _judge(config)
    path = folder / cache.key_of("latencies-4", [lowered.as_text(), options(), *_described(judge)]) / FILE_NAME
    text = of_first(path.read_text() if path.exists() else "")
    judged = None
    if text != GUESSES and not text_costs(text.encode()):
        text, judged = judge.latencies(lowered, options, path)
    disk.keep(path, text.encode())
    return options(latencies=None if text == GUESSES else str(path)), judged


def fastest_remat(config: Config, state: TrainState, doing: Callable[[str], None]) -> tuple[Remat, str]:
    """What `model.remat` comes to on the devices of the mesh, and why, in one line; all processes call this together.

    On GPUs that `hardware` names, the fastest that fits by the cost model, as in a plan: the step is compiled with each, and
    what came out is kept in `data.cache_dir`. Elsewhere what formulas say.

    Args:
        config: the run.
        state: its `abstract_state`.
        doing: is told what takes so long.
    """
    mesh = dict(jax.sharding.get_mesh().shape)
    if config.model.remat != "auto" or config.hardware.gpu == "none" or jax.default_backend() != "gpu":
        return remat_policy(config, mesh)
    plainest, _ = with_forms(config.changed({"model.remat": "none"}), mesh)
    key = cache.key_of("remat-1", [lower(plainest, state).as_text(), *_described(_judge(plainest))])
    path = Path(config.data.cache_dir).expanduser() / "remat" / key / "policy"
    kept = of_first(path.read_text() if path.exists() else "")
    if kept not in REMATS:
        preferences: dict[Remat, tuple[bool, float]] = {}
        for remat in REMATS:
            doing(f"compiling the step with model.remat: {remat}")
            tried, _ = with_forms(config.changed({"model.remat": remat}), mesh)
            options = compiler_options(tried, jax.sharding.get_mesh().size)
            preferences[remat] = _judge(tried).compiled(lower(tried, state), options).preference
        kept = of_first(min(preferences, key=lambda remat: preferences[remat]))
    disk.keep(path, kept.encode())
    return next(remat for remat in REMATS if remat == kept), "the fastest of five that fits by the cost model"


def _judge(config: Config) -> Judge:
    machine = planned_machine(config)
    budget = (told_fraction() or MEMORY_FRACTION) * machine.gpu.memory_bytes
    return Judge(machine=machine, mesh=dict(jax.sharding.get_mesh().shape), scores=scores_of_calls(config), budget=budget)


def _described(judge: Judge) -> list[Any]:
    """What decides a judgement, for the name of the file that keeps it."""
    machine = judge.machine
    return [repr(machine), repr(machine.calibration), judge.mesh, judge.scores, jax.__version__]


def _same_file(source: str) -> str:
    """The latencies in a file, which must be those of every process."""
    text = read_latencies(source)
    digests = everyones(cache.key_of(text))
    if other := next((number for number, digest in enumerate(digests) if digest != digests[0]), None):
        raise EnvironmentMismatchError(
            f"xla.latency_profile: {source} of process {other} is not that of process 0; give all the same file"
        )
    return text
