"""What is measured and traced while a run goes."""

from dataclasses import dataclass

from llamajax.config.rules import require


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What is shown and where; metrics.jsonl in the run directory has every step. While its disk is full, up to 100,000
    records wait in memory."""

    log_every: int = 10
    """Steps between lines on a terminal that is not interactive; the progress bar follows every step."""
    tensorboard: bool = False
    """Also write TensorBoard event files to the run directory."""
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`)."""
    wandb_project: str = "llamajax"
    """Project on Weights & Biases."""

    def __post_init__(self) -> None:
        require((self.log_every > 0, f"log_every: {self.log_every} must be positive"))


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A device trace for xprof and Perfetto, written to `profile/` in the run directory."""

    start_step: int | None = None
    """First traced step, the first of the run being 1; unset: no trace."""
    num_steps: int = 3
    """Traced steps."""

    def __post_init__(self) -> None:
        require(
            (self.start_step is None or self.start_step > 0, f"start_step: {self.start_step} must be positive or unset"),
            (self.num_steps > 0, f"num_steps: {self.num_steps} must be positive"),
        )
