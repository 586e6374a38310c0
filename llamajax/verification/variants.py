"""Other forms of a run: the forms that `auto` may resolve to, and plainer ones, to find the one that makes a difference go
away."""

import dataclasses
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llamajax.config.keys import join
from llamajax.config.parallel import AXES, PLAIN, MeshConfig, ParallelConfig
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.verification.differences import first_difference
from llamajax.verification.reference_run import Side, run_side


@dataclasses.dataclass(frozen=True)
class Trial:
    """The same steps with one setting made plain."""

    key: str
    value: Any
    cured: bool
    """Whether nothing differs with this change."""


def possible_forms(config: Config, trained: ParallelConfig) -> dict[str, Config]:
    """Returns the run in the `trained` forms, and in each form that a setting of `auto` may resolve to, one at a time: the
    choice depends on sizes and devices, which differ in the scaled run."""
    forms = {"trained": config.changed({"parallel": trained})}
    for field in dataclasses.fields(ParallelConfig):
        key, values = join("parallel", field.name), typing.get_args(field.type)
        if "auto" in values and getattr(config.parallel, field.name) == "auto":
            forms |= {
                f"{key}: {value}": changed
                for value in values
                if value != "auto"
                for changed in _allowed(config, {key: value})
            }
    return forms


def run_trials(config: Config, truth: Side, num_steps: int, doing: Callable[[str], None]) -> list[Trial]:
    """Tries every single change that makes the run plainer.

    Args:
        config: the run on emulated devices, which differs from `truth`.
        truth: the same on one device.
        num_steps: number of steps, enough for the difference to appear.
        doing: takes a line of progress.
    """

    def is_cured(changed: Config, what: str) -> bool:
        side = run_side(changed, num_steps, lambda stage: doing(f"{what}: {stage}"))
        return first_difference(side, truth) is None

    return [Trial(key, value, is_cured(changed, f"with {key}: {value}")) for key, value, changed in plainer(config)]


def suspects(side: Side, trials: Sequence[Trial]) -> dict[str, int]:
    """Returns the sizes that a wrong sum may have run over: those that removed the difference when they were not divided, or
    all."""
    cured = {trial.key.removeprefix("mesh.") for trial in trials if trial.cured}
    factors = {**side.axes, "micro-batches": side.num_micro_batches}
    names = [name for name in factors if name in cured or (name == "micro-batches" and "train.grad_accum_steps" in cured)]
    return {name: factors[name] for name in names or factors}


def _allowed(config: Config, changes: dict[str, Any]) -> list[Config]:
    """Returns the changed run, unless it breaks a rule."""
    try:
        return [config.changed(changes)]
    except ConfigError:
        return []


def plainer(config: Config) -> Iterator[tuple[str, Any, Config]]:
    """Yields the run with each axis in turn not split, each form plain, nothing in host memory, one micro-batch, nothing
    recomputed; only changes that make a difference and that all rules allow."""
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    settings: list[tuple[str, Any]] = [(join("mesh", axis), 1) for axis, size in sizes.items() if size > 1]
    settings += [("mesh.stages", ())]
    settings += [(join("parallel", field.name), getattr(PLAIN, field.name)) for field in dataclasses.fields(PLAIN)]
    settings += [("offload.activations", "none"), ("offload.optimizer", "none")]
    settings += [] if config.model.experts.counts_micro_batches else [("train.grad_accum_steps", 1)]
    settings += [("model.remat", "none")]
    for key, value in settings:
        section, _, name = key.partition(".")
        if getattr(getattr(config, section), name) == value:
            continue
        changed: dict[str, Any] = {"mesh": _changed_mesh(config.mesh, name, value)} if section == "mesh" else {key: value}
        if key == "offload.activations":
            changed |= {"offload.fraction": None, "offload.tiers.nvme_dir": None, "offload.tiers.nvme_bytes": None}
        yield from ((key, value, own) for own in _allowed(config, changed))


def _changed_mesh(mesh: MeshConfig, name: str, value: Any) -> MeshConfig:
    """Returns the mesh with another value of one setting, and as many devices as it then has."""
    stages = () if name == "pipeline" else mesh.stages
    changed = dataclasses.replace(mesh, **{"stages": stages, "num_cpu_devices": None, name: value})
    return dataclasses.replace(changed, num_cpu_devices=math.prod(getattr(changed, axis) for axis in AXES))
