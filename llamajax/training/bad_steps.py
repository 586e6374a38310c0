"""Detects bad steps (non-finite gradients, loss spikes) and requests a rollback for them."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llamajax.config.run import Config
from llamajax.errors import DivergedError
from llamajax.watch.run_log import Record

_TO_DEVIATION = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of normally distributed numbers."""
_LEAST_SHARE = 1e-3
"""Smallest deviation, as a share of the median. Without it, losses that hardly differ would turn rounding into a spike."""


class GoBack(Exception):  # noqa: N818  (not an error: the run continues)
    """Requests that the run continue from its newest good checkpoint before a bad step."""

    def __init__(self, reason: str, *, first_step: int, last_step: int, pass_over: bool, **facts: Any) -> None:
        """Creates the request. Every process raises the same one after the same step.

        Args:
            reason: what went wrong, in one line.
            first_step: the first step that cannot be trusted; the first step of the run is 1.
            last_step: the last step that was checked.
            pass_over: whether the run skips the rows since the checkpoint, up to and including the rows of `last_step`;
                otherwise it recomputes the steps.
            facts: numbers for the run's log.
        """
        super().__init__(reason)
        self.reason, self.first_step, self.last_step, self.pass_over = reason, first_step, last_step, pass_over
        self.facts = facts


class BadSteps:
    """Checks the record of every step for gradients that stay non-finite and for loss spikes."""

    def __init__(self, config: Config, recent_losses: Sequence[float], num_rollbacks: int) -> None:
        """Starts after the steps that produced `recent_losses`.

        Args:
            config: the run.
            recent_losses: losses to compare the next ones with, newest last.
            num_rollbacks: number of times the run has rolled back and skipped rows.
        """
        self._config, self._num_rollbacks = config, num_rollbacks
        self._losses = deque(recent_losses, maxlen=config.recovery.spike_window)
        self._first_steps = {stage.from_step + 1 for stage in config.data.stages}
        self.num_nonfinite = 0
        """Number of consecutive steps with non-finite gradients, up to and including the newest step."""

    @property
    def recent_losses(self) -> list[float]:
        """Finite losses of the newest applied steps, at most `recovery.spike_window` of them, newest last."""
        return list(self._losses)

    def look(self, record: Record | None, newest: Callable[[], int | None]) -> None:
        """Checks the record of the next step, if there is one. The record is the same in every process.

        Args:
            record: the result of `MetricsWriter.write` or `flush`.
            newest: returns the newest checkpoint.

        Raises:
            GoBack: the step is bad.
            DivergedError: the step is bad, and the run has rolled back as often as allowed.
        """
        if record is None:
            return
        step, loss, zscore_limit = record["step"], record["train/loss"], self._config.recovery.spike_zscore
        if step in self._first_steps:  # of a stage, which has different texts
            self._losses.clear()
        self.num_nonfinite = record["train/skipped_in_a_row"]
        if (limit := self._config.train.max_nonfinite_steps) <= self.num_nonfinite:
            what = f"gradients were not finite in {self.num_nonfinite} steps in a row (train.max_nonfinite_steps={limit})"
            self._go_back(what, step - self.num_nonfinite + 1, step, newest, loss=loss)
        if self.num_nonfinite or not math.isfinite(loss):
            return
        if zscore_limit is not None and len(self._losses) == self._losses.maxlen:
            zscore = robust_zscore(loss, self._losses)
            if zscore >= zscore_limit:
                what = (
                    f"loss {loss:.4f} is {zscore:.1f} robust standard deviations above the median of the"
                    f" {len(self._losses)} steps before (recovery.spike_zscore={zscore_limit:g})"
                )
                self._go_back(what, step, step, newest, loss=loss, zscore=zscore)
        self._losses.append(loss)

    def _go_back(self, what: str, first_step: int, last_step: int, newest: Callable[[], int | None], **facts: float) -> None:
        most = self._config.recovery.max_rollbacks
        if self._num_rollbacks < most:
            raise GoBack(f"step {last_step}: {what}", first_step=first_step, last_step=last_step, pass_over=True, **facts)
        before = f"the run has already rolled back {self._num_rollbacks} of at most {most} times"
        before = before if most else "the run does not roll back"
        saved = (
            "there is no checkpoint" if (saved_step := newest()) is None else f"step {saved_step} is the newest checkpoint"
        )
        raise DivergedError(
            f"step {last_step}: {what}, and {before} (recovery.max_rollbacks={most}); {saved}; lower optimizer.learning_rate"
            " or warm up longer, in another run_dir or with checkpoint.allow_changes"
        )


def robust_zscore(loss: float, window: Sequence[float]) -> float:
    """Returns the distance of `loss` from the median of `window` in robust standard deviations.

    The robust standard deviation is 1.4826 times the median absolute deviation, which a few outliers do not change (Iglewicz
    and Hoaglin, How to Detect and Handle Outliers, 1993).

    Args:
        loss: a finite number.
        window: finite numbers, at least one.
    """
    median = float(np.median(window))
    deviation = _TO_DEVIATION * float(np.median(np.abs(np.subtract(window, median))))
    deviation = max(deviation, _LEAST_SHARE * abs(median))
    if deviation == 0:
        return math.copysign(math.inf, loss) if loss else 0.0
    return (loss - median) / deviation
