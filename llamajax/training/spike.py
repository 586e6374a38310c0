"""How far a loss stands out from those before it."""

import math
from collections.abc import Sequence

import numpy as np

_TO_DEVIATION = 1.4826
"""Of normally distributed numbers, the standard deviation over the median absolute deviation."""
_LEAST_SHARE = 1e-3
"""Of the median: losses that hardly differ from each other would else make a spike of any rounding."""


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
