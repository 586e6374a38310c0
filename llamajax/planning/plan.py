"""A plan: the step compiled as training compiles it, with its memory and time; and the effects of other settings."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamajax.config.model import REMATS, Remat
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.estimates.formulas import mesh_sizes
from llamajax.estimates.machine import planned_machine
from llamajax.planning.cost.attention import planned_kernel, scores_of_calls
from llamajax.planning.cost.experts import expert_loads
from llamajax.planning.cost.replay import replay
from llamajax.planning.cost.timeline import Timeline
from llamajax.planning.fitting import Suggestion, suggestions
from llamajax.planning.latencies import FILE_NAME, read_latencies
from llamajax.planning.memory import MemoryPlan, memory_plan
from llamajax.planning.schedule_choice import Preference, fastest_remat, made_latencies, preference
from llamajax.planning.scheduling import check_told, latency_source
from llamajax.planning.xla.compile import CompiledStep, compile_for
from llamajax.planning.xla.hlo import Module
from llamajax.planning.xla.parse import parse
from llamajax.step.resolve import ResolvedRun, float8_matmuls, resolve_planned, with_placed_state


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The step in one order of its instructions."""

    step: CompiledStep
    module: Module
    """`step.hlo`, parsed."""
    memory: MemoryPlan
    timeline: Timeline
    untimed: CompiledStep | None = None
    """The step from which its latencies were computed, if it was compiled only for that."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The step with other settings of `xla` and `parallel`."""

    changes: dict[str, Any]
    """Values by dotted keys."""
    schedule: Schedule


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predictions for a configuration before it runs."""

    config: Config
    """The requested configuration, with `model.remat` chosen."""
    guessed: Schedule
    """The step scheduled with XLA's built-in estimates."""
    informed: Schedule | None
    """The step scheduled with the latencies of `xla.latency_profile`; None: no latencies are requested."""
    alternatives: tuple[Alternative, ...] = ()
    """Other settings that were tried, without XLA's built-in estimates where latencies are requested."""
    by_remat: dict[Remat, Schedule] = dataclasses.field(default_factory=dict)
    """The step with each `model.remat`, scheduled with XLA's built-in estimates; empty unless the setting was `auto`."""
    by_remat_on_card: dict[Remat, Schedule] = dataclasses.field(default_factory=dict)
    """The same with all saved values on the card, for each policy with which some wait in host memory."""
    suggestions: tuple[Suggestion, ...] = ()
    """Changes to make when `chosen` does not fit the card."""

    @property
    def chosen(self) -> Schedule:
        """Returns the schedule that training runs; `auto` uses latencies where they help."""
        if self.informed is None:
            return self.guessed
        if self.config.xla.latency_profile != "auto":
            return self.informed
        return min(self.guessed, self.informed, key=_preference)

    @property
    def best_changes(self) -> dict[str, Any]:
        """Returns the changes with which the step fits and is fastest; empty if the current settings are best."""
        guesses = Alternative(changes={"xla.latency_profile": None}, schedule=self.guessed)
        tried = [Alternative(changes={}, schedule=self.chosen), guesses, *self.alternatives]
        return min(tried, key=lambda alternative: _preference(alternative.schedule)).changes


def _preference(schedule: Schedule) -> Preference:
    return preference(schedule.timeline, fits=schedule.memory.fits)


def make_plan(
    config: Config, *, suggest: bool = True, alternatives: bool = False, doing: Callable[[str], None] = lambda what: None
) -> Plan:
    """Compiles `config` as training does and replays it; where it does not fit, also suggests changes.

    Args:
        config: the run.
        suggest: search for changes with which it fits, if it does not; this takes up to eleven more compilations.
        alternatives: also compile with the other `parallel.stack` and `xla.latency_profile`.
        doing: takes a line of progress.

    Raises:
        CompilerMissingError: XLA's compiler for GPUs is not installed.
        ConfigError: see `compile_for` and `check_told`.
    """
    check_told(config)
    config = with_placed_state(config, mesh_sizes(config))
    by_remat: dict[Remat, Schedule] = {}
    on_card: dict[Remat, Schedule] = {}

    def compiled(run: ResolvedRun) -> Preference:
        schedule = by_remat[run.config.model.remat] = replayed(compile_for(run), config)
        return _preference(schedule)

    if config.model.remat == "auto":
        fastest = fastest_remat(config, mesh_sizes(config), compiled, doing)
        for remat in REMATS:
            if not by_remat[remat].step.run.config.offload.names:
                continue
            doing(f"compiling the step with model.remat: {remat} and offload.activations: none")
            kept = {"model.remat": remat, "offload.activations": "none", "offload.fraction": None}
            on_card[remat] = planned(config.changed(kept))
        config = config.changed({"model.remat": fastest})
    doing("compiling the step")
    guessed = by_remat.get(config.model.remat) or planned(config)
    plan = Plan(config=config, guessed=guessed, informed=by_latencies(guessed, config), by_remat=by_remat)
    plan = dataclasses.replace(plan, by_remat_on_card=on_card)
    if alternatives:
        doing("compiling the step with other settings")
        plan = dataclasses.replace(plan, alternatives=tuple(_alternatives(plan)))
    if plan.chosen.memory.fits or not suggest:
        return plan
    doing("compiling changes that could fit")
    return dataclasses.replace(plan, suggestions=tuple(suggestions(config, plan.chosen.memory, compiled=memory_and_time)))


