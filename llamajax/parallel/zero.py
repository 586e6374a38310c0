"""ZeRO: the part of a weight that a device stores, the copy that it computes with, and the way of gradients back to the
device that stores the weight.

A weight declares once how it is stored and how it is sharded for compute. If it is stored with a dim over `fsdp`, no device
holds it whole, nor the optimizer's moments, which are created from it.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from llamajax.config.parallel import axes_of
from llamajax.config.quantized import QuantizedForm
from llamajax.parallel import host_memory
from llamajax.parallel.float8 import Factor, Float8, moved, rounded
from llamajax.parallel.quantized import Quantized, dequantize, quantize
from llamajax.parallel.sharding import as_tuple, axes_in, spec
from llamajax.parallel.stages import is_staged, merge, split

Tree = TypeVar("Tree")
Dims = tuple[str | None, ...]
DATA = tuple(axis for axis in axes_of("micro_batch") if axis not in axes_of("embed"))
"""The axis along which devices store copies of the weights, unless weights are split over it too."""


def weight(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    stored: Dims,
    compute: Dims | None,
    init: Callable[..., jax.Array],
    arrange: Callable[[jax.Array, DTypeLike], jax.Array] | None = None,
    late: bool = False,
) -> nnx.Param:
    """Returns a parameter with its initial value; each device creates its own part.

    Args:
        shape: shape of the whole array.
        dtype: dtype of the stored array.
        stored: dims of the stored array, for `spec`.
        compute: dims of the array gathered for compute; None: the stored array is read directly, in its own dtype.
        init: creates the value from shape, dtype and `out_sharding`, such as `jnp.ones`.
        arrange: converts the stored array to another one, of the given dtype, that is gathered in its place.
        late: for a weight that is read as stored: always sum its gradients at the end of the step, all at once. For small
            weights used by `scaled`, where a wait in every layer would not pay.
    """
    value = init(shape, dtype, out_sharding=spec(*stored))
    return nnx.Param(value, compute=compute, arrange=arrange, late=late, frozen=False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PreparedWeights(Generic[Tree]):
    """Weights that are prepared once and used often, such as by all micro-batches of a step."""

    trained: Tree
    """Weights that get the gradients, unless frozen."""
    copies: Tree | None = None
    """Copies to compute with in their place, gathered or in float8, without gradients. None: `trained` is used, gathered
    where needed."""

    @property
    def used(self) -> Tree:
        """Returns the weights to compute with."""
        return self.trained if self.copies is None else self.copies

    def part(self, choose: Callable[[Tree], Any]) -> "PreparedWeights[Any]":
        """Applies `choose` to both trees."""
        return PreparedWeights(choose(self.trained), None if self.copies is None else choose(self.copies))


def gathered(tree: Tree, dtype: DTypeLike, copies: Tree | None = None) -> Tree:
    """Returns the module, or another tree of `weight`s, with copies for compute: cast to `dtype`, then resharded as they
    declare.

    In this order the collective carries the narrow copy, and its transpose reduces gradients in the narrow dtype too. A copy
    is marked as reduced over the axes that split the tokens and not the copy, so that its gradient is summed over all of
    them at the end: scattered over the axes it is stored on, then added up over the others, which therefore carry only a
    device's own part.
    Arrays that are already gathered stay unchanged.

    Args:
        tree: the weights.
        dtype: dtype of the copies.
        copies: arrays that are gathered in place of the weights, or were gathered earlier; `tree` still gets the gradient.
    """
    if copies is None:
        return _gather(tree, dtype)
    copies = _gather(copies, dtype)
    return with_stand_ins(copies, _as_if_gathered(dtype, trained_only(tree), stand_ins(copies)))


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
            own = param[...]
            if isinstance(own, Quantized):
                return _gathered(dequantize(jax.tree.map(partial(_laid_out_frozen, param), own), dtype), frozen=True)
            return _gathered(moved(partial(_laid_out, param, dtype), own), frozen=param.frozen)

    return jax.tree_util.tree_map_with_path(gather, tree, is_leaf=_is_weight)


def _laid_out(param: nnx.Param, dtype: DTypeLike, own: jax.Array) -> jax.Array:
    own = host_memory.moved(own, host_memory.DEVICE)
    own = _arranged(param, own, own.dtype if isinstance(param[...], Float8) else dtype)
    stacked = _partitions(own)[: _num_stacked(param)]
    summed = token_axes() - axes_in(stacked)
    compute = spec(*param.compute)
    own_part = jax.reshard(own, P(*_partitions(own), reduced=summed - axes_in(_partitions(own))))
    return jax.reshard(own_part, P(*stacked, *compute, reduced=summed - axes_in(compute)))


def _laid_out_frozen(param: nnx.Param, own: jax.Array) -> jax.Array:
    """Reshards an array of a quantized weight as the weight declares, so that devices send each other codes and scales."""
    own = _arranged(param, own, own.dtype)
    return jax.reshard(own, P(*_partitions(own)[: _num_stacked(param)], *spec(*param.compute)))


def in_float8(layers: Tree, names: Collection[str], form: DTypeLike, dtype: DTypeLike, *, num_stacked: int = 1) -> Tree:
    """Rounds each device's part of the matrices with these names in a stack of layers, whole or still to be gathered, so
    that one byte per weight is sent; the result serves as `copies` for `gathered`.

    Args:
        layers: weights with a leading dim L, or other dims with a layer for each index.
        names: attribute names of the matrices to round.
        form: as for `rounded`.
        dtype: dtype that weights are cast to first.
        num_stacked: number of leading dims with a layer for each index.
    """

    def narrow(path: tuple[Any, ...], param: nnx.Param) -> nnx.Param:
        name = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        if name[-1] not in names:
            return param
        with jax.named_scope("/".join(["layers", *name, "gather_weight"])):
            own, lies = param[...].astype(dtype), jax.typeof(param[...]).sharding.spec
            narrow = rounded(jax.reshard(own, P(*lies.partitions)), form, num_stacked=num_stacked)
            return with_value(param, moved(lambda narrow: jax.reshard(narrow, lies), narrow))

    return jax.tree_util.tree_map_with_path(narrow, layers, is_leaf=_is_weight)


def stand_ins(copies: Tree) -> Tree:
    """Returns the arrays that receive the gradients of gathered weights: the weights themselves, or, for eight-bit weights,
    zeros that are never created; None for frozen weights."""

    def stand_in(param: nnx.Param) -> nnx.Param | None:
        copy = param[...]
        if param.frozen:
            return None
        if not isinstance(copy, Float8):
            return param
        lies = jax.typeof(copy.values).sharding.spec
        zeros = jnp.zeros(copy.shape, copy.dtype, out_sharding=P(*lies.partitions))
        return _gathered(jax.reshard(zeros, lies))

    return jax.tree.map(stand_in, copies, is_leaf=_is_weight)


def with_stand_ins(copies: Tree, stand_ins: Tree) -> Tree:
    """Returns the copies for compute, linked so that their `stand_ins` get the gradients."""

    def join(param: nnx.Param, stand_in: nnx.Param | None) -> nnx.Param:
        copy = param[...]
        if stand_in is None:
            return param
        if not isinstance(copy, Float8):
            return stand_in
        return _gathered(dataclasses.replace(copy, stand_in=stand_in[...]))

    return jax.tree.map(join, copies, stand_ins, is_leaf=_is_weight)


def as_frozen(tree: Tree) -> Tree:
    """Returns the weights marked as frozen: the backward pass computes no gradients for them."""

    def mark(param: nnx.Param) -> nnx.Param:
        return nnx.Param(param[...], compute=param.compute, arrange=param.arrange, late=param.late, frozen=True)

    return jax.tree.map(mark, tree, is_leaf=_is_weight)


def as_quantized(tree: Tree, form: QuantizedForm, dims: Mapping[str, int], *, double: bool, num_stacked: int) -> Tree:
    """Returns the weights with matrices in codes and scales.

    Args:
        tree: frozen weights.
        form: format of the codes.
        dims: dim of the inputs of each matrix to quantize, by its attribute name.
        double: see `quantize`, and `num_stacked` too.
        num_stacked: see `double`.
    """

    def narrow(path: tuple[Any, ...], param: nnx.Param) -> nnx.Param:
        name = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][-1]
        if name not in dims:
            return param
        return with_value(param, quantize(param[...], form, dims[name], num_stacked=num_stacked, double=double))

    return jax.tree_util.tree_map_with_path(narrow, tree, is_leaf=_is_weight)


def trained_only(tree: Tree) -> Tree:
    """Returns the weights with None for frozen ones."""
    return jax.tree.map(lambda param: None if param.frozen else param, tree, is_leaf=_is_weight)


def frozen_only(tree: Tree) -> Tree:
    """Returns the weights with None for trained ones."""
    return jax.tree.map(lambda param: param if param.frozen else None, tree, is_leaf=_is_weight)


def _gathered(copy: Factor, *, frozen: bool = False) -> nnx.Param:
    return nnx.Param(copy, compute=None, arrange=None, late=False, frozen=frozen)


def split_over(tree: Tree, further: tuple[str, ...]) -> Tree:
    """Returns the weights that are split over devices split over further axes too: a device's part along the same dim, or
    along a later one where few experts leave nothing to split; unchanged where no dim divides."""
    sizes, state = jax.sharding.get_abstract_mesh().shape, set(axes_of("embed"))

    def split(param: nnx.Param) -> nnx.Param:
        if isinstance(param[...], Quantized):
            return param  # its blocks stay whole
        entries = list(map(as_tuple, _partitions(param[...])))
        of_state = [dim for dim, axes in enumerate(entries) if state.intersection(axes)]
        later = [dim for dim, axes in enumerate(entries) if of_state and dim > of_state[0] and not axes]
        for dim in (*of_state, *later):
            axes = *entries[dim], *further  # innermost, so that a device's part is contiguous
            if param.shape[dim] % math.prod(sizes[axis] for axis in axes) == 0:
                entries[dim] = axes
                break
        return with_value(param, jax.reshard(param[...], P(*entries)))

    return jax.tree.map(split, tree, is_leaf=_is_weight)


def whole_over_data(tree: Tree, dtype: DTypeLike, *, left_open: Collection[str] = ()) -> Tree:
    """Returns the weights no longer split over `data`.

    Args:
        tree: the weights.
        dtype: dtype of the weights that change, and of their gradients on the way back.
        left_open: axes, among those that split tokens, over which gradients are summed only on the way back.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    left_open = frozenset(axis for axis in left_open if sizes[axis] > 1)

    def join(param: nnx.Param) -> nnx.Param:
        if param.compute is None or isinstance(param[...], Quantized):
            return param
        stored = _partitions(param[...])
        if not left_open - axes_in(stored) and not any(sizes[axis] > 1 for axis in axes_in(stored) & set(DATA)):
            return param
        entries = P(*(tuple(axis for axis in as_tuple(entry) if axis not in DATA) for entry in stored))
        own = _arranged(param, jax.reshard(param[...].astype(dtype), entries), dtype)
        own_part = jax.reshard(own, P(*_partitions(own), reduced=left_open - axes_in(_partitions(own))))
        return nnx.Param(own_part, compute=param.compute, arrange=None, late=False, frozen=param.frozen)

    return jax.tree.map(join, tree, is_leaf=_is_weight)


