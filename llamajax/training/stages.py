"""What the stages of a run compute: a program for every length of rows, chosen, compiled and told before the first step."""

import time

import jax

from llamajax.config.data import DataConfig
from llamajax.config.run import Config
from llamajax.planning.scheduling import Compilation, compile_here, fastest_remat
from llamajax.step.compile import lower, told
from llamajax.step.forms import attention_kernel, compute_capability, float8_matmuls, remat_policy, with_forms
from llamajax.step.state import TrainState
from llamajax.watch import console
from llamajax.watch.console import say


def check_forms(config: Config) -> None:
    """Refuses a run whose forms these devices cannot compute, before anything is read or compiled for it.

    Raises:
        ConfigError: a form that is asked for cannot be computed by them.
    """
    mesh, capability = jax.sharding.get_mesh().shape, compute_capability()
    float8_matmuls(config, capability)
    for seq_len in {stage.seq_len for stage in config.data.all_stages}:
        of_length = config.in_rows_of(seq_len)
        remat, _ = remat_policy(of_length, mesh)  # which no kernel depends on
        in_forms, _ = with_forms(of_length.changed({"model.remat": remat}), mesh)
        attention_kernel(in_forms, mesh, capability)


def choose_forms(config: Config, abstract: TrainState) -> dict[int, Config]:
    """The run with every form chosen, by the length of rows that it computes in; tells which and why, of later stages where
    it is another one. All processes call this together.

    Args:
        config: the run.
        abstract: its `abstract_state`.

    Raises:
        ConfigError: a form that is asked for cannot be computed by these devices.
    """
    mesh, capability = jax.sharding.get_mesh().shape, compute_capability()
    lengths = {stage.seq_len: config.in_rows_of(stage.seq_len) for stage in config.data.all_stages}
    chosen: dict[int, Config] = {}
    told_before: dict[str, str] = {}
    for seq_len, of_length in lengths.items():
        remat, reason = fastest_remat(of_length, abstract, say)
        chosen[seq_len], forms = with_forms(of_length.changed({"model.remat": remat}), mesh)
        forms |= {"remat": f"{remat}: {reason}"} if config.model.remat == "auto" else {}
        kernel, warning = attention_kernel(chosen[seq_len], mesh, capability)
        matmuls = float8_matmuls(config, capability)
        lines = forms | {"attention": kernel} | matmuls | ({"warning": warning} if warning is not None else {})
        others = {setting: form for setting, form in lines.items() if told_before.get(setting) != form}
        if told_before and others:
            console.log(f"rows       of {seq_len:,} tokens:")
        for setting, form in others.items():
            console.log(f"{setting:10} {form}")
        told_before = lines
    return chosen


def compile_steps(chosen: dict[int, Config], abstract: TrainState) -> dict[int, Compilation]:
    """The training step of each length of rows, and a line about each; all processes call this together.

    All of them now, so that what is wrong with a later stage does not show days later.

    Args:
        chosen: of `choose_forms`.
        abstract: the run's `abstract_state`.

    Raises:
        ConfigError: see `compile_here`.
    """
    compilations = {}
    for seq_len, config in chosen.items():
        started = time.monotonic()
        compilations[seq_len] = compilation = compile_here(config, lower(config, abstract))
        of_length = f"rows of {seq_len:,} tokens: " if len(chosen) > 1 else ""
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
