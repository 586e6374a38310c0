"""Differences between two sides, in the order of computation.

Each side continues from the weights that it draws itself: an error in one step carries over to the next. Where a gradient is
close to zero, Adam would magnify tiny differences, so `scaling` sets its `eps` to the size of a usual gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llamajax.config.layer_weights import EXPERT_WEIGHTS, LAYER_WEIGHTS
from llamajax.estimates.formulas import STACKS
from llamajax.verification.reference_run import Seen, Side, Step

TOLERANCE = 1e-5
"""Limit of the relative difference of a scalar. For an array: limit for any entry on any device, relative to the array's
largest entry on one device."""
SCALARS = ("tokens", "loss", "gradient norm")
_LAYERS = [weight.path for weight in (*LAYER_WEIGHTS, *EXPERT_WEIGHTS)]
_FORWARD = ("embedding", *(f"{stack}.{path}" for stack in STACKS for path in _LAYERS), "final_norm.scale", "head")
"""Parameters in the order in which the forward pass uses them."""


@dataclass(frozen=True)
class Difference:
    """The difference between a scalar or an array and one device's."""

    step: int
    """Number of the step; the first is 1, and 0 is the state before it."""
    kind: str
    """One of `SCALARS`, or a kind of array in a `Step`."""
    name: str
    """Name of the parameter; empty for a scalar."""
    shape: tuple[int, ...]
    relative: float
    """Size as for `TOLERANCE`; infinity where a number is not finite, or is not zero where it should be."""

    @property
    def differs(self) -> bool:
        return self.relative > TOLERANCE

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}" if self.name else self.kind


def differences(ours: Side, truth: Side) -> list[Difference]:
    """Returns the differences of everything that both sides have, in the order of computation.

    Within a step: tokens, loss, gradients, their norm, moments, weights. Gradients are in the order of the backward pass,
    or, where the loss is already wrong, in the order of the forward pass.
    """
    return [
        difference
        for step, (own, true) in enumerate(zip(ours.steps, truth.steps, strict=False))
        for difference in _step_differences(step, own, true)
    ]


def first_difference(ours: Side, truth: Side) -> Difference | None:
    """Returns the first difference in the order of computation; None where all is equal."""
    return next((difference for difference in differences(ours, truth) if difference.differs), None)


def forward_order(name: str) -> int:
    """Returns the position of a parameter in the forward pass."""
    return _FORWARD.index(name)


def relative_difference(ours: np.ndarray, truth: np.ndarray, largest: float) -> float:
    """Returns the largest difference between two arrays of one shape, in units of `largest`."""
    if ours.size == 0:
        return 0.0
    most = float(np.max(np.abs(ours.astype(np.float64) - truth)))
    if most == 0:
        return 0.0
    return most / largest if np.isfinite(most) and largest else np.inf


def largest_entry(array: np.ndarray) -> float:
    """Returns the largest absolute value in an array; 0 for an empty one."""
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
