"""The cost of attention: the kernel that computes it on the planned GPUs, and the number of scores that it computes."""

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
    """Computed scores of attention by kernels that skip unseen tiles, on average per query, head and layer."""

    by_queries: float
    """Scores forward, and backward for the queries, in llamajax's own kernels."""
    by_keys: float
    """Scores backward for the keys and values, and for the queries in tokamax's kernels."""


_TOKAMAX_TILE = TileSize(128, 128)
"""Tile of tokamax's kernels, by its own rule for heads of 128 on Hopper: two of 64 at once, of queries or of keys."""


def planned_kernel(run: ResolvedRun) -> tuple[Kernel, str]:
    """Returns the kernel that computes attention in training on the GPUs of the run's `hardware`, and the reason.

    Raises:
        ConfigError: the requested kernel cannot compute this attention.
    """
    assert run.gpu is not None
    model, form = run.config.model, run.config.parallel.sequence
    site = Site.of(model, run.mesh, form, is_gpu=True, capability=run.gpu.compute_capability)
    return choose(model.attention_kernel, site)


def computed_scores(run: ResolvedRun) -> Scores | None:
    """Returns the scores in whole tiles on the device with the most to compute; None: the kernel does not skip tiles."""
    (kernel, _), config = planned_kernel(run), run.config
    if kernel == "tokamax":
        # Its backward pass skips later keys of the row, but neither other documents nor keys beyond the window.
        return Scores(_mean(run.config, _TOKAMAX_TILE, 1), (config.data.seq_len + _TOKAMAX_TILE.keys) / 2)
    if kernel not in ("pallas", "triton"):
        return None
    parts = num_parts("seq", run.mesh)
    length = config.data.seq_len // parts
    own = sizes(length, config.data.seq_len, config.model.head_dim)
    return Scores(_mean(run.config, own.for_queries, parts), _mean(run.config, TileSize(*reversed(own.for_keys)), parts))


def scores_of_calls(run: ResolvedRun) -> Scores | None:
    """Returns the computed scores of each kernel call: around a ring a device's early and late queries see 2 n + 1 halves of
    keys."""
    scores = computed_scores(run)
    if scores is None or run.config.parallel.sequence != "ring":
        return scores
    parts = num_parts("seq", run.mesh)
    return Scores(*(2 * each / (2 * parts + 1) for each in scores)) if parts > 1 else scores


class Grid(NamedTuple):
    """Numbers of programs of an attention kernel; each program has a core to itself."""

    heads: int
    tiles: int
    rows: int


@functools.lru_cache(maxsize=1024)
def busy_share(grid: Grid, mean: float, most: float, cores: int) -> float:
    """Returns the average share of a kernel's time in which a core computes: a program starts when another ends, the longest
    of a row first (`llamajax.kernels.tiles.Tiles`).

    Args:
        grid: programs of the kernel.
        mean: mean length of a program, in any unit; lengths are spread evenly around it.
        most: length of the longest program; for causal rows twice the mean, for blocks that are seen whole the mean.
        cores: number of the GPU's cores.
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
"""Programs per core from which the wait for the last program is negligible."""


def _mean(config: Config, tile: TileSize, parts: int) -> float:
    kinds = kinds_of_layers(config.model)
    return sum(share * _mean_of_kind(alike, config, tile, parts) for alike, share in kinds)


def _mean_of_kind(model: ModelConfig, config: Config, tile: TileSize, parts: int) -> float:
    """Returns the mean number of scores per query of a tile. Where keys are gathered, the last of the `parts` of a row sees
    the most; a ring and an exchange of heads share the work evenly."""
    seq_len = config.data.seq_len
    begin = seq_len - seq_len // parts if config.parallel.sequence == "gather" else 0
    total, firsts = 0.0, range(begin, seq_len, tile.queries)
    for first in firsts:
        before = keys_seen(model, first, config.data.mean_document_length)
        # Where the visible keys begin within a tile, half a tile more on average.
        total += min(first, before + (tile.keys / 2 if before < first else 0)) + tile.queries
    return total / num_tiles(seq_len - begin, tile.queries)
