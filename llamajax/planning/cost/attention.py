"""What attention takes: which kernel computes it on the planned GPUs, and how much of the scores."""

import functools
import heapq
from typing import NamedTuple

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import num_parts
from llamajax.config.run import Config
from llamajax.estimates.formulas import keys_seen, kinds_of_layers
from llamajax.kernels.choice import Kernel, Site, choose
from llamajax.kernels.pallas import sizes
from llamajax.kernels.tiles import TileSize, num_tiles
from llamajax.step.resolve import ResolvedRun


class Scores(NamedTuple):
    """Of attention, on average for each query, head and layer: what kernels compute that skip what is not seen."""

    by_queries: float
    """Forward; and backward for the queries, of llamajax's own kernels."""
    by_keys: float
    """Backward for the keys and values; and for the queries, of tokamax's."""


_TOKAMAX_TILE = TileSize(128, 128)
"""Of tokamax's kernels, by its own rule for heads of 128 on Hopper: two of 64 at once, of queries or of keys."""


def planned_kernel(run: ResolvedRun) -> tuple[Kernel, str]:
    """That computes attention in training on the GPUs of the run's `hardware`; and why.

    Raises:
        ConfigError: the one that is asked for cannot.
    """
    assert run.gpu is not None
    model, form = run.config.model, run.config.parallel.sequence
    site = Site.of(model, run.mesh, form, is_gpu=True, capability=run.gpu.compute_capability)
    return choose(model.attention_kernel, site)


def computed_scores(run: ResolvedRun) -> Scores | None:
    """Of whole tiles, on the device that has most to compute; None: the kernel is none that skips tiles."""
    (kernel, _), config = planned_kernel(run), run.config
    if kernel == "tokamax":
        # Its backward pass skips what comes later in the row, but neither other documents nor what no window reaches.
        return Scores(_mean(run.config, _TOKAMAX_TILE, 1), (config.data.seq_len + _TOKAMAX_TILE.keys) / 2)
    if kernel not in ("pallas", "triton"):
        return None
    parts = num_parts("seq", run.mesh)
    length = config.data.seq_len // parts
    own = sizes(length, config.data.seq_len, config.model.head_dim)
    return Scores(_mean(run.config, own.for_queries, parts), _mean(run.config, TileSize(*reversed(own.for_keys)), parts))


def scores_of_calls(run: ResolvedRun) -> Scores | None:
    """The same, of each call of a kernel: around a ring a device's early and late queries see 2 n + 1 halves of keys."""
    scores = computed_scores(run)
    if scores is None or run.config.parallel.sequence != "ring":
        return scores
    parts = num_parts("seq", run.mesh)
    return Scores(*(2 * each / (2 * parts + 1) for each in scores)) if parts > 1 else scores


class Grid(NamedTuple):
    """Of the programs of an attention kernel, each of which has a core to itself."""

    heads: int
    tiles: int
    rows: int


@functools.lru_cache(maxsize=1024)
def busy_share(grid: Grid, mean: float, most: float, cores: int) -> float:
    """Of the time that a kernel takes, the share in which a core computes, on average: a program starts where one ends, the
    longest of a row first (`llamajax.kernels.tiles.Tiles`).

    Args:
        grid: its programs.
        mean: length of a program, in whatever unit; lengths lie evenly around it.
        most: no program is longer; causal rows come to twice the mean, blocks that are seen whole to the mean.
        cores: of the GPU.
    """
    if grid.heads * grid.tiles * grid.rows > _MANY * cores:
        return 1.0
    longest = max(mean, min(most, 2 * mean))
    step = 2 * (longest - mean) / max(grid.tiles - 1, 1)
    ends = [0.0] * cores
    for _ in range(grid.rows):
        for tile in range(grid.tiles):
            for _ in range(grid.heads):
                heapq.heapreplace(ends, ends[0] + longest - step * tile)
    return sum(ends) / (cores * max(ends))


_MANY = 64
"""Programs of a core: what waits for the last of more is less than can be told."""


def _mean(config: Config, tile: TileSize, parts: int) -> float:
    kinds = kinds_of_layers(config.model)
    return sum(share * _mean_of_kind(alike, config, tile, parts) for alike, share in kinds)


def _mean_of_kind(model: ModelConfig, config: Config, tile: TileSize, parts: int) -> float:
    """Of a tile's queries. The last of `parts` that rows are split into have most to see where keys are gathered; a ring and
    an exchange of heads share the work out."""
    seq_len = config.data.seq_len
    begin = seq_len - seq_len // parts if config.parallel.sequence == "gather" else 0
    total, firsts = 0.0, range(begin, seq_len, tile.queries)
    for first in firsts:
        before = keys_seen(model, first, config.data.mean_document_length)
        # Where what is seen begins within a tile, half of that one more on average.
        total += min(first, before + (tile.keys / 2 if before < first else 0)) + tile.queries
    return total / num_tiles(seq_len - begin, tile.queries)
