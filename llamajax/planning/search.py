"""Sweeps: the same plan for several values of one setting."""

from collections.abc import Callable
from dataclasses import dataclass

from llamajax.config.file import read_value
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.estimates.formulas import mesh_sizes
from llamajax.planning.fitting import Changes
from llamajax.planning.plan import Plan, by_latencies, make_plan, plan_problems, replayed

_PRICES = ("hardware.price_per_gpu_hour", "hardware.token_budget")
"""Settings that change neither program nor schedule."""
_COSTS = ("hardware.gpu_bandwidth", "hardware.node_bandwidth", "hardware.calibration", "hardware.expert_imbalance")
"""Settings that the compiler does not see, but that change the cost model's latencies."""
_CLUSTER_SIZE = ("hardware.nodes", "hardware.gpus_per_node")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One setting, and the configurations with several values of it."""

    key: str
    values: tuple[str, ...]
    """Values as written."""
    configs: tuple[Config, ...]


def read_sweep(text: str, config: Config) -> Sweep:
    """Returns the checked configurations for `hardware.nodes=4,8,16`, one per value of the setting in `config`.

    More or fewer devices scale `mesh.fsdp` and `train.global_batch_size`, so that a device's work stays the same (weak
    scaling).

    Raises:
        ConfigError: no setting has this name, or a value breaks a rule or leaves nothing to plan.
    """
    key, equals, values_text = text.partition("=")
    values = tuple(value.strip() for value in values_text.split(","))
    if not equals or not all(values):
        raise ConfigError(f"--sweep: {text!r} is not KEY=VALUE,VALUE; for example hardware.nodes=4,8,16")
    if "." not in key:
        raise ConfigError(f"--sweep: {key!r} is no setting of a section; for example hardware.nodes")
    sweep = Sweep(key=key, values=values, configs=tuple(_with_value(config, key, value) for value in values))
    problems = [
        f"--sweep: {key}={value}: {problem.removeprefix(f'{key}: ')}"
        for value, changed in zip(sweep.values, sweep.configs, strict=True)
        for problem in plan_problems(changed)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return sweep


def run_sweep(sweep: Sweep, base: Plan, *, doing: Callable[[str], None] = lambda what: None) -> tuple[Plan, ...]:
    """Returns a plan for each value. Where only bandwidths, constants or prices differ from `base`, it replays the compiled
    step.

    Raises:
        CompilerMissingError: XLA's compiler for GPUs is not installed.
    """
    plans = []
    for value, config in zip(sweep.values, sweep.configs, strict=True):
        if config == base.config:
            plans.append(base)
        elif sweep.key in (*_PRICES, *_COSTS):
            doing(f"{sweep.key}={value}")
            plans.append(_replay(base, config, new_latencies=sweep.key in _COSTS))
        else:
            where = f"{sweep.key}={value}: "
            plans.append(make_plan(config, suggest=False, doing=lambda what, where=where: doing(where + what)))
    return tuple(plans)


def _replay(base: Plan, config: Config, *, new_latencies: bool) -> Plan:
    """Replays `base` on the cluster of `config`; if the latencies change, the schedule with latencies is compiled again."""
    config = config.changed({"model.remat": base.config.model.remat})
    guessed, informed = replayed(base.guessed.step, config), base.informed
    if informed is not None:
        anew = new_latencies and config.xla.latency_profile == "auto"
        informed = by_latencies(guessed, config) if anew else replayed(informed.step, config)
    return Plan(config=config, guessed=guessed, informed=informed)


def _with_value(config: Config, key: str, text: str) -> Config:
    try:
        value = read_value(config, key, text)
        scaled = _scaled(config, key, value) if key in _CLUSTER_SIZE and value > 0 else {}
        return config.changed({key: value} | scaled)
    except ConfigError as error:
        rules = [line.removeprefix("--").removeprefix(f"{key}: ") for line in str(error).splitlines()]
        raise ConfigError("\n".join(f"--sweep: {key}={text}: {rule}" for rule in rules)) from error


def _scaled(config: Config, key: str, value: int) -> Changes:
    """Returns the changes to other settings that scale with the size of the cluster."""
    old = config.hardware.num_devices
    new = old // getattr(config.hardware, key.partition(".")[2]) * value
    if new == old:
        return {}
    # The same number of tokens for all, so that their days and prices are comparable.
    changes: Changes = {"hardware.token_budget": config.planned_tokens}
    sizes = {"mesh.fsdp": mesh_sizes(config)["fsdp"], "train.global_batch_size": config.train.global_batch_size}
    for scaled_key, size in sizes.items():
        if size * new % old:
            raise ConfigError(f"{scaled_key}={size} times {new} / {old} devices is not a whole number; choose other values")
        changes[scaled_key] = size * new // old
    return changes
