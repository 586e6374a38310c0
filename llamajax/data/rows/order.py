"""Order of training rows: a pure function of the seed and the position, on any number of devices and processes."""

import hashlib
import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import grain
import grain.transforms


def training_order(
    sources: Sequence[Sequence[Any]], weights: Sequence[float], seed: int | str, first: int = 0, taken: Sequence[int] = ()
) -> grain.MapDataset:
    """Returns the endless order of all sources: `order[position]` is a row.

    Each source is read in epochs and reshuffled in every epoch. The sources alternate in proportion to their weights. Any
    position can be read at any time, so the state of a run is one integer.

    Args:
        sources: rows of each source, at least one for each source with a weight.
        weights: share of each source relative to the others; 0 leaves it out.
        seed: an integer from 0, or any text.
        first: first position of the order, from which proportions count.
        taken: rows of each source that were used before, so that it continues after them; empty: none.
    """
    has_weight = [index for index, weight in enumerate(weights) if weight]
    shuffled = []
    for index in has_weight:
        # Grain adds the epoch to a seed, so adjacent sources must not get adjacent seeds.
        own_seed = int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "little")
        shuffled.append(grain.MapDataset.source(sources[index]).shuffle(seed=own_seed).repeat())
    proportions = Proportions([weights[index] for index in has_weight])
    before = [taken[index] for index in has_weight] if taken else [0] * len(has_weight)
    return grain.MapDataset.select_from_datasets(shuffled, _GoingOn(proportions, first, before))


class Proportions(grain.transforms.DatasetSelectionMap):
    """Maps a position to a source and a position in it.

    Among the first n positions, source i has its exact share of n, rounded, plus or minus one for each source before it.
    (Grain's own mixture rounds the weights themselves to hundredths of the smallest.)
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]  # the decimal number as written
        unit = Fraction(math.gcd(*(share.numerator for share in exact)), math.lcm(*(share.denominator for share in exact)))
        self.shares = [int(share / unit) for share in exact]

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        # The first source takes its share of the positions, evenly spread. The rest is dealt to the others in the same
        # way. `before` and `after` count the remaining ones among the first `index` and `index + 1` positions.
        before, after = index, index + 1
        rest = sum(self.shares)
        for source, share in enumerate(self.shares):
            left_before = before * (rest - share) // rest
            left_after = after * (rest - share) // rest
            if left_before == left_after:
                return source, before - left_before
            before, after, rest = left_before, left_after, rest - share
        raise AssertionError("the last source takes what is left")

    def counts(self, num_positions: int) -> list[int]:
        """Returns how many of the first positions each source takes."""
        counts, left, rest = [], num_positions, sum(self.shares)
        for share in self.shares:
            left_after = left * (rest - share) // rest if rest else 0
            counts.append(left - left_after)
            left, rest = left_after, rest - share
        return counts


class _GoingOn(grain.transforms.DatasetSelectionMap):
    """Proportions that count from a position, for sources that continue where they were left."""

    def __init__(self, proportions: Proportions, first: int, taken: Sequence[int]) -> None:
        self._proportions, self._first, self._taken = proportions, first, taken

    def __len__(self) -> int:
        return len(self._proportions)

    def __getitem__(self, index: int) -> tuple[int, int]:
        source, number = self._proportions[index - self._first]
        return source, self._taken[source] + number
