"""Steps that went wrong, and what follows from them."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llamajax.config.run import Config
from llamajax.errors import DivergedError
from llamajax.watch.run_log import Record

_TO_DEVIATION = 1.4826
"""Of normally distributed numbers, the standard deviation over the median absolute deviation."""
_LEAST_SHARE = 1e-3
"""Of the median: losses that hardly differ from each other would else make a spike of any rounding."""


class GoBack(Exception):  # noqa: N818  (no error: the run goes on)
    """The run is to go on from its newest good checkpoint before a step that went wrong."""

    def __init__(self, reason: str, *, first_step: int, last_step: int, pass_over: bool, **facts: Any) -> None:
        """Every process raises the same, after the same step.

        Args:
            reason: what went wrong, in one line.
            first_step: the first step that is not to be believed; 1 is the run's first.
            last_step: the last one that was looked at.
            pass_over: whether the rows since the checkpoint, those of `last_step` included, are passed over from then on;
                else the steps are computed again.
            facts: numbers for the run's log.
        """
        super().__init__(reason)
        self.reason, self.first_step, self.last_step, self.pass_over = reason, first_step, last_step, pass_over
        self.facts = facts


class BadSteps:
    """Looks at the record of every step: gradients that stay non-finite, and losses that are spikes."""

    def __init__(self, config: Config, recent_losses: Sequence[float], num_rollbacks: int) -> None:
        """Begins after the steps that `recent_losses` are of.

        Args:
            config: the run.
            recent_losses: those that the next ones are compared with, the newest last.
            num_rollbacks: how often the run has gone back and passed over rows.
        """
        self._config, self._num_rollbacks = config, num_rollbacks
        self._losses = deque(recent_losses, maxlen=config.recovery.spike_window)
        self._first_steps = {stage.from_step + 1 for stage in config.data.stages}
        self.num_nonfinite = 0
        """Steps in a row, the newest included, whose gradients were not finite."""

    @property
    def recent_losses(self) -> list[float]:
        """Finite losses of the newest steps that were applied, `recovery.spike_window` at most, the newest last."""
        return list(self._losses)

    def look(self, record: Record | None, newest: Callable[[], int | None]) -> None:
        """Takes the record of the next step, if there is one; the same in every process.

        Args:
            record: of `MetricsWriter.write` or `flush`.
            newest: finds out the newest checkpoint.

        Raises:
            GoBack: the step is a bad one.
            DivergedError: it is, and the run has gone back as often as it may.
        """
        if record is None:
            return
        step, loss, zscore_limit = record["step"], record["train/loss"], self._config.recovery.spike_zscore
        if step in self._first_steps:  # of a stage, whose texts are others
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
        before = f"the run has gone back already, {self._num_rollbacks} of at most {most} times"
        before = before if most else "the run does not go back"
        saved = (
            "there is no checkpoint" if (saved_step := newest()) is None else f"step {saved_step} is the newest checkpoint"
        )
        raise DivergedError(
            f"step {last_step}: {what}, and {before} (recovery.max_rollbacks={most}); {saved}; lower optimizer.learning_rate"
            " or warm up longer, in another run_dir or with --checkpoint.allow_changes '[optimizer]'"
        )


def robust_zscore(loss: float, window: Sequence[float]) -> float:
    """The distance of `loss` from the median of `window`, in robust standard deviations (1.4826 times the median absolute
    deviation, of which a few outliers change nothing; Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993).

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
