"""Describes a difference between two sides in sentences. It runs nothing."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from llamajax.verification.differences import (
    TOLERANCE,
    Difference,
    differences,
    forward_order,
    largest_entry,
    relative_difference,
)
from llamajax.verification.reference_run import Part, Place, Seen, Side

_ALIKE = 1e-3
"""Tolerance, relative to the largest entry, for arrays that match a pattern: consequences of a fault add a little."""


def clues(ours: Side, truth: Side, factors: Mapping[str, int]) -> list[str]:
    """Returns clues about the cause of the first difference, the most informative first; empty where nothing differs.

    Args:
        ours: the side with the difference.
        truth: the side of one device.
        factors: sizes that a wrong sum may have run over, such as mesh axes.
    """
    found = differences(ours, truth)
    differing = [difference for difference in found if difference.differs]
    if not differing:
        return []
    first = differing[0]
    told = []
    if not first.name:
        own, true = (side.steps[first.step].scalars[first.kind] for side in (ours, truth))
        told += scalar_clues(first.kind, own, true, factors)
    for array in [difference for difference in differing if difference.name][:1]:
        own, true = (side.steps[array.step].arrays[array.kind][array.name] for side in (ours, truth))
        told += [
            f"{array} {clue}"
            for clue in array_clues(own, true.whole, ours.axes, factors, stacked=array.name.startswith("layers."))
        ]
    return [*told, *_order_clues(found, first)]


def scalar_clues(kind: str, ours: float, truth: float, factors: Mapping[str, int]) -> list[str]:
    """Returns the sum that would explain how a scalar differs."""
    if not math.isfinite(ours):
        return [f"the {kind} is not finite"]
    # The norm is the root of a sum, so what is counted twice in it makes it larger by the root of two.
    factor = (ours / truth) ** (2 if kind == "gradient norm" else 1) if truth else 0.0
    meaning = _sum_that_explains(factor, factors)
    what = "number of tokens" if kind == "tokens" else kind
    return [f"the {what} is {ours:,.7g} instead of {truth:,.7g}{meaning}"] if meaning or kind == "tokens" else []


def array_clues(
    ours: Seen, truth: np.ndarray, axes: Mapping[str, int], factors: Mapping[str, int], *, stacked: bool
) -> list[str]:
    """Returns the pattern in which an array differs from one device's, as a phrase to follow its name.

    Args:
        ours: the array as the devices hold it.
        truth: the array on one device.
        axes: sizes of the mesh axes, in the order of the devices' positions.
        factors: as for `clues`.
        stacked: whether its first dim is over layers.
    """
    if bad := sum(int(np.sum(~np.isfinite(part.value))) for part in ours.parts.values()):
        return [f"has {bad} entries that are not finite, on all devices together"]
    if not np.any(ours.whole):
        return ["is zero everywhere: it is lost"]
    moved = [
        *_torn(ours, truth, axes),
        *_moved_parts(ours, truth, axes),
        *(_moved_layers(ours.whole, truth) if stacked else ()),
        *_swapped_dims(ours.whole, truth),
    ]
    if moved:
        return moved[:1]
    told = [*_wrong_parts(ours, truth, axes), *(_wrong_layers(ours.whole, truth) if stacked else ())]
    factor = float(np.vdot(ours.whole, truth) / max(np.vdot(truth, truth), np.finfo(np.float64).tiny))
    if _alike(ours.whole, factor * truth, largest_entry(ours.whole)):
        meaning = _sum_that_explains(factor, factors)
        told.insert(0, f"is {factor:.4g} times the correct value in all entries{meaning}")
    return told


def _sum_that_explains(factor: float, factors: Mapping[str, int]) -> str:
    """Returns the sizes with a product of `factor`, or of its inverse, as a phrase; empty if there are none."""
    live = [name for name, size in factors.items() if size > 1]
    groups = [group for number in range(1, len(live) + 1) for group in itertools.combinations(live, number)]
    for value, meaning in ((factor, "summed once too often over"), (1 / factor if factor else 0, "divided by the size of")):
        meant = [
            group for group in groups if math.isclose(value, math.prod(factors[name] for name in group), rel_tol=_ALIKE)
        ]
        fewest = [" x ".join(group) for group in meant if len(group) == len(meant[0])]
        if fewest:
            missing = ": a mean where a sum belongs, or a sum that is missing" if value != factor else ""
            return f", as if {meaning} {' or '.join(fewest)}{missing}"
    return ""


def _order_clues(found: Sequence[Difference], first: Difference) -> Iterator[str]:
    """Yields what follows from the first difference and from the equality of everything computed before."""
    if first.step > 1:
        yield f"up to step {first.step - 1} all values are equal: the state that a step passes to the next is wrong"
    if first.step == 0:
        yield "the initial weights or moments differ: check how they are drawn or sharded"
    elif first.kind in ("tokens", "loss"):
        yield "the forward pass is already wrong"
    elif first.kind == "gradient norm":
        yield "all gradients are equal: their norm is not the sum over all of their parts"
    elif first.kind != "gradient":
        yield "all gradients and their norm are equal: the update is wrong"
    else:
        gradients = [other for other in found if other.kind == "gradient" and other.step == first.step]
        before = [other.differs for other in gradients if forward_order(other.name) < forward_order(first.name)]
        if before and all(before):
            yield (
                f"the loss is equal, and so are the gradients of all parameters after {first.name}: the backward pass"
                " goes wrong there and passes the error on to all parameters before it"
            )
        else:
            others = [other.name for other in gradients if other.differs and other != first]
            alone = f"only the gradients of {', '.join([first.name, *others])}" if others else "only this gradient"
            yield f"the loss is equal, and {alone} differ{'' if others else 's'}: check how they are summed"


def _alike(ours: np.ndarray, truth: np.ndarray, largest: float) -> bool:
    return relative_difference(ours, truth, largest) < _ALIKE


def _rows_of_devices(ours: Seen, axis: int) -> list[list[Part]]:
    """Returns the parts in order of their position along one axis, one list per position along the others."""
    rows: dict[Place, list[Part]] = {}
    for place in sorted(ours.parts):
        rows.setdefault(place[:axis] + place[axis + 1 :], []).append(ours.parts[place])
    return list(rows.values())


def _torn(ours: Seen, truth: np.ndarray, axes: Mapping[str, int]) -> Iterator[str]:
    """Finds copies that differ from each other."""
    largest = largest_entry(truth)
    torn = [
        name
        for axis, name in enumerate(axes)
        if any(
            part.index == row[0].index and relative_difference(part.value, row[0].value, largest) > TOLERANCE
            for row in _rows_of_devices(ours, axis)
            for part in row[1:]
        )
    ]
    if torn:
        yield f"has copies that differ along {' and '.join(torn)}: its devices did not sum or gather the same values"


def _moved_parts(ours: Seen, truth: np.ndarray, axes: Mapping[str, int]) -> Iterator[str]:
    """Finds parts that belong to another device on the same axis."""
    largest = largest_entry(truth)
    for axis, (name, size) in enumerate(axes.items()):
        rows = _rows_of_devices(ours, axis)
        holds = [
            next((j for j in [i, *range(size)] if all(_alike(r[i].value, truth[r[j].index], largest) for r in rows)), None)
            for i in range(size)
        ]
        if None not in holds and holds != list(range(size)):
            told = ", ".join(f"device {i} has the part of {j}" for i, j in enumerate(holds) if i != j)
            yield f"has parts in the wrong places along {name}: {told}"


def _moved_layers(ours: np.ndarray, truth: np.ndarray) -> Iterator[str]:
    """Finds layers with their neighbours' values."""
    layers, largest = range(len(truth)), largest_entry(truth)
    for offset in (1, -1):
        pairs = [(layer, layer + offset) for layer in layers if layer + offset in layers]
        if pairs and all(_alike(ours[here], truth[there], largest) for here, there in pairs):
            yield f"has in layer {pairs[0][0]} the values of layer {pairs[0][1]}, and so on: the layers are off by one"


