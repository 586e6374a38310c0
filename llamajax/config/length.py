"""Rules between the number of steps of a run and the sections that name steps."""

from collections.abc import Iterator

from llamajax.config.data import DataConfig
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.config.watch import ProfileConfig


def length_problems(
    train: TrainConfig, data: DataConfig, optimizer: OptimizerConfig, profile: ProfileConfig
) -> Iterator[str]:
    """Yields one `key: rule; remedy` line for each setting that needs a longer run; none while `num_epochs` leaves its
    length open."""
    if not train.num_steps:
        return
    if data.stages and data.stages[-1].from_step >= train.num_steps:
        rule = f"{data.stages[-1].from_step} must be below train.num_steps={train.num_steps}"
        yield f"data.stages.{len(data.stages) - 1}.from_step: {rule}; start it earlier or train for more steps"
    decaying = optimizer.warmup_steps + (optimizer.decay_steps or 0)
    if decaying > train.num_steps:
        took = f"warm-up and decay take {decaying} steps, above train.num_steps={train.num_steps}"
        yield f"optimizer.warmup_steps: {took}; shorten warmup_steps or decay_steps, or train for more steps"
    last_traced = (profile.start_step or 0) + profile.num_steps - 1
    if profile.start_step is not None and last_traced > train.num_steps:
        steps = f"steps {profile.start_step} to {last_traced}"
        yield f"profile.start_step: {steps} reach beyond train.num_steps={train.num_steps}; trace earlier ones"
