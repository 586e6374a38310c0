"""The table from logical axes to mesh axes, and the two things done with it: name a sharding, gather a weight.

Layers speak of logical axes only. Parameters are stored with `embed` over `fsdp` (ZeRO: the optimizer's moments
follow, because they are made from the parameters); activations write `None` for the residual stream's width.
"""

import dataclasses
import difflib
from dataclasses import dataclass

import jax
from jax import P

from llamajax.parallel.axes import AXES


@dataclass(frozen=True, kw_only=True)
class LogicalAxes:
    """The mesh axes that each logical axis is split over, outer to inner."""

    batch: tuple[str, ...] = ("data", "fsdp")
    seq: tuple[str, ...] = ("sequence",)
    embed: tuple[str, ...] = ("fsdp",)
    heads: tuple[str, ...] = ("tensor",)
    kv_heads: tuple[str, ...] = ("tensor",)
    head_dim: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ("tensor",)
    vocab: tuple[str, ...] = ("tensor",)
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for logical, mesh_axes in dataclasses.asdict(self).items():
            for axis in mesh_axes:
                if axis not in AXES:
                    raise ValueError(f"logical axis {logical!r}: {_unknown('mesh axis', axis, AXES)}")


TABLE = LogicalAxes()


def spec(*logical_axes: str | None, table: LogicalAxes = TABLE) -> jax.P:
    """The partition of an array whose dims carry these logical axes; `None` for a dim that is not split.

    Raises:
        ValueError: an axis is unknown, or two dims claim the same mesh axis.
    """
    entries: list[tuple[str, ...] | str | None] = []
    owner: dict[str, str] = {}
    for logical in logical_axes:
        if logical is None:
            entries.append(None)
            continue
        if logical not in LogicalAxes.__dataclass_fields__:
            raise ValueError(_unknown("logical axis", logical, tuple(LogicalAxes.__dataclass_fields__)))
        mesh_axes: tuple[str, ...] = getattr(table, logical)
        for axis in mesh_axes:
            if axis in owner:
                raise ValueError(
                    f"logical axes {owner[axis]!r} and {logical!r} both claim mesh axis {axis!r} in one array"
                    f" {logical_axes}; write None for one of them"
                )
            owner[axis] = logical
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return P(*entries)


@jax.named_scope("gather_weight")
def gather(weight: jax.Array, *logical_axes: str | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A copy of a stored weight for compute: cast to `dtype` first, then laid out by `logical_axes`.

    The order makes the collective carry the narrow copy, and its transpose reduce gradients in it too. The copy is
    marked as reduced over the axes that split the tokens, so that its gradient is summed over all of them at the end:
    scattered over the axes it is stored on, then added up over the others, which so carry only a device's own part.
    """
    stored = jax.typeof(weight).sharding.spec
    token_axes = frozenset(TABLE.batch + TABLE.seq)
    own_axes = {axis for entry in stored for axis in (entry if isinstance(entry, tuple) else (entry,))}
    own_part = jax.reshard(weight.astype(dtype), P(*stored, reduced=token_axes - own_axes))
    return jax.reshard(own_part, P(*spec(*logical_axes), reduced=token_axes))


def _unknown(what: str, name: str, known: tuple[str, ...]) -> str:
    guesses = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {guesses[0]!r}?" if guesses else ""
    return f"unknown {what} {name!r}{hint} (known: {', '.join(known)})"
