"""Differing tensors, sizes of differences, and their order."""

import math

import numpy as np
import pytest

from llamajax.model import Llama
from llamajax.verification.differences import (
    TOLERANCE,
    Difference,
    differences,
    first_difference,
    forward_order,
    relative_difference,
)
from llamajax.verification.reference_run import Part, Seen, Side, Step
from tests.tiny import tiny_config
from tests.verification.sides import only, side

FORWARD = ["embedding", "layers.mlp.w_down", "head"]


def first(ours: Side) -> Difference:
    difference = first_difference(ours, side())
    assert difference is not None
    return difference


def test_equal_sides_do_not_differ():
    found = differences(side(), side())
    assert first_difference(side(), side()) is None
    assert {difference.relative for difference in found} == {0.0}
    # Both moments and weights before the first step; in each of two steps four kinds and three scalars.
    assert len(found) == 3 * 3 + 2 * (3 * 4 + 3)


def test_gradients_come_in_the_order_of_the_backward_pass_unless_the_loss_differs():
    def gradients(ours: Side) -> list[str]:
        return [d.name for d in differences(ours, side()) if (d.step, d.kind) == (1, "gradient")]

    assert gradients(side()) == FORWARD[::-1]
    assert gradients(side(loss=5.1)) == FORWARD
    assert gradients(side(norm=5.1)) == FORWARD[::-1]


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (side(tokens=101, loss=5.1), (1, "tokens", "")),
        (side(only(1, "gradient", ("embedding",), np.negative), loss=5.1), (1, "loss", "")),
        (side(only(1, "gradient", ("embedding", "head"), np.negative), norm=3.0), (1, "gradient", "head")),
        (side(only(1, "weight", ("embedding",), np.negative), norm=3.0), (1, "gradient norm", "")),
        (side(only(1, "second moment", ("head",), np.negative)), (1, "second moment", "head")),
        (side(only(2, "weight", ("head",), np.negative)), (2, "weight", "head")),
        (side(only(0, "weight", ("head",), np.negative)), (0, "weight", "head")),
    ],
)
def test_the_first_difference_is_the_one_that_was_computed_first(ours, expected):
    found = first(ours)
    assert (found.step, found.kind, found.name) == expected


@pytest.mark.parametrize(("factor", "differs"), [(0.9, False), (1.1, True)])
def test_an_array_is_measured_by_its_largest_entry(factor, differs):
    def change(value: np.ndarray) -> np.ndarray:
        changed = value.astype(np.float64)
        changed.flat[3] += factor * TOLERANCE * np.abs(value).max()
        return changed

    assert (first_difference(side(only(1, "weight", ("head",), change)), side()) is not None) is differs


def test_one_wrong_copy_is_a_difference():
    ours = side()
    arrays = ours.steps[1].arrays["weight"]
    seen = arrays["embedding"]
    place = (0, 1, 0, 3)
    wrong = Part(seen.parts[place].index, seen.parts[place].value + 1)
    steps = list(ours.steps)
    steps[1] = Step(
        steps[1].scalars,
        {**steps[1].arrays, "weight": {**arrays, "embedding": Seen(seen.whole, {**seen.parts, place: wrong})}},
    )
    assert first(Side(ours.axes, 2, tuple(steps))).name == "embedding"


@pytest.mark.parametrize(
    ("ours", "truth", "expected"),
    [
        ([1.0, -4.0], [1.0, -5.0], 0.2),
        ([0.0], [0.0], 0.0),
        ([1e-20], [0.0], math.inf),
        ([math.nan], [1.0], math.inf),
        ([math.inf], [math.inf], math.inf),
        ([], [], 0.0),
    ],
)
def test_relative_differences(ours, truth, expected):
    truth = np.array(truth, np.float32)
    largest = float(np.max(np.abs(truth), initial=0))
    with np.errstate(invalid="ignore"):
        assert relative_difference(np.array(ours, np.float32), truth, largest) == pytest.approx(expected)


def test_every_parameter_has_its_place_in_the_forward_pass():
    model = tiny_config().changed({"model.qkv_bias": True, "model.qk_norm": True}).model
    names = sorted(Llama.shapes(model), key=forward_order)
    assert len({forward_order(name) for name in names}) == len(names)
    assert names[0] == "embedding"
    assert names[-2:] == ["final_norm.scale", "head"]
    assert names.index("layers.attention.wqkv") < names.index("layers.attention.wo") < names.index("layers.mlp_norm.scale")
