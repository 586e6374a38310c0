"""The choice of what waits in host memory equals a search through all choices, and MEMO's closed form."""

import dataclasses
import itertools

import numpy as np
import pytest

from llamajax.config.offload import BY_TOKEN, ActivationName
from llamajax.estimates.offload import LayerCosts, Limits, best, hidden_fraction, placed

GIB = 2**30
NAMES = ("input", "residual", "attention", "qkv", "gate_up")


def random_case(rng):
    """Costs and limits of the same order, so that every limit binds in some cases."""
    names = NAMES[: rng.integers(1, 6)]
    sizes: dict[ActivationName, float] = {name: rng.uniform(0.1, 4) for name in names}
    costs = LayerCosts(
        forward_s=rng.uniform(0.1, 2),
        backward_s=rng.uniform(0.1, 4),
        sizes=sizes,
        again_s={name: rng.uniform(0, 1) for name in names if name in BY_TOKEN},
        parting_s=rng.choice([0.0, rng.uniform(0, 0.1)]),
        weight_bytes=rng.choice([0.0, rng.uniform(0, 4)]),
    )
    layers = int(rng.integers(1, 12))
    need = layers * sum(sizes.values())
    limits = Limits(
        layers=layers,
        staying=int(rng.integers(1, 3)),
        bandwidth=rng.uniform(1, 20),
        card_bytes=need * rng.uniform(0, 1.2),
        host_bytes=need * rng.uniform(0, 1.2),
    )
    return costs, limits


def searched(costs, limits, steps=400):
    """The least time of all layers, among all values and `steps` shares of tokens; infinite if nothing fits."""
    return min(
        (
            choice.layers_s
            for count in range(len(costs.sizes) + 1)
            for names in itertools.combinations(costs.sizes, count)
            for fraction in (np.arange(steps + 1) / steps if set(names) & set(BY_TOKEN) else [1.0])
            if (choice := placed(costs, limits, names, fraction)).card_bytes <= limits.card_bytes
            and choice.host_bytes <= limits.host_bytes
        ),
        default=np.inf,
    )


@pytest.mark.parametrize("seed", range(10))
def test_no_choice_of_a_search_is_better(seed):
    """Of 1,000 cases; the search has steps, so its best may be worse by what one step costs."""
    rng = np.random.default_rng(seed)
    bound = {"nothing": 0, "fraction": 0, "all": 0}
    for _ in range(100):
        costs, limits = random_case(rng)
        found, least = best(costs, limits), searched(costs, limits, 20)
        if found is None:
            assert least == np.inf
            bound["nothing"] += 1
            continue
        assert found == placed(costs, limits, found.names, found.fraction)
        assert found.card_bytes <= 1.000001 * limits.card_bytes
        assert found.host_bytes <= 1.000001 * limits.host_bytes
        assert found.layers_s <= least * (1 + 1e-9)
        bound["fraction" if found.fraction < 1 else "all"] += 1
    assert min(bound.values()) > 3


def test_a_fine_search_finds_no_worse():
    """The steps of a search approach the exact choice from above."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        costs, limits = random_case(rng)
        found, least = best(costs, limits), searched(costs, limits, 2000)
        slope = limits.layers * 2 * (sum(costs.sizes.values()) / limits.bandwidth + sum(costs.again_s.values()))
        if found is not None and least < np.inf:
            assert least <= found.layers_s + slope / 2000 + 1e-12


def memos_layer(host_bytes):
    """Of the GPT of MEMO with 7B at 1 Mi tokens on eight GPUs: 16 values of 8 GiB, two of which are always saved whole."""
    unit = 8 * GIB
    costs = LayerCosts(
        forward_s=100.0, backward_s=200.0, sizes={"input": unit, "attention": unit, "gate_up": 14 * unit},
        again_s={"gate_up": 10.0}, parting_s=0.0,
    )  # fmt: skip
    return costs, Limits(layers=32, staying=2, bandwidth=8 * 10e9, card_bytes=8 * 20e9, host_bytes=host_bytes)


def test_memos_own_case():
    costs, limits = memos_layer(2048 * GIB)
    assert hidden_fraction(costs, limits, ("input", "attention", "gate_up")) == pytest.approx(0.467, abs=5e-4)
    found = best(costs, limits)
    assert found is not None
    assert found.names == ("input", "attention", "gate_up")
    assert found.fraction == pytest.approx(0.467, abs=5e-4)
    assert found.host_bytes == pytest.approx(2048 * GIB)


def test_with_enough_memory_the_link_is_the_limit():
    costs, limits = memos_layer(10_000 * GIB)
    slow = Limits(**{**vars(limits), "bandwidth": 4 * 8 * GIB / 100.0})
    assert hidden_fraction(costs, limits, ("input", "attention", "gate_up")) == 1.0
    assert hidden_fraction(costs, slow, ("input", "attention", "gate_up")) == pytest.approx((4 - 2) / 14)


def test_values_of_all_tokens_or_none_wait_where_tokens_cannot_be_parted():
    costs, limits = memos_layer(2048 * GIB)
    whole = dataclasses.replace(costs, is_divisible=False)
    assert hidden_fraction(whole, limits, ("input", "attention", "gate_up")) == 1.0
    assert best(whole, limits) is None
    roomy = Limits(**{**vars(limits), "host_bytes": 10_000 * GIB, "card_bytes": 300 * GIB})
    found = best(whole, roomy)
    assert found is not None
    assert found.fraction == 1.0


def test_where_all_fits_nothing_is_sent():
    costs, limits = memos_layer(2048 * GIB)
    roomy = Limits(**{**vars(limits), "card_bytes": 32 * 16 * 8 * GIB})
    found = best(costs, roomy)
    assert found is not None
    assert (found.names, found.host_bytes) == ((), 0)
