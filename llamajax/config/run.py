"""Every setting of a run, as frozen dataclasses; the docstring of a field is its `--help`.

A section checks itself when it is built; `Config.problems` checks rules between sections. Derived numbers are properties
and are never written back. This module imports no jax, so that `--help`, launchers and tools start fast.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llamajax.config.adapters import AdaptersConfig, adapter_problems
from llamajax.config.data import DataConfig
from llamajax.config.expert_rules import expert_problems
from llamajax.config.hub import Weights
from llamajax.config.keys import remedy_for, with_values
from llamajax.config.length import length_problems
from llamajax.config.machine import HardwareConfig, XlaConfig
from llamajax.config.model import InitChange, ModelConfig
from llamajax.config.named_files import path_problems
from llamajax.config.objective import ObjectiveConfig, objective_problems
from llamajax.config.offload import OffloadConfig, offload_problems
from llamajax.config.parallel import (
    PLAIN,
    DistributedConfig,
    MeshConfig,
    ParallelConfig,
    SequenceForm,
    axes_of,
    num_parts,
    splits_residual,
)
from llamajax.config.quantized import undivided_blocks
from llamajax.config.recovery import RecoveryConfig, WatchdogConfig
from llamajax.config.rules import Seed, Settings
from llamajax.config.stages import pipeline_problems
from llamajax.config.training import CheckpointConfig, OptimizerConfig, SampleConfig, TrainConfig
from llamajax.config.watch import MetricsConfig, ProfileConfig
from llamajax.errors import ConfigError, show
from llamajax.units import format_count

UNKNOWN_TOKENS = 1e9
"""Number of tokens for which plans report time and price where `train.num_epochs` leaves the run's own number open."""


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """One complete run."""

    run_dir: str = ""
    """Folder for all that the run writes; the same command resumes what is there. Left out of NAME.yaml: runs/NAME."""
    model: ModelConfig
    """Network."""
    data: DataConfig
    """Documents, and how they become training rows."""
    train: TrainConfig
    """Length and batches."""
    optimizer: OptimizerConfig
    """Optimizer and learning rate."""
    init_from: Weights | None = None
    """Weights to start from: a run's directory, one of its checkpoints, a Hugging Face or PEFT directory, or
    hf://ORG/NAME[@REVISION] on the Hugging Face Hub; the run keeps its commit. The weights bring their tokenizer, unless
    `data.tokenizer.path` names one, and all settings of the model left out. The optimizer starts fresh. Unset: random."""
    adapters: AdaptersConfig = field(default_factory=AdaptersConfig)
    """Low-rank adapters that are trained in place of the weights of `init_from`."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Loss that the run minimizes."""
    init_changes: tuple[InitChange, ...] = ()
    """Settings of the model that this run changes deliberately, such as [rope_theta, rope_scaling] for longer contexts. In
    all other settings that change what the model computes, weights and run must agree."""
    seed: Seed = 0
    """Seed of the initial weights, the data order and the sample."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Layout of the devices."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How devices share the work."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """Data that waits in host memory."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Several processes in one run."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """Rollbacks after bad steps."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    """Time limits of phases."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Logs and metrics."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Device trace."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """Text written at the end."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    """Machines of a plan."""
    xla: XlaConfig = field(default_factory=XlaConfig)
    """Options of the compiler."""

    def changed(self, changes: Mapping[str, Any]) -> "Config":
        """Returns this run with other settings, by dotted key: `config.changed({"mesh.fsdp": 8, "train.num_steps": 100})`.

        All values are set at once, so rules see only the result; a value may be a whole section.

        Raises:
            ConfigError: no setting has such a key, or the result breaks a rule: one `key: rule; remedy` line each.
        """
        config = with_values(self, changes, Config)
        if problems := config.problems():
            raise ConfigError("\n".join(problems))
        return config

    def is_frozen(self, name: str) -> bool:
        """Whether the parameter of this name is not trained."""
        return self.adapters.is_frozen(name) if self.adapters.enabled else self.train.is_frozen(name)

    @property
    def stored_model(self) -> ModelConfig:
        """Returns the model with the type that its weights, without adapters, are stored in."""
        return replace(self.model, param_dtype=self.adapters.base_dtype) if self.adapters.enabled else self.model

    def broken_rules(self) -> Iterator[str]:
        """Checks rules between sections, and the placement over emulated or planned devices."""
        train, optimizer, data, model = self.train, self.optimizer, self.data, self.model
        if not self.run_dir:
            yield "run_dir: must not be empty; name a directory"
        yield from adapter_problems(self.adapters, model, train, self.init_from, moves_state=self.offload.state_share > 0)
        of_run = model, self.adapters, data, train, self.mesh, self.offload, self.sample
        yield from objective_problems(self.objective, *of_run, has_model=self.init_from is not None)
        if self.init_changes and self.init_from is None:
            yield "init_changes: has no effect without init_from; name the weights there, or remove this"
        for name, seq_len in data.row_lengths.items():
            if seq_len > (most := model.max_seq_len):
                yield f"data.{name}: {seq_len} is above model.max_seq_len={most}; shorten the rows or raise it"
        yield from length_problems(train, data, optimizer, self.profile)
        for key in self.checkpoint.allow_changes:
            if remedy := remedy_for(Config, key):
                yield f"checkpoint.allow_changes: unknown key '{show(key)}'; {remedy}"
        yield from data.problems_without_model() if self.init_from is None else ()
        yield from offload_problems(self.offload, model, self.mesh, self.parallel)
        wait_s, start_s = self.distributed.initialization_timeout_s, self.watchdog.start_s
        if self.distributed.enabled and self.watchdog.enabled and start_s <= wait_s:
            rule = f"must be above distributed.initialization_timeout_s={wait_s}, the time that processes have to join"
            yield f"watchdog.start_s: {start_s} {rule}; raise it"
        if train.eval_every is not None and data.held_out_fraction <= 0:
            yield "train.eval_every: data.held_out_fraction=0 leaves nothing to evaluate on; raise it or set null here"
        if self.mesh.num_cpu_devices is not None and not self.distributed.enabled:
            yield from self.placement_problems(self.mesh.num_cpu_devices)
        elif self.mesh.num_cpu_devices is None and self.hardware.gpu != "none":
            where = f"hardware: {self.hardware.nodes} nodes x {self.hardware.gpus_per_node} GPUs; gpu: none leaves it out"
            yield from (f"{problem} ({where})" for problem in self.placement_problems(self.hardware.num_devices))

    def placement_problems(self, num_devices: int) -> list[str]:
        """Returns one `key: rule; remedy` line for each part of the run that does not divide over `num_devices` devices."""
        try:
            axes = self.mesh.axis_sizes(num_devices)
        except ConfigError as error:
            return [str(error)]
        across = self.hardware.domain_problems(axes["pipeline"]) if self.mesh.num_cpu_devices is None else ()
        return [*self.undivided(axes), *across]

    def undivided(self, axes: Mapping[str, int]) -> list[str]:
        """Returns one `key: rule; remedy` line for each part of model and batch that such mesh axes do not divide."""
        train = self.train
        of_batch = {axis: axes[axis] for axis in axes_of("micro_batch")}
        batch_shards, over = math.prod(of_batch.values()), " x ".join(f"{axis}({size})" for axis, size in of_batch.items())
        nearest = max(1, round(train.micro_batch_size / batch_shards)) * batch_shards * train.grad_accum_steps
        problems, lengths = self.model.undivided(axes), self.data.row_lengths.items()
        problems += [
            f"data.{name}: {seq_len} must be divisible by mesh.{axis}={axes[axis]}"
            for name, seq_len in lengths
            for axis in axes_of("seq")
            if seq_len % axes[axis]
        ]
        for name, _ in lengths:
            problems += [p for p in self.sequence_problems(self.parallel.sequence, axes, name) if p not in problems]
        shares = num_parts("residual_seq", axes)
        if self.parallel.tensor == "ring" and axes["tensor"] > 1:
            problems += [
                f"data.{name}: {seq_len} must be divisible by mesh.sequence x mesh.tensor={shares} for"
                f" parallel.tensor: ring; make it {max(1, round(seq_len / shares)) * shares}, or choose collective"
                for name, seq_len in lengths
                if not splits_residual(seq_len, axes)
            ]
        if train.micro_batch_size % batch_shards:
            problems.append(
                f"train.global_batch_size: {train.global_batch_size} / grad_accum_steps({train.grad_accum_steps}) = "
                f"{train.micro_batch_size} sequences cannot be split over {over} = {batch_shards} devices;"
                f" the nearest batch that can is {nearest}"
            )
        if (form := self.adapters.quantized_form) is not None:
            problems += undivided_blocks(self.model, form, axes)
        of_experts = expert_problems(self.model, self.adapters, self.parallel, self.rows_per_device(axes), axes)
        return [*problems, *of_experts, *pipeline_problems(self.model, self.parallel, train, axes, self.mesh.stages)]

    def sequence_problems(self, form: SequenceForm, axes: Mapping[str, int], name: str = "seq_len") -> list[str]:
        """Returns one `key: rule; remedy` line for each reason why rows that axes of these sizes split cannot take `form`.

        Args:
            form: the form of attention over split rows.
            axes: sizes of the mesh axes.
            name: key of the rows' length in `data.row_lengths`.
        """
        parts, tensor, seq_len = num_parts("seq", axes), num_parts("kv_heads", axes), self.data.row_lengths[name]
        heads, num_heads = self.model.num_heads // tensor, self.model.num_heads
        if form == "ring" and parts > 1 and seq_len % parts == 0 and seq_len % (2 * parts):
            nearest = max(1, round(seq_len / 2 / parts)) * 2 * parts
            return [
                f"data.{name}: {seq_len} must be divisible by 2 * mesh.sequence={2 * parts} for parallel.sequence: ring;"
                f" make it {nearest}, or choose gather"
            ]
        if form == "ulysses" and heads % parts:
            return [
                f"parallel.sequence: ulysses cannot divide num_heads({num_heads}) / mesh.tensor({tensor}) = {heads} heads"
                f" over mesh.sequence={parts}; choose ring or gather, or an axis that divides them"
            ]
        return []

    def given_form(self, setting: str) -> tuple[Any, str] | None:
        """Returns the form that a setting of `parallel` names, or that emulated devices take, and the reason; None: still
        open."""
        if (form := getattr(self.parallel, setting)) != "auto":
            return form, f"parallel.{setting} says so"
        return None if self.mesh.num_cpu_devices is None else (getattr(PLAIN, setting), "emulated devices hide nothing")

    def rows_per_device(self, axes: Mapping[str, int]) -> int:
        """Returns the rows of a micro-batch that a device computes, alone or together with the devices that share them."""
        return self.train.global_batch_size // self.train.grad_accum_steps // num_parts("micro_batch", axes)

    def tokens_after(self, step: int) -> int:
        """Returns the number of positions in all rows of the first `step` steps, each in rows of its stage's length."""
        stages = self.data.all_stages
        ends = [*(stage.from_step for stage in stages[1:]), step]
        after = self.train.rows_after
        return sum(
            (after(max(stage.from_step, min(step, end))) - after(stage.from_step)) * stage.seq_len
            for stage, end in zip(stages, ends, strict=True)
        )

    @property
    def planned_tokens(self) -> float:
        """Number of tokens for which a plan reports time and price."""
        return self.hardware.token_budget or float(self.tokens_after(self.train.num_steps) or UNKNOWN_TOKENS)

    def in_rows_of(self, seq_len: int) -> "Config":
        """Returns the run as it computes in a stage of such rows; `data.stages` remains, but means nothing."""
        return self.changed({"data.seq_len": seq_len})

    def in_steps_of(self, seq_len: int, batch_size: int) -> "Config":
        """Returns the run as it computes such steps, alike from first to last."""
        return self.changed({"data.seq_len": seq_len, "train": self.train.in_batches_of(batch_size)})

    def in_largest_steps(self) -> "Config":
        """Returns the run without stages and ramp, with the full batch of its longest rows in all steps, which take the most
        time per step, for as many tokens."""
        data, train = self.data, self.train.in_batches_of(self.train.global_batch_size)
        if data.stages:
            data = data.without_stages(max(data.row_lengths.values()))
        if (data, train) == (self.data, self.train):
            return self
        return self.changed({"data": data, "train": train, "hardware.token_budget": self.planned_tokens})

    def batch_arithmetic(self, num_devices: int) -> str:
        """Returns the arithmetic of the batch in one line, for people to check."""
        axes, train, seq_len = self.mesh.axis_sizes(num_devices), self.train, self.data.seq_len
        return (
            f"global batch {train.global_batch_size} sequences x {seq_len} tokens ="
            f" {train.global_batch_size * seq_len:,} tokens = {self.rows_per_device(axes)} per device x"
            f" {num_parts('micro_batch', axes)} data-parallel devices x {train.grad_accum_steps} accumulation steps"
        )

    def ramp_arithmetic(self) -> str:
        """Returns the ramp of the batch in one line, for people to check; empty without a ramp."""
        phases, ramp = self.train.batch_phases, self.train.global_batch_ramp
        if len(phases) == 1:
            return ""
        full = phases[-1]
        return (
            f"{ramp.start:,} to {full.batch_size:,} sequences by {ramp.increment:,} in {len(phases)} phases; full after"
            f" {full.from_step:,}{f' of {self.train.num_steps:,}' if self.train.num_steps else ''} steps,"
            f" {full.first_row:,} sequences and {format_count(self.tokens_after(full.from_step))} tokens"
        )

    def file_problems(self) -> list[str]:
        """Returns one `key: rule; remedy` line for everything that the configuration names and this machine does not
        have."""
        missing = {"metrics": self.metrics.missing_packages(), "data.cleaning": self.data.cleaning.missing_packages()}
        folders = {"run_dir": self.run_dir, "data.cache_dir": self.data.cache_dir}
        told = {"checkpoint.local_dir": self.checkpoint.local_dir, "offload.tiers.nvme_dir": self.offload.tiers.nvme_dir}
        told["xla.compilation_cache"] = None if self.xla.compilation_cache == "auto" else self.xla.compilation_cache
        folders |= {key: path for key, path in told.items() if path is not None}
        patterns = {f"data.{key}": pattern for key, pattern in self.data.local_patterns.items()}
        of_datasets = tuple(f"data.sources.{i}." for i, source in enumerate(self.data.sources) if source.kind == "arrow")
        named = {
            "data.tokenizer.path": self.data.tokenizer.path,
            "data.chat_template": self.data.chat_template,
            "data.cleaning.filters.bad_words": self.data.cleaning.filters.bad_words,
            "hardware.calibration": self.hardware.calibration,
        }
        files = {key: path for key, path in named.items() if path is not None}
        problems = [f"{section}.{problem}" for section, several in missing.items() for problem in several]
        return problems + path_problems(folders, patterns, files, of_datasets)
