"""What-if: the same plan for several values of one setting."""

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass

from llamajax.config.file import config_to_dict, read_config
from llamajax.config.run import Config
from llamajax.config.yaml_text import Problems
from llamajax.errors import ConfigError
from llamajax.planning.plan import Plan, by_latencies, make_plan, mesh_sizes, plan_problems, replayed

_PRICES = ("hardware.price_per_gpu_hour", "hardware.token_budget")
"""Settings that change neither program nor schedule."""
_BANDWIDTHS = ("hardware.gpu_bandwidth", "hardware.node_bandwidth")
"""Settings that the compiler is not told, but that the cost model's latencies depend on."""
_CLUSTER_SIZE = ("hardware.nodes", "hardware.gpus_per_node")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One setting and the configurations that several values of it give."""

    key: str
    values: tuple[str, ...]
    """As written."""
    configs: tuple[Config, ...]


def read_sweep(text: str, config: Config) -> Sweep:
    """`hardware.nodes=4,8,16`: the configurations that these values make of `config`, all checked.

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
    """A plan for each value. Where only bandwidths or prices differ from `base`, what is compiled is replayed.

    Raises:
        CompilerMissingError: XLA's compiler for GPUs is not installed.
    """
    plans = []
    for value, config in zip(sweep.values, sweep.configs, strict=True):
        if config == base.config:
            plans.append(base)
        elif sweep.key in (*_PRICES, *_BANDWIDTHS):
            doing(f"{sweep.key}={value}")
            plans.append(_replay(base, config, new_latencies=sweep.key in _BANDWIDTHS))
        else:
            told = functools.partial(_tell, doing, f"{sweep.key}={value}")
            plans.append(make_plan(config, suggest=False, doing=told))
    return tuple(plans)


def _tell(doing: Callable[[str], None], where: str, what: str) -> None:
    doing(f"{where}: {what}")


def _replay(base: Plan, config: Config, *, new_latencies: bool) -> Plan:
    """`base` on the cluster of `config`; the schedule by latencies is compiled anew where these are others."""
    blind, profiled = replayed(base.without_profile.step, config), base.with_profile
    if profiled is not None:
        anew = new_latencies and config.xla.latency_profile == "auto"
        profiled = by_latencies(blind, config) if anew else replayed(profiled.step, config)
    return Plan(config=config, without_profile=blind, with_profile=profiled)


def _with_value(config: Config, key: str, value: str) -> Config:
    overrides: list[tuple[str, str | None]] = [(key, value)]
    if key in _CLUSTER_SIZE and value.isdecimal() and int(value) > 0:
        name = key.partition(".")[2]
        hardware = dataclasses.replace(config.hardware, **{name: int(value)})
        old, new = config.hardware.num_devices, hardware.num_devices
        if new == old:
            return config
        # The same tokens for all, so that their days and prices compare.
        train = config.train
        budget = config.hardware.token_budget or train.num_steps * train.global_batch_size * config.data.seq_len
        overrides.append(("hardware.token_budget", repr(budget)))
        scaled = {"mesh.fsdp": mesh_sizes(config)["fsdp"], "train.global_batch_size": config.train.global_batch_size}
        for scaled_key, size in scaled.items():
            if size * new % old:
                raise ConfigError(
                    f"--sweep: {key}={value}: {scaled_key}={size} times {new} / {old} devices is no whole number;"
                    " choose other values"
                )
            overrides.append((scaled_key, str(size * new // old)))
    # Through the reader of files and command lines, so that the value is understood and checked as there.
    sections: list[tuple[str, str | None]] = [
        (name, json.dumps(value) if isinstance(value, dict) else str(value))
        for name, value in config_to_dict(config).items()
        if value is not None
    ]
    try:
        return read_config(Config, None, sections + overrides, Problems(), check=lambda config: [])
    except ConfigError as error:
        # Each line without its place, which is in none of the user's files.
        rules = [line.partition(": ")[2] for line in str(error).splitlines()]
        raise ConfigError("\n".join(f"--sweep: {key}={value}: {rule}" for rule in rules)) from error