def plan_problems(config: Config) -> list[str]:
    """Returns the obstacles to a plan that are visible before any compilation, one line each."""
    if config.hardware.gpu == "none":
        return ["hardware.gpu: a plan needs a GPU; name one"]
    problems = [*config.placement_problems(config.hardware.num_devices)]
    problems += [problem for problem in config.problems() if not any(problem.startswith(known) for known in problems)]
    try:
        if not problems:
            run = resolve_planned(config)
            planned_kernel(run)
            float8_matmuls(config.model, run.gpu and run.gpu.compute_capability)
        check_told(config)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def by_latencies(guessed: Schedule, config: Config) -> Schedule | None:
    """Returns the step scheduled with the latencies that training tries, given its schedule `guessed`; None: training tries
    none."""
    source = latency_source(config, config.hardware.num_devices)
    if source is None:
        return None
    run, untimed = resolve_planned(config), None
    if source == "auto":
        text, untimed = made_latencies(run, guessed, lambda: replayed(compile_for(run, untimed=True), config))
    else:
        text = read_latencies(source)
    with tempfile.TemporaryDirectory(prefix="llamajax-plan-") as folder:
        path = Path(folder) / FILE_NAME
        path.write_text(text, encoding="utf-8")
        informed = replayed(compile_for(run, latencies=str(path)), config)
    return dataclasses.replace(informed, untimed=None if untimed is None else untimed.step)


def _alternatives(plan: Plan) -> Iterator[Alternative]:
    """Yields every other way to run and schedule the layers; a program for one device has only one, and the layers of a
    pipeline's stage run in one way."""
    latency_profile, run = plan.config.xla.latency_profile, plan.guessed.step.run
    other = "prefetch" if run.config.parallel.stack != "prefetch" else "scan"
    offload = run.config.offload
    # What waits in host memory returns in time only to a stack that prefetches.
    is_only = other == "scan" and (offload.names or offload.parameters == "all")
    ways: list[dict[str, Any]] = [{}] if run.mesh["pipeline"] > 1 or is_only else [{}, {"parallel.stack": other}]
    for changes in ways:
        guessing, informing = changes | {"xla.latency_profile": None}, changes | {"xla.latency_profile": "auto"}
        guessed = plan.guessed
        if changes:
            config = plan.config.changed(guessing)
            guessed = planned(config)
            yield Alternative(changes=guessing, schedule=guessed)
        if changes or latency_profile != "auto":
            schedule = by_latencies(guessed, plan.config.changed(informing))
            if schedule is not None:
                yield Alternative(changes=informing, schedule=schedule)


def memory_and_time(config: Config) -> tuple[MemoryPlan, float]:
    """Returns memory and time of the step as training runs it, or of the schedule with XLA's built-in estimates if that
    schedule does not fit."""
    guessed = planned(config)
    found = guessed
    if guessed.memory.fits:
        found = Plan(config=config, guessed=guessed, informed=by_latencies(guessed, config)).chosen
    return found.memory, found.timeline.step_time_s


def planned(config: Config) -> Schedule:
    """Returns the step of `config` on its cluster, scheduled with XLA's built-in estimates."""
    return replayed(compile_for(resolve_planned(config)), config)


def replayed(step: CompiledStep, config: Config) -> Schedule:
    """Replays `step` on the cluster of `config`, which may differ from the cluster that it was compiled for in bandwidths
    and in the constants of the cost model."""
    module = parse(step.hlo)
    return Schedule(
        step=step,
        module=module,
        memory=memory_plan(step, module),
        timeline=replay(
            module, planned_machine(config), step.run.mesh, scores_of_calls(step.run), expert_loads(config, step.run.mesh)
        ),
    )
