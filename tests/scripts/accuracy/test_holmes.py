"""Tests of scripts.accuracy.holmes: the cost model on unlike networks, calibrated on runs of four nodes only."""

import pytest

from llamajax.estimates.partition import partition
from scripts.accuracy import holmes


@pytest.fixture(scope="module")
def bandwidths():
    return holmes.fitted_bandwidths()


def on_eight_nodes(bandwidth: float) -> float:
    return holmes.predicted(8, (bandwidth, bandwidth), bandwidth)


def test_four_nodes_are_met_and_eight_predicted_within_a_fifth(bandwidths):
    for network, published in holmes.FOUR_NODES.items():
        own = bandwidths[network]
        assert holmes.predicted(4, (own, own), own) == pytest.approx(published, rel=1e-4)
        assert on_eight_nodes(own) == pytest.approx(holmes.EIGHT_NODES[network], rel=0.2)


def test_two_networks_together_are_nearly_as_fast_as_fast_ones_and_faster_than_ethernet(bandwidths):
    layers = partition(30, (holmes.FOUR_NODES["InfiniBand"], holmes.FOUR_NODES["RoCE"]))
    assert layers == [17, 13]
    both = (bandwidths["InfiniBand"], bandwidths["RoCE"])
    hybrid = holmes.predicted(8, both, bandwidths["Ethernet"], layers)
    alone = {network: on_eight_nodes(own) for network, own in bandwidths.items()}
    assert 0.9 * alone["RoCE"] <= hybrid <= alone["InfiniBand"]
    assert hybrid <= holmes.EIGHT_NODES["InfiniBand"]
    assert hybrid >= 1.2 * max(alone["Ethernet"], holmes.EIGHT_NODES["Ethernet"])
    assert hybrid > 1.1 * holmes.predicted(8, both, bandwidths["Ethernet"]), "layers in proportion pay"


def test_a_larger_model_on_both_networks_is_predicted_within_a_tenth(bandwidths):
    both = (bandwidths["InfiniBand"], bandwidths["RoCE"])
    layers = partition(36, (holmes.FOUR_NODES["InfiniBand"], holmes.FOUR_NODES["RoCE"]))
    own = holmes.predicted(8, both, bandwidths["Ethernet"], layers, holmes.GPT_7_5B, 2 * holmes.BATCH)
    assert own == pytest.approx(holmes.HYBRID_7_5B, rel=0.1)


@pytest.mark.parametrize("rows", [512, 1536])
def test_predictions_hardly_depend_on_the_assumed_rows_per_step(rows, bandwidths):
    usual = on_eight_nodes(bandwidths["RoCE"])
    low, high = 1e8, 1e12
    while high / low > 1 + 1e-6:
        middle = (low * high) ** 0.5
        speed = holmes.predicted(4, (middle, middle), middle, rows=rows)
        low, high = (middle, high) if speed < holmes.FOUR_NODES["RoCE"] else (low, middle)
    assert holmes.predicted(8, (high, high), high, rows=rows) == pytest.approx(usual, rel=0.01)
