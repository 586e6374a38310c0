"""Layers of the stages of a pipeline in proportion to their speeds."""

import math
from collections.abc import Sequence

from llamajax.errors import ConfigError


def partition(num_layers: int, speeds: Sequence[float], most: int | None = None) -> list[int]:
    """Returns the number of layers of every stage: at least one, in proportion to the stages' speeds.

    A stage has the whole part of its share. The layers that are left go to the stages with the largest fractions, of equal
    ones to the last, as in Holmes (arXiv:2312.03549), where with two stages all of them go to the last.

    Args:
        num_layers: layers of all stages.
        speeds: speeds of the stages, in any unit.
        most: layers that the memory of a stage holds; None: all.

    Raises:
        ConfigError: the stages are more than the layers, or cannot hold them.
    """
    stages, most = len(speeds), num_layers if most is None else most
    if not stages <= num_layers <= stages * most:
        room = f"hold 1 to {most} layers each"
        raise ConfigError(f"mesh.pipeline: {stages} stages {room}, but model.num_layers={num_layers}; set other stages")
    shares = [num_layers * speed / sum(speeds) for speed in speeds]
    layers = [min(max(math.floor(share), 1), most) for share in shares]

    def missing(stage: int) -> tuple[float, int]:
        return shares[stage] - layers[stage], stage

    while sum(layers) < num_layers:
        layers[max((stage for stage in range(stages) if layers[stage] < most), key=missing)] += 1
    while sum(layers) > num_layers:
        layers[min((stage for stage in range(stages) if layers[stage] > 1), key=missing)] -= 1
    return layers
