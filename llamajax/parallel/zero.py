"""ZeRO: what a device keeps of a weight, what it computes with, and how gradients come back to who keeps them.

A weight says once how it is stored and how it is laid out for compute. Stored with a dim over `fsdp`, it is whole on no
device, and neither are the optimizer's moments, which are made from it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax import P
from jax.typing import DTypeLike

from llamajax.config.parallel import axes_of
from llamajax.parallel.sharding import spec

Tree = TypeVar("Tree")
Dims = tuple[str | None, ...]


def weight(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    stored: Dims,
    compute: Dims | None,
    init: Callable[..., jax.Array],
    arrange: Callable[[jax.Array, DTypeLike], jax.Array] | None = None,
) -> nnx.Param:
    """A parameter with its initial value, of which each device makes its own part.

    Args:
        shape: of the whole.
        dtype: that it is stored in.
        stored: its dims as it lies between steps, for `spec`.
        compute: its dims as it is gathered for compute; None: it is read as it is stored, in its own dtype.
        init: makes the value from shape, dtype and `out_sharding`, such as `jnp.ones`.
        arrange: makes of the stored array another one, of the given dtype, that is gathered in its place.
    """
    return nnx.Param(init(shape, dtype, out_sharding=spec(*stored)), compute=compute, arrange=arrange)


def gathered(tree: Tree, dtype: DTypeLike) -> Tree:
    """The same module, or other tree of `weight`s, with copies for compute: cast to `dtype`, then laid out as they say.

    The order makes the collective carry the narrow copy, and its transpose reduce gradients in it too. A copy is marked as
    reduced over the axes that split the tokens, so that its gradient is summed over all of them at the end: scattered over
    the axes it is stored on, then added up over the others, which so carry only a device's own part.
    """
    token_axes = frozenset(axes_of("batch") + axes_of("seq"))

    def gather(path: tuple[Any, ...], param: nnx.Param) -> nnx.Param:
        if param.compute is None:
            return param
        name = [key.name for key in path[:-1] if isinstance(key, jax.tree_util.GetAttrKey)]
        with jax.named_scope("/".join([*name, "gather_weight"])):
            own = param[...].astype(dtype) if param.arrange is None else param.arrange(param[...], dtype)
            stored = jax.typeof(own).sharding.spec
            own_axes = {axis for entry in stored for axis in (entry if isinstance(entry, tuple) else (entry,))}
            own_part = jax.reshard(own, P(*stored, reduced=token_axes - own_axes))
            copy = jax.reshard(own_part, P(*spec(*param.compute), reduced=token_axes))
            return nnx.Param(copy, compute=param.compute, arrange=None)

    return jax.tree_util.tree_map_with_path(gather, tree, is_leaf=lambda node: isinstance(node, nnx.Param))
