"""Parts of a batch take turns: while the arrays of one part travel between devices, devices compute with another part.

XLA by itself starts next to none of a layer's all-to-alls early. Barriers that close time slots leave it no choice: in each
slot, every part is at another stage of its way.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Stage = Callable[[Any, Any], tuple[Any, Any]]
"""A stage of the way: a function from what moves on and what stays behind to both after the stage. Barriers hold what moves,
a tree of floating-point arrays; what stays is used by later stages of the same part."""


def in_time_slots(stages: Sequence[Stage], parts: Sequence[tuple[Any, Any]], *, held: int) -> list[tuple[Any, Any]]:
    """Returns what the stages, one after the other, make of each part. In slot t, stage s has part t - s.

    Args:
        stages: the stages.
        parts: what moves and what stays behind at the start, of each part.
        held: number of stages whose results barriers hold to the end of their slot. A backward pass that needs no result of
            the others again leaves them out.
    """
    states, last = list(parts), len(stages) - 1
    for slot in range(len(parts) + last):
        for number, stage in enumerate(stages):
            if 0 <= slot - number < len(parts):
                states[slot - number] = stage(*states[slot - number])
        on_their_way = range(max(0, slot - held + 1), min(len(parts), slot + 2))
        if len(parts) > 1 and on_their_way:
            moving = jax.lax.optimization_barrier([states[part][0] for part in on_their_way])
            for part, own in zip(on_their_way, moving, strict=True):
                states[part] = own, states[part][1]
    return states


def part_sizes(rows: int, count: int) -> tuple[int, ...]:
    """Returns the rows of each of `count` parts of a device's rows. The last part has about half as many as others: what it
    sends back at the end has no other part's work beside it, and neither has the gradient of that."""
    last = max(1, rows // (2 * count - 1)) if count > 1 else rows
    others = count - 1
    return (*((rows - last) // others + (part < (rows - last) % others) for part in range(others)), last)


def split_rows(tree: Any, count: int) -> list[Any]:
    """Returns `count` trees with parts of each device's rows, in their order and of `part_sizes`; nothing is sent. The first
    array is [B, ...]; arrays without so many rows go to every part."""
    leaves, structure = jax.tree.flatten(tree)
    cut = [_split(leaf, count) if leaf.shape[:1] == leaves[0].shape[:1] else (leaf,) * count for leaf in leaves]
    return [structure.unflatten([pieces[part] for pieces in cut]) for part in range(count)]


def joined_rows(trees: Sequence[Any]) -> Any:
    """Reverts `split_rows`."""
    return jax.tree.map(_joined, *trees) if len(trees) > 1 else trees[0]


def _split(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    if count == 1:
        return (x,)
    lies = jax.typeof(x).sharding.spec

    def on_device(x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.split(x, list(itertools.accumulate(part_sizes(len(x), count)))[:-1]))

    return jax.shard_map(on_device, in_specs=lies, out_specs=(lies,) * count)(x)


def _joined(*parts: jax.Array) -> jax.Array:
    lies = jax.typeof(parts[0]).sharding.spec
    return jax.shard_map(lambda *parts: jnp.concatenate(parts), in_specs=(lies,) * len(parts), out_specs=lies)(*parts)
