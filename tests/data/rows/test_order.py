"""The order is a function of seed and position: exact proportions, a new shuffle per epoch, random access."""

import collections
from collections.abc import Iterable
from typing import Any

import grain
import numpy as np
import pytest

from llamajax.data.rows.order import Proportions, training_order


def rows_at(order: grain.MapDataset, positions: Iterable[int]) -> list[Any]:
    return [order[position] for position in positions]


def test_each_epoch_is_another_permutation():
    order = training_order([range(100)], [1.0], seed=0)
    epochs = [tuple(rows_at(order, range(start, start + 100))) for start in range(0, 500, 100)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len(set(epochs)) == 5


def test_any_position_at_any_time():
    order = training_order([range(50), range(100, 170)], [2.0, 1.0], seed=3)
    straight = [order[position] for position in range(500)]
    again = training_order([range(50), range(100, 170)], [2.0, 1.0], seed=3)
    for position in np.random.default_rng(0).permutation(500).tolist():
        assert again[position] == straight[position]
    assert again[10**12] is not None  # a position far beyond any run


def test_seeds_give_unrelated_orders():
    """Neighbouring seeds in particular: Grain shuffles epoch e of seed s as epoch e - 1 of seed s + 1."""
    epochs = set()
    for seed in range(4):
        order = training_order([range(40)], [1.0], seed=seed)
        epochs |= {tuple(rows_at(order, range(start, start + 40))) for start in range(0, 160, 40)}
    assert len(epochs) == 16


def test_sources_of_equal_length_are_not_shuffled_alike():
    order = training_order([range(60), range(100, 160)], [1.0, 1.0], seed=0)
    rows = rows_at(order, range(120))
    assert [row for row in rows if row < 100] != [row - 100 for row in rows if row >= 100]


@pytest.mark.parametrize(
    "weights", [(1.0,), (0.7, 0.3), (3.0, 1.0, 1.0), (0.001, 1.0), (0.1, 0.2, 0.3, 0.4), (1 / 3, 2 / 3)]
)
def test_proportions_are_exact_at_every_moment(weights):
    chosen = Proportions(weights)
    counts = collections.Counter()
    for position in range(3000):
        source, index = chosen[position]
        assert index == counts[source], "a source's rows are taken in order, none left out"
        counts[source] += 1
        for i, weight in enumerate(weights):
            assert abs(counts[i] - (position + 1) * weight / sum(weights)) < 1 + i


def test_grain_rounds_where_we_do_not():
    chosen = Proportions((0.7, 0.3))
    assert chosen.shares == [7, 3]
    assert collections.Counter(chosen[position][0] for position in range(1000)) == {0: 700, 1: 300}
    assert Proportions((14.0, 6.0)).shares == [7, 3]


def test_each_source_is_repeated_at_its_own_pace():
    order = training_order([range(10), range(100, 200)], [1.0, 1.0], seed=0)
    rows = rows_at(order, range(200))
    assert collections.Counter(row for row in rows if row < 100) == dict.fromkeys(range(10), 10)
    assert sorted(row for row in rows if row >= 100) == list(range(100, 200))
