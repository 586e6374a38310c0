"""Metrics and traces of a run."""

import importlib.util
from dataclasses import dataclass
from typing import Annotated

from llamajax.config.rules import Bound, PositiveInt, PositiveIntOrUnset, Section

RatioOrUnset = Annotated[float | None, Bound(lambda value: value is None or value > 1, "must be above 1")]


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """Logs and metrics. metrics.jsonl in the run directory has every step; while its disk is full, up to 100,000 records
    wait in memory."""

    log_every: PositiveInt = 10
    """Steps between lines on a terminal that is not interactive. An interactive terminal shows every step in the progress
    bar."""
    straggler_ratio: RatioOrUnset = 1.15
    """Ratio to the median from which a process is reported as slow. It applies to the time of its devices for a fixed
    program, and to the part of a step in which the process alone waits and works; the others wait for it in every step.
    Unset: no process is reported."""
    tensorboard: bool = False
    """Also write TensorBoard event files to the run directory."""
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`). A run that resumes continues the same W&B run."""
    wandb_project: str = "llamajax"
    """Project on Weights & Biases."""
    wandb_entity: str | None = None
    """User or team on Weights & Biases that owns the project; unset: your default entity."""
    wandb_name: str | None = None
    """Name of the run on Weights & Biases; unset: the name of the run directory."""
    wandb_tags: tuple[str, ...] = ()
    """Tags of the run on Weights & Biases, such as [llama3, ablation]."""

    def missing_packages(self) -> list[str]:
        """Returns one `key: rule; remedy` line for every package that is needed and that this Python does not have."""
        needed = {"wandb": "pip install 'llamajax[wandb]'", "tensorboard": "pip install tensorboardX"}
        modules = {"wandb": "wandb", "tensorboard": "tensorboardX"}
        return [
            f"{key}: {modules[key]} is not installed; run {command}, or turn it off"
            for key, command in needed.items()
            if getattr(self, key) and importlib.util.find_spec(modules[key]) is None
        ]


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section):
    """Device trace for xprof and Perfetto, written to `profile/` in the run directory."""

    start_step: PositiveIntOrUnset = None
    """First traced step; the first step of the run is 1. Unset: no trace."""
    num_steps: PositiveInt = 3
    """Number of traced steps."""
