"""Tests of llamajax.estimates.partition."""

import hypothesis
import pytest
from hypothesis import strategies

from llamajax.errors import ConfigError
from llamajax.estimates.partition import partition


@pytest.mark.parametrize(
    ("num_layers", "speeds", "layers"),
    [
        (48, (197, 160), [26, 22]),  # Holmes' example, by its four-node rows over InfiniBand and RoCE
        (48, (1, 1), [24, 24]),
        (7, (1, 1), [3, 4]),
        (50, (1, 1, 1, 1), [12, 12, 13, 13]),
        (4, (100, 1, 1), [2, 1, 1]),
        (3, (100, 1, 1), [1, 1, 1]),
    ],
)
def test_layers_are_in_proportion_to_speeds(num_layers, speeds, layers):
    assert partition(num_layers, speeds) == layers


@hypothesis.given(
    strategies.lists(strategies.floats(0.01, 100), min_size=1, max_size=9),
    strategies.integers(0, 120),
    strategies.integers(0, 20),
)
def test_every_layer_has_one_stage_and_every_stage_a_layer(speeds, more, room):
    num_layers = len(speeds) + more
    most = -(-num_layers // len(speeds)) + room
    layers = partition(num_layers, speeds, most)
    assert sum(layers) == num_layers
    assert all(1 <= own <= most for own in layers)
    free = partition(num_layers, speeds)
    if all(num_layers * speed >= sum(speeds) for speed in speeds):
        assert all(abs(own - num_layers * speed / sum(speeds)) < 1 for own, speed in zip(free, speeds, strict=True))


def test_stages_that_cannot_hold_the_layers_are_refused_in_one_line():
    assert partition(48, (197, 160), most=25) == [25, 23]
    with pytest.raises(ConfigError, match=r"^mesh.pipeline: 2 stages hold 1 to 23 layers each, but model.num_layers=48;"):
        partition(48, (197, 160), most=23)
    with pytest.raises(ConfigError, match=r"^mesh.pipeline: 3 stages .* set other stages$"):
        partition(2, (1, 1, 1))
