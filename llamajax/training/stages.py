"""Compiles the programs of a run: before the first step one for each row length, with its choices reported, and others when
the phases of `train.global_batch_ramp` begin."""

import time
from collections.abc import Mapping

import jax

from llamajax.config.data import DataConfig
from llamajax.config.run import Config
from llamajax.config.training import TrainConfig
from llamajax.kernels.choice import compute_capability
from llamajax.parallel.stage_meshes import check_transfers, stage_meshes
from llamajax.planning.scheduling import Compilation, compile_here, compile_several_here, is_several, resolve_here
from llamajax.step.compile import Option, lower, told
from llamajax.step.grouped_step import GroupedStep
from llamajax.step.grouped_step import described as described_groups
from llamajax.step.resolve import ResolvedRun, attention_kernel, matmul_kernels, resolve
from llamajax.step.state import abstract_state
from llamajax.watch import console
from llamajax.watch.console import say


def check_forms(config: Config) -> None:
    """Rejects a run with forms that these devices cannot compute, before any data is read or program compiled.

    Raises:
        UserError: the devices cannot compute a requested form; see also `check_transfers`.
    """
    mesh, capability = jax.sharding.get_mesh().shape, compute_capability()
    if config.mesh.stages:
        check_transfers(stage_meshes(jax.sharding.get_mesh()))
    matmul_kernels(config.model, capability)
    for seq_len in {stage.seq_len for stage in config.data.all_stages}:
        attention_kernel(resolve(config.in_rows_of(seq_len), mesh), capability)


def resolve_stages(config: Config) -> dict[int, ResolvedRun]:
    """Resolves the run with its full batch for each of its row lengths and reports the choices and their reasons; for later
    stages, only changes.

    All processes call this together.

    Raises:
        ConfigError: these devices cannot compute a requested form.
    """
    capability, told_before = compute_capability(), dict[str, str]()
    full = config.train.global_batch_size
    lengths = {stage.seq_len: config.in_steps_of(stage.seq_len, full) for stage in config.data.all_stages}
    runs = {seq_len: resolve_here(of_length, say) for seq_len, of_length in lengths.items()}
    for seq_len, run in runs.items():
        kernel, warning = attention_kernel(run, capability)
        matmuls = matmul_kernels(config.model, capability)
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
        compilations[seq_len] = _compile(run, f"rows of {seq_len:,} tokens: " if len(runs) > 1 else "")
    return compilations


def _compile(run: ResolvedRun, which: str, known: Mapping[str, Option] | None = None) -> Compilation:
    """Compiles a step and logs a line about it, and one about its options unless they are the `known` ones."""
    started = time.monotonic()
    if is_several(run.config):
        compilation = compile_several_here(run, lambda line: console.log(f"note       {line}"))
    else:
        compilation = compile_here(run, lower(run, abstract_state(run.config)))
    if compilation.options != known:
        console.log(f"options    {which}{told(compilation.options, jax.devices()[0].device_kind)}")
    programs = jax.config.values["jax_compilation_cache_dir"]
    came = f", loaded from {programs}" if compilation.from_cache else ""
    memory = console.memory_summary(compilation.step)
    stages = f", {len(run.config.mesh.stages)} stages" if run.config.mesh.stages else ""
    when = "; at the end of a step" if is_several(run.config) else ";"
    console.log(f"compile    {which}{time.monotonic() - started:.1f} s{came}{stages}{when} {memory}")
    if isinstance(compilation.step, GroupedStep):
        console.log(f"groups     {which}{described_groups(compilation.step, run.config.offload.tiers.nvme_dir or '')}")
    return compilation


class Programs:
    """The compiled training steps of a run.

    Steps with the full batch are compiled first, because they need the most memory. Steps of a phase of
    `train.global_batch_ramp` differ in the number of micro-batches, and in forms that depend on it. One phase at a time has
    its program.
    """

    def __init__(self, config: Config, runs: Mapping[int, ResolvedRun]) -> None:
        """Compiles the steps with the full batch.

        Args:
            config: the run.
            runs: the result of `resolve_stages`.
        """
        self._config, self._runs, self.full = config, runs, compile_steps(runs)
        """Compiled steps with the full batch, by row length."""
        self._of_phase = dict[tuple[int, int], Compilation]()

    def find(self, seq_len: int, batch_size: int) -> Compilation | None:
        """Returns the step for such batches; None: it is not compiled."""
        is_full = batch_size == self._config.train.global_batch_size
        return self.full[seq_len] if is_full else self._of_phase.get((seq_len, batch_size))

    def compile(self, seq_len: int, batch_size: int) -> Compilation:
        """Compiles the step for smaller batches in place of the one for the phase before; all processes call this
        together."""
        full = self._runs[seq_len]
        config = self._config.in_steps_of(seq_len, batch_size).changed({"model.remat": full.config.model.remat})
        run = resolve_here(config)
        for setting, reason in run.reasons.items():
            if reason.partition(":")[0] != full.reasons.get(setting, reason).partition(":")[0]:
                console.log(f"{setting:10} {reason}")
        which = f"batches of {batch_size:,} sequences: "
        self._of_phase = {(seq_len, batch_size): _compile(run, which, self.full[seq_len].options)}
        return self._of_phase[seq_len, batch_size]


def described_phase(train: TrainConfig, number: int) -> str:
    """Describes a phase of the ramp, counted from 0, in a line: `3 of 60: 96 sequences in 3 micro-batches, to step 640`."""
    phases, (_, _, batch_size) = train.batch_phases, train.batch_phases[number]
    end = min([train.num_steps, *(phase.from_step for phase in phases[number + 1 :])])
    steps = batch_size // train.micro_batch_size
    several = f"{steps:,} micro-batch{'es' if steps > 1 else ''}"
    return f"{number + 1} of {len(phases)}: {batch_size:,} sequences in {several}, to step {end:,}"


def described(data: DataConfig, number: int) -> str:
    """Describes a stage, counted from 0, in a line: `2 of 3 "long context": rows of 8,192 tokens, weights 0.5
    data.sources[0]`."""
    stage = data.all_stages[number]
    name = f' "{stage.name}"' if stage.name else ""
    weights = ", ".join(f"{weight:g} data.sources[{index}]" for index, weight in enumerate(stage.weights) if weight)
    return f"{number + 1} of {1 + len(data.stages)}{name}: rows of {stage.seq_len:,} tokens, weights {weights}"
