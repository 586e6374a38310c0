"""Maps a step to its training rows, a function of its number and of the rows that the run has passed over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamajax.config.run import Config


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """Training rows that led to a bad step; the run skips them when it continues from an earlier step."""

    after_step: int
    """Number of finished steps from which the run continued; the rows that come next are passed over."""
    first_row: int
    """Position of the first row passed over."""
    num_rows: int
    """Number of rows passed over; the step after `after_step` begins after them."""
    reason: str
    """Cause, in one line."""
    time: float
    """Time of the decision, in seconds since 1970."""


def rows_read(config: Config) -> Callable[[int], int]:
    """Returns a function from a number of finished steps to the rows of the data that they read."""
    return lambda step: config.objective.rows_of_data(config.train.rows_after(step))


def next_row(step: int, rows_after: Callable[[int], int], passed_over: Sequence[PassedOver]) -> int:
    """Returns the position of the first row after `step` finished steps.

    Args:
        step: number of finished steps.
        rows_after: returns the number of rows of the first steps; see `rows_read`.
        passed_over: windows in the order of their occurrence. One that continues from an earlier step than previous ones
            supersedes them.
    """
    for window in reversed(passed_over):
        if window.after_step <= step:
            return window.first_row + window.num_rows + rows_after(step) - rows_after(window.after_step)
    return rows_after(step)


def is_left_behind(step: int, num_known: int, passed_over: Sequence[PassedOver]) -> bool:
    """Returns whether the run has gone back to an earlier step since a state after `step` was saved.

    That state recorded the first `num_known` windows passed over.
    """
    return any(step > window.after_step for window in passed_over[num_known:])
