"""The rule for layers that keep their values equals its formula, and more bandwidth never keeps more."""

import numpy as np
import pytest

from llamajax.estimates.nvme import SECONDS_PER_YEAR, first_kept, life_s, needed_bandwidth, yearly_bytes


def literal(V, T, bandwidth):
    """The first n of which the formula holds, every sum written out."""
    for n in range(len(V)):
        if (sum(V[m] for m in range(n)) + 2 * V[n]) / (3 * sum(T) - 2 * sum(T[m] for m in range(n))) > bandwidth:
            return n
    return len(V)


def random_case(rng):
    layers = int(rng.integers(1, 40))
    V, T = rng.uniform(0.1, 4, layers), rng.uniform(0.1, 2, layers)
    return list(V), list(T), sum(V) / sum(T) * rng.uniform(0.05, 1.5)


def test_the_rule_is_the_formula():
    rng, found = np.random.default_rng(0), []
    for _ in range(300):
        V, T, bandwidth = random_case(rng)
        found.append(first_kept(V, T, bandwidth) / len(V))
        assert first_kept(V, T, bandwidth) == literal(V, T, bandwidth)
    assert min(found) == 0
    assert max(found) == 1
    assert sum(0 < share < 1 for share in found) > 50


def test_more_bandwidth_never_keeps_more():
    rng = np.random.default_rng(1)
    for _ in range(50):
        V, T, bandwidth = random_case(rng)
        kept = [first_kept(V, T, factor * bandwidth) for factor in np.linspace(0.1, 4, 20)]
        assert kept == sorted(kept)


@pytest.mark.parametrize(("gigabytes", "step_s"), [(7.5, 1.24), (60.0, 12.0)])
def test_a_disk_lives_as_long_as_its_endurance(gigabytes, step_s):
    """Its life, bytes per step, and bandwidth in bytes per second fit together."""
    size = 1e9 * gigabytes
    assert needed_bandwidth(size, step_s) == pytest.approx(2 * size / step_s)
    assert life_s(yearly_bytes(size, step_s), size, step_s) == pytest.approx(SECONDS_PER_YEAR)
    assert life_s(3e15, size, step_s) == pytest.approx(3e15 / (needed_bandwidth(size, step_s) / 2))
