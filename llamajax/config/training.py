"""Settings of optimizer, steps, checkpoints and the sample at the end."""

import bisect
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from llamajax.config.batch_ramp import BatchPhase, BatchRampConfig, batch_phases
from llamajax.config.experts import BIAS
from llamajax.config.model import DType
from llamajax.config.rules import (
    Bound,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFloatOrUnset,
    PositiveInt,
    PositiveIntOrUnset,
    Section,
    Share,
    ShareBelowOne,
)

ClipNorm = Annotated[float | None, Bound(lambda value: value > 0, "must be positive, or unset for no clipping")]


class Moments(NamedTuple):
    """Numbers of arrays, each with the shape of its weight, that an optimizer keeps of a weight from step to step."""

    of_layer_matrices: int
    of_others: int
    """The number for embedding, head, norms and biases."""

    def of_weight(self, *, is_matrix: bool) -> int:
        """Returns the number for a weight, which is a layer's matrix or another one."""
        return self.of_layer_matrices if is_matrix else self.of_others


MOMENTS = {"adamw": Moments(2, 2)}
"""Every optimizer, by its name in `optimizer.name`; `llamajax.step.optim.DIRECTIONS` has what each computes."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Optimizer, learning-rate schedule and decoupled weight decay."""

    name: str = "adamw"
    """Update rule. Weight decay and learning rate are applied to it: `adamw` (Loshchilov & Hutter, arXiv:1711.05101), or a
    rule that a Python program has added with `llamajax.step.optim.register`."""
    learning_rate: PositiveFloat
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up. `constant`; `linear` or `cosine` decay to the end of the run; `wsd` stays at
    the peak and decays linearly over the last `decay_steps`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from zero."""
    decay_steps: PositiveInt | None = None
    """`wsd`: number of steps of the final decay."""
    min_lr_ratio: Share = 0.1
    """Learning rate at the end of a decay, as a share of the peak. 0 is reached after the last step, so the last step still
    learns."""
    b1: ShareBelowOne = 0.9
    """Decay of the first moment."""
    b2: ShareBelowOne = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Number added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, scaled by the learning rate."""
    no_weight_decay: tuple[str, ...] = ("norm", "bias")
    """Parameters without weight decay: those with one of these names in their path."""
    grad_clip_norm: ClipNorm = 1.0
    """Global L2 norm to which gradients are clipped; unset: no clipping."""
    moment_dtype: DType = "float32"
    """Type in which moments are stored between steps. `bfloat16` halves their memory and needs `b2` of at most 0.98."""

    @property
    def moments(self) -> Moments:
        return MOMENTS[self.name]

    def broken_rules(self) -> Iterator[str]:
        if self.name not in MOMENTS:
            known = ", ".join(MOMENTS)
            yield f"name: {self.name} must be one of {known}; llamajax.step.optim.register adds others from Python"
        if self.schedule == "wsd" and self.decay_steps is None:
            yield "schedule: wsd needs decay_steps; set it to the steps of the final decay"
        if self.schedule != "wsd" and self.decay_steps is not None:
            yield f"decay_steps: {self.decay_steps} has no effect with schedule={self.schedule}; use wsd or remove it"
        if self.moment_dtype != "float32" and self.b2 > 0.98:
            yield f"moment_dtype: bfloat16 loses b2={self.b2}: changes below 1/256 round away; use b2 <= 0.98 or float32"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Length and arithmetic of the run."""

    num_steps: NonNegativeInt = 0
    """Number of optimizer steps; 0: as many as `num_epochs` takes."""
    num_epochs: PositiveFloatOrUnset = None
    """Passes through the data, such as 3 or 2.5, instead of a number of steps: the run ends with the first step after which
    it has read this many times the rows of all sources together. Each source has its share by `weight`; the line `epochs` of
    the run shows its own passes. The number of steps is known once the documents are packed. Unset: `num_steps` says."""
    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all devices."""
    grad_accum_steps: PositiveInt = 1
    """Micro-batches that one optimizer step sums. A run that resumes on another mesh than it started on chooses this number
    itself, so that a device holds at most as many rows as before; to choose it yourself, change this setting."""
    grad_accum_dtype: DType = "float32"
    """Type of that sum. `bfloat16` halves its memory, but loses the part of every micro-batch that is below 1/256 of the
    sum."""
    global_batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    """Smaller global batches at the start of the run. The size of a micro-batch stays the same, and their number grows."""
    z_loss_weight: NonNegativeFloat = 0.0
    """Weight of the squared log-partition added to the loss (PaLM, arXiv:2204.02311, section 5)."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained: those with one of these names in their path, such as `embedding` or `layers`. They
    have no gradients and no moments. A run keeps the choice that it started with."""
    max_nonfinite_steps: PositiveInt = 5
    """Steps in a row with non-finite gradients after which the run rolls back (`recovery.max_rollbacks`). Each such step is
    skipped and counted."""
    eval_every: PositiveIntOrUnset = None
    """Steps between evaluations on held-out documents; unset: only after the last step."""
    eval_batches: NonNegativeInt = 16
    """Micro-batches per evaluation, the same ones every time; 0: no evaluation. Each has `global_batch_size /
    grad_accum_steps` rows, so the held-out losses of two runs are comparable where both have as many rows."""

    def broken_rules(self) -> Iterator[str]:
        if not self.num_steps and self.num_epochs is None:
            yield "num_steps: 0 must be positive; set it, or num_epochs"
        elif self.num_steps > 0 and self.num_epochs is not None:
            both = f"{self.num_epochs:g} and num_steps={self.num_steps} both set the length of the run"
            yield f"num_epochs: {both}; keep one, and set num_steps to 0 if a base has it"
        accumulated, batch_size = self.grad_accum_steps, self.global_batch_size
        if min(accumulated, batch_size) > 0 and batch_size % accumulated:
            yield f"grad_accum_steps: {accumulated} must divide global_batch_size={batch_size}"
        if accumulated == 1 and self.grad_accum_dtype != "float32":
            yield f"grad_accum_dtype: {self.grad_accum_dtype} has no effect with grad_accum_steps=1; remove it"
        if self.eval_every is not None and self.eval_batches <= 0:
            yield f"eval_every: {self.eval_every} needs eval_batches above 0"
        start, increment = self.global_batch_ramp.start or 0, self.global_batch_ramp.increment or 0
        if min(start, increment, accumulated, batch_size) > 0 and batch_size % accumulated == 0:
            yield from self._broken_rules_of_ramp(start, increment)

    def _broken_rules_of_ramp(self, start: int, increment: int) -> Iterator[str]:
        full, rows = self.global_batch_size, self.micro_batch_size
        if start >= full:
            yield f"global_batch_ramp.start: {start} must be below global_batch_size={full}; lower it, or remove the ramp"
        elif (full - start) % increment:
            growth = f"the growth from start={start} to global_batch_size={full}"
            yield f"global_batch_ramp.increment: {increment} must divide {growth}, {full - start}; choose a divisor"
        elif self.smallest_batch % rows:
            remedy = f"make grad_accum_steps a multiple of {full // self.smallest_batch}"
            sizes = f"start={start} and increment={increment} must be multiples of the {rows} sequences of a micro-batch"
            yield f"global_batch_ramp.start: {sizes} (global_batch_size / grad_accum_steps); {remedy}"

    def is_frozen(self, name: str) -> bool:
        """Whether the parameter of this name is not trained."""
        return name == BIAS or any(part in name for part in self.frozen)

    @property
    def micro_batch_size(self) -> int:
        """Sequences per micro-batch, over all devices."""
        return self.global_batch_size // self.grad_accum_steps

    @property
    def batch_phases(self) -> tuple[BatchPhase, ...]:
        """Phases of `global_batch_ramp` in order, the full batch last; a single one without a ramp."""
        return batch_phases(self.global_batch_ramp, self.global_batch_size)

    @property
    def smallest_batch(self) -> int:
        """Greatest common divisor of all batch sizes; micro-batches must divide it."""
        ramp = self.global_batch_ramp
        return math.gcd(self.global_batch_size, ramp.start or 0, ramp.increment or 0)

    def phase_at(self, step: int) -> int:
        """Returns the index in `batch_phases` of the step after `step` finished steps."""
        return bisect.bisect_right(self.batch_phases, step, key=attrgetter("from_step")) - 1

    def batch_size_at(self, step: int) -> int:
        """Returns the sequences of the step after `step` finished steps."""
        return self.batch_phases[self.phase_at(step)].batch_size

    def rows_after(self, step: int) -> int:
        """Returns the sequences of the first `step` steps."""
        phase = self.batch_phases[self.phase_at(step)]
        return phase.first_row + (step - phase.from_step) * phase.batch_size

    def in_batches_of(self, batch_size: int) -> "TrainConfig":
        """Returns the run with this batch size in all steps, in micro-batches of the same size."""
        steps = batch_size // self.micro_batch_size
        dtype = self.grad_accum_dtype if steps > 1 else "float32"  # the only one allowed without accumulation
        return replace(
            self, global_batch_size=batch_size, grad_accum_steps=steps, grad_accum_dtype=dtype,
            global_batch_ramp=BatchRampConfig(),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Checkpoints: how often they are saved, where, how many are kept, and what a resumed run may change."""

    save_every: PositiveIntOrUnset = 1000
    """Steps between checkpoints; unset: only after the last step, and on SIGTERM. A checkpoint that cannot be written is
    reported at once and tried again after 1, 2, 4, ... steps. The last one is tried again for some seconds, then the run
    ends with exit code 74."""
    keep_last: PositiveInt = 3
    """Number of newest checkpoints to keep."""
    keep_every: PositiveIntOrUnset = None
    """Checkpoints at multiples of this step are kept permanently; unset: none."""
    async_save: bool = True
    """Write in the background while training continues."""
    local_dir: str | None = None
    """Fast local disk of each host for more frequent saves, such as `/local/scratch`. Every process saves what its devices
    hold, in a private directory of the run. A start resumes from the newest step that is complete for all processes, there
    or in `run_dir`, whatever hosts have lost their disks. Unset: `run_dir` alone."""
    local_every: PositiveIntOrUnset = None
    """Steps between saves in `local_dir`, which keeps the newest three. A save that fails is reported and tried again."""
    allow_changes: tuple[str, ...] = ()
    """Settings that a resumed run may change although they change the result: keys or sections. [train.num_steps] continues
    a finished run for more steps; [data] allows other documents. All other settings that change the result must be as they
    were when the run started."""

    def local_name(self, run_dir: Path, identity: str) -> str:
        """Returns the name of a run's directory in `local_dir`.

        Args:
            run_dir: the run's own directory, absolute.
            identity: contents of the run's `checkpoints/.identity`; earlier runs in the same place have others.
        """
        return f"{run_dir.name}-{hashlib.sha256(f'{run_dir} {identity}'.encode()).hexdigest()[:16]}"

    def broken_rules(self) -> Iterator[str]:
        save_every, keep_every = self.save_every or 0, self.keep_every or 0
        if min(save_every, keep_every) > 0 and keep_every % save_every:
            yield f"keep_every: {keep_every} must be a multiple of save_every={save_every}"
        if self.local_dir is not None and self.local_every is None:
            yield f"local_dir: {self.local_dir} needs local_every; set it to steps below save_every, or remove this"
        if self.local_every is not None and self.local_dir is None:
            yield f"local_every: {self.local_every} needs local_dir; name a fast disk of each host, or remove this"
        if min(save_every, self.local_every or 0) > 0 and (self.local_every or 0) >= save_every:
            yield f"local_every: {self.local_every} must be below save_every={save_every}; save more often locally"


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Section):
    """Text that the model writes after the last step."""

    prompt: str | None = None
    """Text to continue; unset: no sample."""
    max_tokens: PositiveInt = 64
    """Number of tokens to write."""
    temperature: NonNegativeFloat = 0.8
    """Randomness of the draws; 0 always takes the likeliest token."""
