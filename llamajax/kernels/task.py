"""What one kernel of attention is asked for, in whichever language it is written."""

from typing import Literal, NamedTuple

from llamajax.kernels.tiles import TileSize, num_tiles

Language = Literal["pallas", "triton"]
"""Of the three kernels: jax's Pallas, or that of the package `triton`."""
Name = Literal["attention_forward", "attention_backward_queries", "attention_backward_keys"]
"""Under which XLA schedules them and plans know them."""


class Build(NamedTuple):
    """How a kernel is compiled."""

    size: TileSize
    warps: int
    stages: int


class Task(NamedTuple):
    """What a kernel is compiled for."""

    name: Name
    build: Build
    rows: int
    num_queries: int
    num_keys: int
    num_kv_heads: int
    group: int
    """Query heads of each kv head."""
    head_dim: int
    scale: float
    window: int | None
    parts: int = 1
    """Programs that share a group where keys' gradients are summed up, each with its own sums."""

    @property
    def size(self) -> TileSize:
        return self.build.size

    @property
    def grid(self) -> tuple[int, int, int]:
        """Heads, tiles and rows. Programs start in this order, whose first dim runs fastest: of each row the longest first,
        of all heads."""
        if self.name == "attention_backward_keys":
            return self.num_kv_heads * self.parts, num_tiles(self.num_keys, self.size.keys), self.rows
        return self.num_kv_heads * self.group, num_tiles(self.num_queries, self.size.queries), self.rows
