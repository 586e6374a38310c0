"""What is measured and traced while a run goes."""

from dataclasses import dataclass

from llamajax.config.rules import PositiveInt, PositiveIntOrUnset, Section


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """What is shown and where; metrics.jsonl in the run directory has every step. While its disk is full, up to 100,000
    records wait in memory."""

    log_every: PositiveInt = 10
    """Steps between lines on a terminal that is not interactive; the progress bar follows every step."""
    tensorboard: bool = False
    """Also write TensorBoard event files to the run directory."""
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`)."""
    wandb_project: str = "llamajax"
    """Project on Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section):
    """A device trace for xprof and Perfetto, written to `profile/` in the run directory."""

    start_step: PositiveIntOrUnset = None
    """First traced step, the first of the run being 1; unset: no trace."""
    num_steps: PositiveInt = 3
    """Traced steps."""
