"""What differs between two sides, in the order in which it was computed.

Both sides go their own way from the weights that each draws: what one step leaves wrong, the next one starts from. Adam
would make much of nothing where a gradient is next to zero, so `scaling` gives it an `eps` of a usual gradient's size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llamajax.config.layer_weights import LAYER_WEIGHTS
from llamajax.verification.reference_run import Seen, Side, Step

TOLERANCE = 1e-5
"""Of a scalar: relative. Of an array: of any entry on any device, relative to the array's largest entry on one device."""
SCALARS = ("tokens", "loss", "gradient norm")
_FORWARD = ("embedding", *(f"layers.{weight.path}" for weight in LAYER_WEIGHTS), "final_norm.scale", "head")
"""Parameters by the order in which the forward pass takes them."""


@dataclass(frozen=True)
class Difference:
    """How far a scalar or an array is from one device's."""

    step: int
    """The first one is 1; 0 is before it."""
    kind: str
    """Of `SCALARS`, or of the arrays of a `Step`."""
    name: str
    """Of the parameter; empty for a scalar."""
    shape: tuple[int, ...]
    relative: float
    """As for `TOLERANCE`; infinity where a number is none, or is not zero where it should be."""

    @property
    def differs(self) -> bool:
        return self.relative > TOLERANCE

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}" if self.name else self.kind


def differences(ours: Side, truth: Side) -> list[Difference]:
    """Of everything that both sides have, in the order of computation.

    In a step: tokens, loss, gradients, their norm, moments, weights. Gradients come in the order of the backward pass; but
    in that of the forward pass where the loss is wrong already.
    """
    return [
        difference
        for step, (own, true) in enumerate(zip(ours.steps, truth.steps, strict=False))
        for difference in _step_differences(step, own, true)
    ]


def first_difference(ours: Side, truth: Side) -> Difference | None:
    """What differs and was computed first; None where all is equal."""
    return next((difference for difference in differences(ours, truth) if difference.differs), None)


def forward_order(name: str) -> int:
    """The place of a parameter in the forward pass."""
    return _FORWARD.index(name)


def relative_difference(ours: np.ndarray, truth: np.ndarray, largest: float) -> float:
    """The largest difference of two arrays of one shape, in units of `largest`."""
    if ours.size == 0:
        return 0.0
    most = float(np.max(np.abs(ours.astype(np.float64) - truth)))
    if most == 0:
        return 0.0
    return most / largest if np.isfinite(most) and largest else np.inf


def largest_entry(array: np.ndarray) -> float:
    """The largest absolute value in an array; 0 of an empty one."""
    return float(np.max(np.abs(array), initial=0))


def _step_differences(step: int, ours: Step, truth: Step) -> Iterator[Difference]:
    def scalar(kind: str) -> Difference:
        own, true = np.array(ours.scalars[kind]), np.array(truth.scalars[kind])
        return Difference(step, kind, "", (), relative_difference(own, true, abs(float(true))))

    def arrays(kind: str, *, backward: bool = False) -> Iterator[Difference]:
        for name in sorted(truth.arrays[kind], key=forward_order, reverse=backward):
            own, true = ours.arrays[kind][name], truth.arrays[kind][name].whole
            yield Difference(step, kind, name, true.shape, _of_any_device(own, true))

    if ours.scalars:
        before = [scalar("tokens"), scalar("loss")]
        yield from before
        yield from arrays("gradient", backward=not any(difference.differs for difference in before))
        yield scalar("gradient norm")
    yield from (difference for kind in truth.arrays if kind != "gradient" for difference in arrays(kind))


def _of_any_device(ours: Seen, truth: np.ndarray) -> float:
    largest = largest_entry(truth)
    return max(relative_difference(part.value, truth[part.index], largest) for part in ours.parts.values())
