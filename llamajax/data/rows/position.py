"""Which training rows a step takes: a function of its number and of the rows that the run has passed over."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """Training rows that led to a bad step, which the run does not take when it goes on from before that."""

    after_step: int
    """Finished steps where the run went on; the rows that come next are those passed over."""
    first_row: int
    """The position of the first of them."""
    num_rows: int
    """How many they are; the step after `after_step` begins behind them."""
    reason: str
    """What went wrong, in one line."""
    time: float
    """When, in seconds since 1970."""


def next_row(step: int, global_batch_size: int, passed_over: Sequence[PassedOver]) -> int:
    """The position of the first row that is taken after `step` finished steps.

    Args:
        step: finished steps.
        global_batch_size: rows per step.
        passed_over: in the order in which it happened. One that goes on from an earlier step than those before it began
            with the rows there, so that it holds in their place.
    """
    for window in reversed(passed_over):
        if window.after_step <= step:
            return window.first_row + window.num_rows + (step - window.after_step) * global_batch_size
    return step * global_batch_size


def is_left_behind(step: int, num_known: int, passed_over: Sequence[PassedOver]) -> bool:
    """Whether the run has gone back to an earlier step since a state after `step` was saved, which knew of the first
    `num_known` rows passed over.
    """
    return any(step > window.after_step for window in passed_over[num_known:])
