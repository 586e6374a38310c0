"""ZeRO: what a device keeps of a weight, what it computes with, and how gradients come back to who keeps them.

A weight says once how it is stored and how it is laid out for compute. Stored with a dim over `fsdp`, it is whole on no
device, and neither are the optimizer's moments, which are made from it.
"""

from collections.abc import Callable
from functools import partial
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
        stored: its dims as it is stored, for `spec`.
        compute: its dims as it is gathered for compute; None: it is read as it is stored, in its own dtype.
        init: makes the value from shape, dtype and `out_sharding`, such as `jnp.ones`.
        arrange: makes of the stored array another one, of the given dtype, that is gathered in its place.
    """
    return nnx.Param(init(shape, dtype, out_sharding=spec(*stored)), stored=stored, compute=compute, arrange=arrange)


def gathered(tree: Tree, dtype: DTypeLike, copies: Tree | None = None) -> Tree:
    """The same module, or other tree of `weight`s, with copies for compute: cast to `dtype`, then laid out as they say.

    The order makes the collective carry the narrow copy, and its transpose reduce gradients in it too. A copy is marked as
    reduced over the axes that split the tokens, so that its gradient is summed over all of them at the end: scattered over
    the axes it is stored on, then added up over the others, which so carry only a device's own part. What is gathered
    already stays as it is.

    Args:
        tree: the weights.
        dtype: of the copies.
        copies: the copies, where they were made before; `tree` gets their gradient all the same.
    """
    return _gather(tree, dtype) if copies is None else _as_if_gathered(dtype, tree, copies)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _as_if_gathered(dtype: DTypeLike, tree: Any, copies: Any) -> Any:
    return copies


def _pull_back_gathering(dtype: DTypeLike, tree: Any, gradients: Any) -> tuple[Any, None]:
    return jax.vjp(partial(_gather, dtype=dtype), tree)[1](gradients)[0], None


_as_if_gathered.defvjp(lambda dtype, tree, copies: (copies, tree), _pull_back_gathering)


def _gather(tree: Tree, dtype: DTypeLike) -> Tree:
    def gather(path: tuple[Any, ...], param: nnx.Param) -> nnx.Param:
        if param.compute is None:
            return param
        name = [key.name for key in path[:-1] if isinstance(key, jax.tree_util.GetAttrKey)]
        with jax.named_scope("/".join([*name, "gather_weight"])):
            own = param[...].astype(dtype) if param.arrange is None else param.arrange(param[...], dtype)
            own_part = jax.reshard(own, P(*_partitions(own), reduced=token_axes() - _axes_that_split(own)))
            copy = jax.reshard(own_part, P(*spec(*param.compute), reduced=token_axes()))
            return nnx.Param(copy, stored=param.stored, compute=None, arrange=None)

    return jax.tree_util.tree_map_with_path(gather, tree, is_leaf=_is_weight)


def token_axes() -> frozenset[str]:
    """The axes whose devices have different tokens, over which gradients are summed; none if there is one device only,
    where nothing is to be summed and jax cannot leave it open."""
    if jax.sharding.get_abstract_mesh().size == 1:
        return frozenset()
    return frozenset(axes_of("batch") + axes_of("seq"))


def _is_weight(node: Any) -> bool:
    return isinstance(node, nnx.Param)


def _partitions(x: jax.Array) -> tuple[Any, ...]:
    return jax.typeof(x).sharding.spec.partitions


def _axes_that_split(x: jax.Array) -> frozenset[str]:
    return frozenset(axis for entry in _partitions(x) for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis)
