"""Compiles the programs of a run's stages before the first step: one for each row length, with its choices reported."""

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
    """Rejects a run with forms that these devices cannot compute, before any data is read or program compiled.

    Raises:
        ConfigError: the devices cannot compute a requested form.
    """
    mesh, capability = jax.sharding.get_mesh().shape, compute_capability()
    float8_matmuls(config.model, capability)
    for seq_len in {stage.seq_len for stage in config.data.all_stages}:
        attention_kernel(resolve(config.in_rows_of(seq_len), mesh), capability)


def resolve_stages(config: Config) -> dict[int, ResolvedRun]:
    """Resolves the run for each of its row lengths and reports the choices and their reasons; for later stages, only
    changes.

    All processes call this together.

    Raises:
        ConfigError: these devices cannot compute a requested form.
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
    """Compiles the training step for each row length and logs a line about each. All processes call this together.

    All of them are compiled now, so that an error in a later stage does not appear days later.

    Args:
        runs: the result of `resolve_stages`.

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
    """Describes a stage, counted from 0, in a line: `2 of 3 "long context": rows of 8,192 tokens, weights 0.5
    data.sources[0]`."""
    stage = data.all_stages[number]
    name = f' "{stage.name}"' if stage.name else ""
    weights = ", ".join(f"{weight:g} data.sources[{index}]" for index, weight in enumerate(stage.weights) if weight)
    return f"{number + 1} of {1 + len(data.stages)}{name}: rows of {stage.seq_len:,} tokens, weights {weights}"
