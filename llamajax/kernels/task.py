"""Parameters of one attention kernel, in either language."""

from typing import Literal, NamedTuple

from llamajax.kernels.tiles import TileSize, num_tiles

Language = Literal["pallas", "triton"]
"""Language of the three kernels: jax's Pallas, or the language of the package `triton`."""
Name = Literal["attention_forward", "attention_backward_queries", "attention_backward_keys"]
"""Kernel names as XLA's schedules and plans show them."""


class Build(NamedTuple):
    """How a kernel is compiled."""

    size: TileSize
    warps: int
    stages: int


class Task(NamedTuple):
    """Parameters that a kernel is compiled for."""

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
    """Programs that share a group when the keys' gradients are summed, each with its own sums."""

    @property
    def size(self) -> TileSize:
        return self.build.size

    @property
    def grid(self) -> tuple[int, int, int]:
        """Number of heads, tiles and rows. The first dim runs fastest, so programs start in this order: for each row the
        longest programs first, for all heads."""
        if self.name == "attention_backward_keys":
            return self.num_kv_heads * self.parts, num_tiles(self.num_keys, self.size.keys), self.rows
        return self.num_kv_heads * self.group, num_tiles(self.num_queries, self.size.queries), self.rows
