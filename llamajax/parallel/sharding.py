"""Shardings of arrays with named dims on the mesh; `config/parallel.py` defines which mesh axes split a dim."""

from collections.abc import Iterable
from typing import Any

import jax
from jax import P
from jax.sharding import AbstractMesh, AxisType

from llamajax.config.parallel import AXES, axes_of

ONE_DEVICE = AbstractMesh((1,) * len(AXES), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
"""A mesh for shape queries where no mesh is set."""


def spec(*dims: str | None) -> jax.P:
    """Returns the partition of an array with these dims; `None` for a dim that is not split.

    Raises:
        ValueError: a dim is unknown, or two dims claim the same mesh axis.
    """
    entries: list[tuple[str, ...] | str | None] = []
    owner: dict[str, str | None] = {}
    for dim in dims:
        axes = () if dim is None else axes_of(dim)
        for axis in axes:
            if axis in owner:
                raise ValueError(
                    f"logical axes {owner[axis]!r} and {dim!r} both claim mesh axis {axis!r} in one array {dims};"
                    " write None for one of them"
                )
            owner[axis] = dim
        entries.append(axes[0] if len(axes) == 1 else axes or None)
    return P(*entries)


def axes_in(partitions: Iterable[Any]) -> frozenset[str]:
    """Returns the axes that split an array with these partitions."""
    return frozenset(axis for entry in partitions for axis in as_tuple(entry))


def as_tuple(entry: Any) -> tuple[str, ...]:
    """Returns one dim's partition as a tuple of axes."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
