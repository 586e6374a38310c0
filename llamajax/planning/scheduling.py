"""Resolves a run on this process's devices, and chooses how XLA schedules its step: its built-in estimates, or the cost
model's latencies when they are faster."""

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from llamajax import disk
from llamajax.config.model import REMATS
from llamajax.config.run import Config
from llamajax.data import cache
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.estimates.calibration import read_measurement
from llamajax.estimates.machine import planned_machine
from llamajax.parallel import compilation_cache
from llamajax.planning.cost.attention import scores_of_calls
from llamajax.planning.cost.experts import expert_loads
from llamajax.planning.latencies import FILE_NAME, read_latencies, text_costs
from llamajax.planning.schedule_choice import FASTEST, GUESSES, Judge, Judged, Preference, fastest_remat
from llamajax.processes.peers import everyones, of_first
from llamajax.step.compile import Option, check_flags, compile_with, compiler_options, lower
from llamajax.step.grouped_step import GroupedStep, compile_grouped
from llamajax.step.layer_groups import uses_files
from llamajax.step.resolve import ResolvedRun, resolve
from llamajax.step.staged_step import StagedStep, compile_staged
from llamajax.step.state import abstract_state


def latency_source(config: Config, num_devices: int) -> str | None:
    """Returns the source of latencies requested for a step on this many devices: `auto`, a file, or None for XLA's built-in
    estimates."""
    source = config.xla.latency_profile
    return None if source == "auto" and (config.hardware.gpu == "none" or num_devices == 1) else source


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Training's step, compiled for the devices of this run, or loaded."""

    step: jax.stages.Compiled | StagedStep | GroupedStep
    options: dict[str, Option]
    """Options that the compiler received, with several programs for those of a stage or a group."""
    from_cache: bool
    """Whether jax loaded it from an earlier compilation."""

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the facts that determine the compiled program, for the run's log."""
        return {
            "jaxlib": jaxlib.version.__version__,
            "device_kind": jax.devices()[0].device_kind,
            "options": self.options,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        }


def check_told(config: Config) -> None:
    """Refuses settings that only the GPU compiler would reject, before it starts; all processes call this together.

    Raises:
        ConfigError: this jaxlib does not support `xla.flags`, or a file cannot be used, at all or with `mesh.stages`: see
            `read_latencies` and `read_measurement`.
        EnvironmentMismatchError: the processes have different files of latencies.
    """
    if config.xla.flags:
        check_flags(config.xla.flags)
    if config.xla.latency_profile not in (None, "auto"):
        if config.mesh.stages:
            raise ConfigError("xla.latency_profile: a file is for one program, and mesh.stages has several; set auto")
        if config.offload.tiers.nvme_dir is not None:
            raise ConfigError(
                "xla.latency_profile: a file is for one program, and offload.tiers.nvme_dir has several; set auto"
            )
        _same_file(config.xla.latency_profile)
    read_measurement(config.hardware)


def compile_here(run: ResolvedRun, lowered: jax.stages.Lowered) -> Compilation:
    """Compiles training's step for the devices of the current mesh; all processes call this together.

    Args:
        run: the run.
        lowered: its step, lowered for that mesh.

    Raises:
        ConfigError: this jaxlib does not support a setting of `xla`; see also `gpu_options`.
    """
    options, judged = gpu_options(run, lowered) if jax.default_backend() == "gpu" else ({}, None)
    if judged is not None:
        return Compilation(step=judged.step, options=options, from_cache=judged.from_cache)
    with compilation_cache.loaded() as loaded:
        step = compile_with(lowered, options)
    return Compilation(step=step, options=options, from_cache=bool(loaded))


def is_several(config: Config) -> bool:
    """Returns whether the step of a resolved run is several programs: those of stages, or of groups of layers."""
    return bool(config.mesh.stages) or uses_files(config)


def compile_several_here(run: ResolvedRun, note: Callable[[str], None] = lambda line: None) -> Compilation:
    """Compiles the step of a run that `is_several` programs for the devices of the current mesh; all processes call this
    together.

    Args:
        run: the run.
        note: takes a line about the disk of `offload.tiers.nvme_dir`.

    Raises:
        ConfigError: see `compile_staged` and `compile_grouped`.
        DiskError: see `compile_grouped`.
    """
    with compilation_cache.loaded() as loaded:
        if run.config.mesh.stages:
            step, options = compile_staged(run, abstract_state(run.config))
        else:
            step, options = compile_grouped(run, abstract_state(run.config), note=note)
    return Compilation(step=step, options=options, from_cache=bool(loaded))


