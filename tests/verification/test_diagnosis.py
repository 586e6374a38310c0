"""From patterns to sentences, on arrays made for it; `test_faults.py` has real faults."""

import numpy as np
import pytest

from llamajax.verification.diagnosis import array_clues, clues, scalar_clues
from llamajax.verification.reference_run import Part, Seen, Side
from tests.verification.sides import AXES, SPLITS, array, laid_out, only, side

FACTORS = {**AXES, "micro-batches": 3}
W = "layers.mlp.w_down"


def told(ours: np.ndarray | Seen, name: str = W) -> list[str]:
    seen = ours if isinstance(ours, Seen) else laid_out(ours, SPLITS[name])
    return array_clues(seen, array(name), AXES, FACTORS, stacked=name.startswith("layers."))


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [
        (2, "is 2 times the correct value in all entries, as if summed once too often over fsdp"),
        (0.25, "as if divided by the size of tensor: a mean where a sum belongs, or a sum that is missing"),
        (8, "as if summed once too often over fsdp x tensor"),
        (1 / 3, "as if divided by the size of micro-batches"),
        (6, "as if summed once too often over fsdp x micro-batches"),
        (1.7, "is 1.7 times the correct value in all entries"),
        (-1, "is -1 times the correct value in all entries"),
    ],
)
def test_a_constant_factor_is_the_size_of_what_was_summed(factor, sentence):
    (clue,) = told(factor * array(W))
    assert sentence in clue
    assert ("as if" in clue) is ("as if" in sentence)


def test_what_is_not_finite_or_lost_is_told_as_that():
    assert told(np.where(array(W) > 2, np.nan, array(W)))[0].endswith("not finite, on all devices together")
    assert told(0 * array(W)) == ["is zero everywhere: it is lost"]


def test_copies_that_are_none():
    seen = laid_out(array("embedding"), SPLITS["embedding"])
    parts = {place: Part(part.index, part.value * (1 + place[1])) for place, part in seen.parts.items()}
    (clue,) = told(Seen(seen.whole, parts), "embedding")
    assert clue.startswith("has copies that differ along fsdp:")
    parts = {place: Part(part.index, part.value + place[3]) for place, part in seen.parts.items()}
    assert told(Seen(seen.whole, parts), "embedding")[0].startswith("has copies that differ along tensor:")


def test_parts_in_the_wrong_places():
    (clue,) = told(np.roll(array("head"), 2, axis=0), "head")
    assert clue.startswith(
        "has parts in the wrong places along tensor: device 0 has the part of 3, device 1 has the part of 0"
    )
    (clue,) = told(np.roll(array(W), 2, axis=2))
    assert clue.startswith("has parts in the wrong places along fsdp: device 0 has the part of 1, device 1 has")


def test_parts_that_are_nearly_right_are_in_their_places():
    """Also where all of them are the same."""
    alike = np.tile(array("embedding")[:4], (2, 1))
    for truth, split in ((array("head"), SPLITS["head"]), (alike, ("fsdp", None))):
        ours = laid_out(
            truth + np.float32(1e-4) * np.arange(truth.size, dtype=np.float32).reshape(truth.shape) / truth.size, split
        )
        assert not [clue for clue in array_clues(ours, truth, AXES, FACTORS, stacked=False) if "wrong places" in clue]


def test_the_fewest_axes_explain_a_factor():
    (clue,) = scalar_clues("loss", 4, 1, {"data": 2, "fsdp": 2, "tensor": 4})
    assert clue.endswith("as if summed once too often over tensor")


def test_layers_off_by_one():
    (clue,) = told(np.roll(array(W), -1, axis=0))
    assert clue == "has in layer 0 the values of layer 1, and so on: the layers are off by one"
    (clue,) = told(np.roll(array(W), 1, axis=0))
    assert clue == "has in layer 1 the values of layer 0, and so on: the layers are off by one"


def test_swapped_dims():
    square = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    assert array_clues(laid_out(square.T, ("tensor", None)), square, AXES, FACTORS, stacked=False) == [
        "has its dims 0 and 1 swapped"
    ]


def test_one_layer_or_one_part_alone():
    wrong = array(W).copy()
    wrong[1] += np.random.default_rng(0).standard_normal(wrong[1].shape)
    assert told(wrong) == ["differs only in layer 1 of 0 to 2"]
    wrong = array(W).copy()
    wrong[:, 4:6] += np.random.default_rng(0).standard_normal(wrong[:, 4:6].shape)
    assert told(wrong) == ["differs only where tensor is 2 of 0 to 3"]


def test_nothing_is_told_of_what_has_no_pattern():
    assert told(array(W, seed=99)) == []


@pytest.mark.parametrize(
    ("kind", "ours", "truth", "told"),
    [
        ("tokens", 200, 100, "the number of tokens is 200 instead of 100, as if summed once too often over fsdp"),
        ("tokens", 70, 100, "the number of tokens is 70 instead of 100"),
        ("loss", 1.25, 5, "the loss is 1.25 instead of 5, as if divided by the size of tensor: "),
        ("gradient norm", 2**0.5, 1, "as if summed once too often over fsdp"),
        ("loss", float("nan"), 5, "the loss is not finite"),
    ],
)
def test_scalars(kind, ours, truth, told):
    (clue,) = scalar_clues(kind, ours, truth, FACTORS)
    assert told in clue


def test_a_loss_without_a_pattern_tells_nothing_by_itself():
    assert scalar_clues("loss", 5.1, 5, FACTORS) == []


@pytest.mark.parametrize(
    ("ours", "sentence"),
    [
        (side(loss=5.1), "the forward pass is already wrong"),
        (side(norm=3.0), "all gradients are equal: their norm is not"),
        (
            side(only(1, "first moment", ("head",), np.negative)),
            "all gradients and their norm are equal: the update is wrong",
        ),
        (side(only(2, "weight", ("head",), np.negative)), "up to step 1 all values are equal"),
        (side(only(0, "weight", ("head",), np.negative)), "the initial weights or moments differ"),
        (side(only(1, "gradient", ("head",), np.negative)), "only this gradient differs"),
        (side(only(1, "gradient", ("embedding",), np.negative)), "only this gradient differs"),
        (side(only(1, "gradient", ("head", W), np.negative)), f"only the gradients of head, {W} differ"),
        (
            side(only(1, "gradient", ("embedding", W), np.negative)),
            f"the gradients of all parameters after {W}: the backward pass goes",
        ),
    ],
)
def test_the_order_tells_where_it_went_wrong(ours: Side, sentence: str):
    assert any(sentence in clue for clue in clues(ours, side(), FACTORS))


def test_equal_sides_give_no_clues():
    assert clues(side(), side(), FACTORS) == []