def _swapped_dims(ours: np.ndarray, truth: np.ndarray) -> Iterator[str]:
    for i, j in itertools.combinations(range(truth.ndim), 2):
        if truth.shape[i] == truth.shape[j] and _alike(np.swapaxes(ours, i, j), truth, largest_entry(truth)):
            yield f"has its dims {i} and {j} swapped"


def _wrong_parts(ours: Seen, truth: np.ndarray, axes: Mapping[str, int]) -> Iterator[str]:
    """Finds axes along which only some devices' parts are wrong."""
    largest = largest_entry(truth)
    for axis, (name, size) in enumerate(axes.items()):
        rows = _rows_of_devices(ours, axis)
        wrong = [
            i
            for i in range(size)
            if any(relative_difference(r[i].value, truth[r[i].index], largest) > TOLERANCE for r in rows)
        ]
        if 0 < len(wrong) < size:
            which = ", ".join(map(str, wrong))
            yield f"differs only where {name} is {which} of 0 to {size - 1}"


def _wrong_layers(ours: np.ndarray, truth: np.ndarray) -> Iterator[str]:
    """Finds the wrong layers where only some are wrong."""
    largest = largest_entry(truth)
    wrong = [i for i in range(len(truth)) if relative_difference(ours[i], truth[i], largest) > TOLERANCE]
    if len(wrong) < len(truth):
        yield f"differs only in layer{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))} of 0 to {len(truth) - 1}"