def summed_late(tree: Tree) -> Tree:
    """Returns the weights with the gradients of `late` ones summed only on the way back."""

    def lay_out(param: nnx.Param) -> nnx.Param:
        if not param.late:
            return param
        stored = _partitions(param[...])
        return with_value(param, jax.reshard(param[...], P(*stored, reduced=token_axes() - axes_in(stored))))

    return jax.tree.map(lay_out, tree, is_leaf=_is_weight)


def scaled(x: Float[Array, "*dims D"], scale: Float[Array, "*p D"]) -> Float[Array, "*dims D"]:
    """Multiplies x by a weight that gets no gradient, or by that of every stage."""
    lies = jax.typeof(scale).sharding.spec
    plain = jax.reshard(scale, P(*lies.partitions)) if lies.reduced else scale
    if is_staged(lies):
        return merge(split(x) * jnp.expand_dims(plain, range(1, x.ndim)))
    return x * jnp.expand_dims(plain, range(x.ndim - 1))


def _scaled_back(residuals: tuple[jax.Array, jax.Array], d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, scale = residuals
    lies = jax.typeof(scale).sharding.spec
    product = split(d_out) * split(x) if is_staged(lies) else d_out * x
    over = range(scale.ndim - 1, product.ndim - 1)
    d_scale = jax.lax.reduce_sum(product, over, out_sharding=P(*lies.partitions, unreduced=lies.reduced))
    return scaled(d_out, scale), d_scale


scaled_late = jax.custom_vjp(scaled)
"""Multiplies x by a `late` weight, or by that of every stage; its gradient stays unreduced where the weight was marked as
reduced."""
scaled_late.defvjp(lambda x, scale: (scaled(x, scale), (x, scale)), _scaled_back)


def no_gradient(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns zeros in the dtype of the scalar `zero`, with the sharding of the gradient of `x`. For an `x` in host memory
    these are there too, and may be any numbers."""
    lies = jax.typeof(x).sharding.spec
    lies = P(*lies.partitions, unreduced=lies.reduced)
    if host_memory.is_on_host(x):
        return host_memory.empty_like(x, lies)
    return jax.lax.broadcast(zero, x.shape, out_sharding=lies)


def token_axes() -> frozenset[str]:
    """Returns the axes that split the tokens, over which gradients are summed, except over those that split the weight
    itself; none with a single device, where there is nothing to sum and jax cannot leave a sum open."""
    if jax.sharding.get_abstract_mesh().size == 1:
        return frozenset()
    return frozenset(axes_of("batch") + axes_of("seq"))


def with_value(param: nnx.Param, value: Factor | Quantized) -> nnx.Param:
    """Returns a weight with another value and the same declarations."""
    return nnx.Param(value, compute=param.compute, arrange=param.arrange, late=param.late, frozen=param.frozen)


def _is_weight(node: Any) -> bool:
    return isinstance(node, nnx.Param)


def _arranged(param: nnx.Param, own: jax.Array, dtype: DTypeLike) -> jax.Array:
    if param.arrange is None:
        return own.astype(dtype)
    arrange = partial(param.arrange, dtype=dtype)
    for _ in range(_num_stacked(param)):
        arrange = jax.vmap(arrange)
    return arrange(own)


def _num_stacked(param: nnx.Param) -> int:
    """Returns the number of leading dims of a stack of layers."""
    return param.ndim - len(param.compute)


def _partitions(x: jax.Array) -> tuple[Any, ...]:
    return jax.typeof(x).sharding.spec.partitions
