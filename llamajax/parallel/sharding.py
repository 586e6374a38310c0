"""How an array whose dims have names lies on the mesh, and how a weight is gathered for compute.

Which mesh axes split a dim stands in `config/parallel.py`. Weights are stored with `embed` over `fsdp` (ZeRO: the
optimizer's moments follow, because they are made from the weights); activations write `None` for that dim.
"""

import jax
from jax import P

from llamajax.config.parallel import axes_of


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


@jax.named_scope("gather_weight")
def gather(weight: jax.Array, *logical_axes: str | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A copy of a stored weight for compute: cast to `dtype` first, then laid out by `logical_axes`.

    The order makes the collective carry the narrow copy, and its transpose reduce gradients in it too. The copy is
    marked as reduced over the axes that split the tokens, so that its gradient is summed over all of them at the end:
    scattered over the axes it is stored on, then added up over the others, which so carry only a device's own part.
    """
    stored = jax.typeof(weight).sharding.spec
    token_axes = frozenset(axes_of("batch") + axes_of("seq"))
    own_axes = {axis for entry in stored for axis in (entry if isinstance(entry, tuple) else (entry,))}
    own_part = jax.reshard(weight.astype(dtype), P(*stored, reduced=token_axes - own_axes))
    return jax.reshard(own_part, P(*spec(*logical_axes), reduced=token_axes))
