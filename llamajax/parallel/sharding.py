"""How an array whose dims have names lies on the mesh; which mesh axes split a dim stands in `config/parallel.py`."""

from collections.abc import Iterable
from typing import Any

import jax
from jax import P
from jax.sharding import AbstractMesh, AxisType

from llamajax.config.parallel import AXES, axes_of

ONE_DEVICE = AbstractMesh((1,) * len(AXES), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
"""A mesh to ask for shapes on, where there is none."""


def spec(*dims: str | None) -> jax.P:
    """The partition of an array with these dims; `None` for one that is not split.

    Raises:
        ValueError: a dim is unknown, or two claim the same mesh axis.
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
    """The axes over which these partitions of an array split it."""
    return frozenset(axis for entry in partitions for axis in as_tuple(entry))


def as_tuple(entry: Any) -> tuple[str, ...]:
    """One dim's partition."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
