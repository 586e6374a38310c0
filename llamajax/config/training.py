"""How a run goes: optimizer, steps, checkpoints, the sample at its end."""

from dataclasses import dataclass
from typing import Literal

from llamajax.config.model import DType
from llamajax.config.rules import require


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a schedule (Loshchilov & Hutter, arXiv:1711.05101)."""

    learning_rate: float
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After the warm-up: `constant`; `linear` or `cosine` decay to the end of the run; `wsd` stays at the peak and
    decays linearly over the last `decay_steps`."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    decay_steps: int | None = None
    """`wsd`: steps of the final decay."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of a decay, as a share of the peak."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, scaled by the learning rate."""
    no_weight_decay: tuple[str, ...] = ("norm", "bias")
    """Parameters whose path contains one of these names are not decayed."""
    grad_clip_norm: float | None = 1.0
    """Global L2 norm that gradients are clipped to; unset: no clipping."""
    moment_dtype: DType = "float32"
    """Type the moments are kept in between steps; `bfloat16` halves their memory and wants `b2` at most 0.98."""

    def __post_init__(self) -> None:
        require(
            (self.learning_rate > 0, f"learning_rate: {self.learning_rate} must be positive"),
            (self.warmup_steps >= 0, f"warmup_steps: {self.warmup_steps} must not be negative"),
            (
                self.schedule != "wsd" or self.decay_steps is not None,
                "schedule: wsd needs decay_steps; set it to the steps of the final decay",
            ),
            (
                self.schedule == "wsd" or self.decay_steps is None,
                f"decay_steps: {self.decay_steps} has no effect with schedule={self.schedule}; use wsd or remove it",
            ),
            (
                self.decay_steps is None or self.decay_steps > 0,
                f"decay_steps: {self.decay_steps} must be positive",
            ),
            (0 <= self.min_lr_ratio <= 1, f"min_lr_ratio: {self.min_lr_ratio} must be between 0 and 1"),
            (0 <= self.b1 < 1, f"b1: {self.b1} must be at least 0 and below 1"),
            (0 <= self.b2 < 1, f"b2: {self.b2} must be at least 0 and below 1"),
            (self.eps > 0, f"eps: {self.eps} must be positive"),
            (self.weight_decay >= 0, f"weight_decay: {self.weight_decay} must not be negative"),
            (
                self.grad_clip_norm is None or self.grad_clip_norm > 0,
                f"grad_clip_norm: {self.grad_clip_norm} must be positive, or unset for no clipping",
            ),
            (
                self.moment_dtype == "float32" or self.b2 <= 0.98,
                f"moment_dtype: bfloat16 loses b2={self.b2}: changes below 1/256 round away; use b2 <= 0.98 or float32",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The length and the arithmetic of the run."""

    num_steps: int
    """Optimizer steps."""
    global_batch_size: int
    """Sequences per optimizer step, over all devices."""
    grad_accum_steps: int = 1
    """Micro-batches that one optimizer step is summed over."""
    z_loss_weight: float = 0.0
    """Weight of the squared log-partition added to the loss (PaLM, arXiv:2204.02311, section 5)."""
    max_nonfinite_steps: int = 5
    """Steps with non-finite gradients in a row after which the run stops; each is skipped and counted."""
    eval_every: int | None = None
    """Steps between evaluations on held-out documents; unset: only after the last step."""
    eval_batches: int = 16
    """Batches per evaluation, the same ones every time; 0: no evaluation."""

    def __post_init__(self) -> None:
        require(
            (self.num_steps > 0, f"num_steps: {self.num_steps} must be positive"),
            (self.global_batch_size > 0, f"global_batch_size: {self.global_batch_size} must be positive"),
            (self.grad_accum_steps > 0, f"grad_accum_steps: {self.grad_accum_steps} must be positive"),
            (
                min(self.grad_accum_steps, self.global_batch_size) <= 0
                or self.global_batch_size % self.grad_accum_steps == 0,
                f"grad_accum_steps: {self.grad_accum_steps} must divide global_batch_size={self.global_batch_size}",
            ),
            (self.z_loss_weight >= 0, f"z_loss_weight: {self.z_loss_weight} must not be negative"),
            (self.max_nonfinite_steps > 0, f"max_nonfinite_steps: {self.max_nonfinite_steps} must be positive"),
            (self.eval_every is None or self.eval_every > 0, f"eval_every: {self.eval_every} must be positive or unset"),
            (self.eval_batches >= 0, f"eval_batches: {self.eval_batches} must not be negative"),
            (
                self.eval_every is None or self.eval_batches > 0,
                f"eval_every: {self.eval_every} needs eval_batches above 0",
            ),
        )

    @property
    def num_rows(self) -> int:
        """Sequences of all steps."""
        return self.num_steps * self.global_batch_size


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept of the run, and how often."""

    save_every: int | None = 1000
    """Steps between checkpoints; unset: only after the last step (and on SIGTERM). One that cannot be written is told at
    once and tried again after 1, 2, 4, ... steps; the last one for some seconds, then the run ends with exit code 74."""
    keep_last: int = 3
    """Newest checkpoints kept."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are kept for good."""
    async_save: bool = True
    """Write in the background while training goes on."""
    allow_config_change: bool = False
    """Resume although settings that change the result differ from those the run was started with."""

    def __post_init__(self) -> None:
        save_every, keep_every = self.save_every or 0, self.keep_every or 0
        require(
            (self.save_every is None or self.save_every > 0, f"save_every: {self.save_every} must be positive or unset"),
            (self.keep_last > 0, f"keep_last: {self.keep_last} must be positive"),
            (self.keep_every is None or self.keep_every > 0, f"keep_every: {self.keep_every} must be positive or unset"),
            (
                min(save_every, keep_every) <= 0 or keep_every % save_every == 0,
                f"keep_every: {keep_every} must be a multiple of save_every={save_every}",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """A text the model writes after the last step."""

    prompt: str | None = None
    """Text to continue; unset: no sample."""
    max_tokens: int = 64
    """Tokens to write."""
    temperature: float = 0.8
    """Randomness; 0 always takes the likeliest token."""

    def __post_init__(self) -> None:
        require(
            (self.max_tokens > 0, f"max_tokens: {self.max_tokens} must be positive"),
            (self.temperature >= 0, f"temperature: {self.temperature} must not be negative"),
        )
