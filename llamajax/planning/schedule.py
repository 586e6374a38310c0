"""A plan: the step compiled, its memory and time; compiled again with the cost model's latencies; the better one kept."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llamajax.config import Config
from llamajax.errors import ConfigError
from llamajax.planning.compile import CompiledStep, compile_for
from llamajax.planning.fitting import Suggestion, suggestions
from llamajax.planning.hardware import planned_gpu
from llamajax.planning.hlo import Module, parse
from llamajax.planning.machine import Machine
from llamajax.planning.memory import MemoryPlan, memory_plan
from llamajax.planning.profile import latency_profile
from llamajax.planning.replay import replay
from llamajax.planning.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The step in one order of its instructions."""

    step: CompiledStep
    module: Module
    """`step.hlo`, parsed."""
    memory: MemoryPlan
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a configuration before it runs."""

    config: Config
    without_profile: Schedule
    """Scheduled by XLA's own guesses."""
    with_profile: Schedule | None
    """Scheduled by the cost model's latencies, or those of the file in `xla.latency_profile`; None: not tried."""
    suggestions: tuple[Suggestion, ...] = ()
    """What to change when `chosen` does not fit the card."""

    @property
    def chosen(self) -> Schedule:
        """Of the two the one that fits, or else the faster one: latencies can also mislead the scheduler. If both are
        the same, the one without needs no file."""
        candidates = [schedule for schedule in (self.without_profile, self.with_profile) if schedule is not None]
        return min(candidates, key=lambda schedule: (not schedule.memory.fits, schedule.timeline.step_time_s))

    @property
    def machine(self) -> Machine:
        return planned_machine(self.config)


def planned_machine(config: Config) -> Machine:
    """The cluster that `config.hardware` describes.

    Raises:
        ConfigError: it names no GPU.
    """
    return Machine(gpu=planned_gpu(config.hardware), gpus_per_node=config.hardware.gpus_per_node)


def mesh_sizes(config: Config) -> dict[str, int]:
    """Sizes of the mesh axes on the planned cluster, outer to inner."""
    return config.mesh.axis_sizes(config.hardware.num_devices)


def make_plan(
    config: Config, *, profile: bool = True, suggest: bool = True, doing: Callable[[str], None] = lambda what: None
) -> Plan:
    """Compiles and replays `config`, twice with `profile`; where it does not fit, also what could be changed.

    Args:
        config: the run.
        profile: compile a second time with latencies.
        suggest: look for changes with which it fits, if it does not; that takes up to eight compilations more.
        doing: told what is being done, for people who wait.

    Raises:
        CompilerMissingError: XLA's compiler for GPUs is not installed.
        ConfigError: see `compile_for`; or the file in `xla.latency_profile` is missing.
    """
    if config.xla.latency_profile not in (None, "auto") and not Path(config.xla.latency_profile).is_file():
        raise ConfigError(f"xla.latency_profile: {config.xla.latency_profile} is no file; name one, or write auto")
    doing("compiling the step")
    blind = replayed(compile_for(config), config)
    profiled = None
    if profile:
        doing("compiling it again with the latencies of the cost model")
        with _profile_file(config, blind) as path:
            profiled = replayed(compile_for(config, latency_profile=path), config)
    plan = Plan(config=config, without_profile=blind, with_profile=profiled)
    if plan.chosen.memory.fits or not suggest:
        return plan
    doing("compiling what could fit instead")
    found = suggestions(config, plan.chosen.memory, step_time=lambda step: replayed(step, step.config).timeline.step_time_s)
    return Plan(config=config, without_profile=blind, with_profile=profiled, suggestions=tuple(found))


def replayed(step: CompiledStep, config: Config) -> Schedule:
    """`step` on the cluster of `config`, which may differ from the one it was compiled for in its bandwidths."""
    module = parse(step.hlo)
    return Schedule(
        step=step,
        module=module,
        memory=memory_plan(step, module),
        timeline=replay(module, planned_machine(config), mesh_sizes(config)),
    )


@contextlib.contextmanager
def _profile_file(config: Config, blind: Schedule) -> Iterator[str]:
    """The file of latencies that the configuration names, or else one that the cost model makes."""
    if config.xla.latency_profile not in (None, "auto"):
        yield config.xla.latency_profile
        return
    with tempfile.TemporaryDirectory(prefix="llamajax-plan-") as folder:
        path = Path(folder) / "latencies.pbtxt"
        path.write_text(latency_profile(blind.module, planned_machine(config), mesh_sizes(config)), encoding="utf-8")
        yield str(path)
