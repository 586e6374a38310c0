"""Saved values: a layer's forward pass makes them for its backward pass; meanwhile they are on card or host."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from llamajax.parallel.sharding import as_tuple

Policy = Callable[..., bool]
"""A policy of `jax.checkpoint`: whether the backward pass finds the results of a primitive saved."""


class Names(NamedTuple):
    """Names of the values that a part of a layer saves."""

    of_input: str
    """Name of the part's input."""
    of_others: str
    """Name of the values without a checkpoint name."""


@partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["tree", "places"])
@dataclass(frozen=True)
class Kept:
    """A pull-back (`jax.vjp`) without the arrays that are available again when it is called."""

    leaves: tuple[jax.Array, ...]
    tree: Any
    """Tree structure of the pull-back."""
    places: tuple[int | None, ...]
    """For each array of the pull-back its index among the available arrays, or None if it is the next of `leaves`."""

    @staticmethod
    def of(pull_back: Any, at_hand: Any) -> "Kept":
        place_of = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(at_hand))}
        leaves, tree = jax.tree.flatten(pull_back)
        places = tuple(place_of.get(id(leaf)) for leaf in leaves)
        return Kept(tuple(leaf for leaf, place in zip(leaves, places, strict=True) if place is None), tree, places)

    def pull_back(self, at_hand: Any) -> Any:
        again, kept = jax.tree.leaves(at_hand), iter(self.leaves)
        return jax.tree.unflatten(self.tree, [next(kept) if place is None else again[place] for place in self.places])


Kind = tuple[tuple[int, ...], Any]
"""Shape of a device's part of an array, and its dtype: the same within `shard_map` and outside."""


def kind_of(x: Any) -> Kind:
    """Returns the kind of what `jax.typeof` returns for an array."""
    sizes, lies = x.sharding.mesh.shape, x.sharding.spec.partitions
    parts = [math.prod(sizes[axis] for axis in as_tuple(entry)) for entry in lies]
    return tuple(dim // count for dim, count in zip(x.shape, parts, strict=True)), x.dtype


def noting(saved: Policy, named: dict[Kind, set[str]]) -> Policy:
    """Returns the same policy, which notes the checkpoint names of the values that it saves, by their kind."""

    def policy(primitive: Any, *values: Any, **params: Any) -> Any:
        is_saved = saved(primitive, *values, **params)
        if is_saved and primitive.name == "name":
            named.setdefault(kind_of(values[0]), set()).add(params["name"])
        return is_saved

    return policy


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Away:
    """A saved value that waits in host memory between the two passes of its layer."""

    value: jax.Array


def _is_away(node: Any) -> bool:
    return isinstance(node, Away)


def marked(saved: Any, goes_away: Callable[[jax.Array], bool]) -> Any:
    """Returns saved values with those that wait in host memory marked as `Away`."""
    return jax.tree.map(lambda leaf: Away(leaf) if goes_away(leaf) else leaf, saved)


def unmarked(saved: Any) -> Any:
    """Reverts `marked`."""
    return jax.tree.map(lambda node: node.value if _is_away(node) else node, saved, is_leaf=_is_away)


def parted(saved: Any) -> tuple[list[Any], list[Any]]:
    """Returns the saved values that stay on the card, and those that do not."""
    nodes = jax.tree.leaves(saved, is_leaf=_is_away)
    return [node for node in nodes if not _is_away(node)], [node.value for node in nodes if _is_away(node)]


def joined(like: Any, staying: Sequence[Any], away: Sequence[Any]) -> Any:
    """Reverts `parted` for saved values marked like `like`."""
    on_card, elsewhere = iter(staying), iter(away)
    return jax.tree.map(lambda node: Away(next(elsewhere)) if _is_away(node) else next(on_card), like, is_leaf=_is_away)
