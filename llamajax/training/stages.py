"""What the stages of a run compute: a program for every length of rows, chosen, compiled and told before the first step."""

import time
from collections.abc import Mapping

import jax

from llamajax.config.data import DataConfig
from llamajax.config.run import Config
from llamajax.kernels.choice import compute_capability
from llamajax.planning.scheduling import Compilation, compile_here, resolve_here
from llamajax.step.compile import lower, told
from llamajax.step.resolve import ResolvedRun, attention_kernel, float8_matmuls, resolve
from llamajax.step.state import abstract_state
from llamajax.watch import console
from llamajax.watch.console import say


def check_forms(config: Config) -> None:
    """Refuses a run whose forms these devices cannot compute, before anything is read or compiled for it.

    Raises:
        ConfigError: a form that is asked for cannot be computed by them.
    """
    mesh, capability = jax.sharding.get_mesh().shape, compute_capability()
    float8_matmuls(config.model, capability)
    for seq_len in {stage.seq_len for stage in config.data.all_stages}:
        attention_kernel(resolve(config.in_rows_of(seq_len), mesh), capability)


def resolve_stages(config: Config) -> dict[int, ResolvedRun]:
    """The run as it is resolved for each length of rows that it computes in; tells what was chosen and why, of later stages
    where it is another one. All processes call this together.

    Raises:
        ConfigError: a form that is asked for cannot be computed by these devices.
    """
    capability, told_before = compute_capability(), dict[str, str]()
    lengths = {stage.seq_len: config.in_rows_of(stage.seq_len) for stage in config.data.all_stages}
    runs = {seq_len: resolve_here(of_length, say) for seq_len, of_length in lengths.items()}
    for seq_len, run in runs.items():
        kernel, warning = attention_kernel(run, capability)
        matmuls = float8_matmuls(config.model, capability)
        lines = {**run.reasons, "attention": kernel} | matmuls | ({"warning": warning} if warning is not None else {})
        others = {setting: form for setting, form in lines.items() if told_before.get(setting) != form}
        if told_before and others:
            console.log(f"rows       of {seq_len:,} tokens:")
        for setting, form in others.items():
            console.log(f"{setting:10} {form}")
        told_before = lines
    return runs


def compile_steps(runs: Mapping[int, ResolvedRun]) -> dict[int, Compilation]:
    """The training step of each length of rows, and a line about each; all processes call this together.

    All of them now, so that what is wrong with a later stage does not show days later.

    Args:
        runs: of `resolve_stages`.

    Raises:
        ConfigError: see `compile_here`.
    """
    compilations = {}
    for seq_len, run in runs.items():
        started = time.monotonic()
        compilations[seq_len] = compilation = compile_here(run, lower(run, abstract_state(run.config)))
        of_length = f"rows of {seq_len:,} tokens: " if len(runs) > 1 else ""
        console.log(f"options    {of_length}{told(compilation.options, jax.devices()[0].device_kind)}")
        programs = jax.config.values["jax_compilation_cache_dir"]
        came = f", loaded from {programs}" if compilation.from_cache else ""
        memory = console.memory_summary(compilation.step)
        console.log(f"compile    {of_length}{time.monotonic() - started:.1f} s{came}; {memory}")
    return compilations


def described(data: DataConfig, number: int) -> str:
    """A stage in a line, counted from 0: `2 of 3 "long context": rows of 8,192 tokens, weights 0.5 data.sources[0]`."""
    stage = data.all_stages[number]
    name = f' "{stage.name}"' if stage.name else ""
    weights = ", ".join(f"{weight:g} data.sources[{index}]" for index, weight in enumerate(stage.weights) if weight)
    return f"{number + 1} of {1 + len(data.stages)}{name}: rows of {stage.seq_len:,} tokens, weights {weights}"
