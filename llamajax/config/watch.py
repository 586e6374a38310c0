"""What is measured and traced while a run goes."""

from dataclasses import dataclass
from typing import Annotated

from llamajax.config.rules import Bound, PositiveInt, PositiveIntOrUnset, Section

RatioOrUnset = Annotated[float | None, Bound(lambda value: value is None or value > 1, "must be above 1")]


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """What is shown and where; metrics.jsonl in the run directory has every step. While its disk is full, up to 100,000
    records wait in memory."""

    log_every: PositiveInt = 10
    """Steps between lines on a terminal that is not interactive; the progress bar follows every step."""
    straggler_ratio: RatioOrUnset = 1.15
    """How many times as long as the median a process's devices take for a fixed program, or a step takes by what the
    process alone waits and works for, when it is named as slow; the others wait for it in every step. Unset: nobody is."""
    tensorboard: bool = False
    """Also write TensorBoard event files to the run directory."""
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`)."""
    wandb_project: str = "llamajax"
    """Project on Weights & Biases."""
    wandb_entity: str | None = None
    """User or team on Weights & Biases that owns the project; unset: your default entity."""
    wandb_name: str | None = None
    """Name of the run on Weights & Biases; unset: the name of `run_dir`."""
    wandb_tags: tuple[str, ...] = ()
    """Tags of the run on Weights & Biases, such as [llama3, ablation]."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section):
    """A device trace for xprof and Perfetto, written to `profile/` in the run directory."""

    start_step: PositiveIntOrUnset = None
    """First traced step, the first of the run being 1; unset: no trace."""
    num_steps: PositiveInt = 3
    """Traced steps."""
