"""1F1B for stages that run their own programs."""

import pytest

from llamajax.parallel.stage_order import Pass, order_1f1b


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 20])
def test_every_pass_follows_those_that_it_needs(stages, micro_batches):
    order = order_1f1b(stages, micro_batches)
    assert len(order) == len(set(order)) == 2 * stages * micro_batches
    place = {one: index for index, one in enumerate(order)}
    for number in range(micro_batches):
        there = [Pass(stage, number, backward=False) for stage in range(stages)]
        back = [Pass(stage, number, backward=True) for stage in reversed(range(stages))]
        assert sorted([*there, *back], key=place.__getitem__) == [*there, *back]


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_a_stage_keeps_at_most_p_minus_s_micro_batches(stages):
    most, kept = [0] * stages, [0] * stages
    for stage, _, is_backward in order_1f1b(stages, 20):
        kept[stage] += -1 if is_backward else 1
        most[stage] = max(most[stage], kept[stage])
    assert most == [stages - stage for stage in range(stages)]


def test_few_micro_batches_fill_and_drain():
    assert order_1f1b(2, 1) == [Pass(0, 0, False), Pass(1, 0, False), Pass(1, 0, True), Pass(0, 0, True)]