def gpu_options(run: ResolvedRun, lowered: jax.stages.Lowered) -> tuple[dict[str, Option], Judged | None]:
    """Returns XLA's options for training's step on GPUs, the same in all processes, which call this together; and the step,
    if it was compiled to be judged.

    The cost model's latencies for a program, and whether they help, are stored in `data.cache_dir`; if process 0 has none,
    they take two or three compilations.

    Raises:
        ConfigError: see `read_latencies`.
        EnvironmentMismatchError: the processes have different files of latencies.
    """
    source = latency_source(run.config, math.prod(run.mesh.values()))
    folder = Path(run.config.data.cache_dir).expanduser() / "latencies"
    if source is None:
        return compiler_options(run), None
    if source != "auto":
        text = _same_file(source)
        path = folder / cache.key_of(text) / FILE_NAME
        disk.keep(path, text.encode())
        return compiler_options(run, latencies=str(path)), None
    judge = _judge(run)
    path = folder / cache.key_of("latencies-4", [lowered.as_text(), compiler_options(run), *_described(judge)]) / FILE_NAME
    text = of_first(path.read_text() if path.exists() else "")
    judged = None
    if text != GUESSES and not text_costs(text.encode()):
        text, judged = judge.latencies(run, lowered, path)
    disk.keep(path, text.encode())
    return compiler_options(run, latencies=None if text == GUESSES else str(path)), judged


def resolve_here(config: Config, doing: Callable[[str], None] = lambda what: None) -> ResolvedRun:
    """Returns the run on the current mesh, as training resolves it; all processes call this together.

    On GPUs that `hardware` names, `model.remat: auto` resolves to the fastest policy that fits by the cost model, as in a
    plan: the step is compiled with each policy, and the result is stored in `data.cache_dir`. Elsewhere formulas choose the
    policy.

    Args:
        config: the run.
        doing: takes a line of progress.
    """
    mesh = dict(jax.sharding.get_mesh().shape)
    told = config.model.remat != "auto" or config.hardware.gpu == "none" or config.mesh.stages
    if told or jax.default_backend() != "gpu":
        return resolve(config, mesh)
    state = abstract_state(config)

    def compiled(tried: ResolvedRun) -> Preference:
        return _judge(tried).compiled(lower(tried, state), compiler_options(tried)).preference

    plainest = resolve(config.changed({"model.remat": "none"}), mesh)
    key = cache.key_of("remat-1", [lower(plainest, state).as_text(), *_described(_judge(plainest))])
    path = Path(config.data.cache_dir).expanduser() / "remat" / key / "policy"
    kept = of_first(path.read_text() if path.exists() else "")
    if kept not in REMATS:
        kept = of_first(fastest_remat(config, mesh, compiled, doing))
    disk.keep(path, kept.encode())
    run = resolve(config.changed({"model.remat": kept}), mesh)
    return dataclasses.replace(run, reasons={**run.reasons, "remat": f"{kept}: {FASTEST}"})


def _judge(run: ResolvedRun) -> Judge:
    machine = planned_machine(run.config)
    budget = run.memory_fraction * machine.gpu.memory_bytes
    scores, loads = scores_of_calls(run), expert_loads(run.config, run.mesh)
    return Judge(machine=machine, mesh=run.mesh, scores=scores, loads=loads, budget=budget)


def _described(judge: Judge) -> list[Any]:
    """Returns the inputs of a judgement, for the name of the file that stores it."""
    machine = judge.machine
    return [repr(machine), repr(machine.calibration), judge.mesh, judge.scores, judge.loads, jax.__version__]


def _same_file(source: str) -> str:
    """Reads the latencies in a file, which must be the same for every process."""
    text = read_latencies(source)
    digests = everyones(cache.key_of(text))
    if other := next((number for number, digest in enumerate(digests) if digest != digests[0]), None):
        raise EnvironmentMismatchError(
            f"xla.latency_profile: {source} of process {other} differs from process 0's; give all processes the same file"
        )
    return text
