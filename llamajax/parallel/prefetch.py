"""Runs a stack of layers with its communication hidden: weights come one layer ahead, gradients leave one layer behind.

XLA's loops end with every layer, so that in a plain loop the first gather has nothing before it to hide behind and the last
scatter nothing after it. Here the loops carry, beside the activations, the gathered weights of the layer they come to and
the unreduced gradients of the layer they come from. In the backward pass a barrier parts each layer in two phases, because
one collective runs at a time: the gather hides behind the first, the scatter behind the second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from llamajax.parallel.arrays import after
from llamajax.parallel.stack import Policy
from llamajax.parallel.zero import gathered, no_gradient

Part = Callable[[Any, Any, Any], Any]
"""A part of a layer: from its gathered weights, the activations and what all layers share to the next activations."""

_NOTHING = jax.checkpoint_policies.nothing_saveable


@jax.named_scope("layers")
def run_prefetching(
    weights: Sequence[Any],
    parts: Sequence[Part],
    x: Any,
    shared: Any = None,
    *,
    dtype: DTypeLike,
    saved: Policy | None,
    made_first: Policy,
    copies: Sequence[Any] | None = None,
    first: Sequence[Any] | None = None,
) -> Any:
    """Runs layers one after the other, each of them part by part.

    Args:
        weights: of each part a tree, whose weights have a leading dim L.
        parts: what a layer consists of.
        x: what the first layer is given.
        shared: what every part of every layer is given too; it gets no gradient. The memory for what the layers keep is
            taken when it is there.
        dtype: that weights are gathered in.
        saved: what the forward pass keeps of a layer for the backward pass; all else is computed again. Beside that it
            keeps what each part is given, so that the backward pass of the last part is the first phase; with
            `jax.checkpoint_policies.nothing_saveable` only what the layer is given, and to compute it again is the first
            phase. None: everything is kept. Gathered weights never are.
        made_first: what of a layer that is computed again as a whole is made in the first phase, and not again in the
            second: all that is dear. What is cheap is better fused into what uses it than carried over.
        copies: `weights`, gathered before.
        first: those of the first layer, gathered before: the layers then begin with nothing to wait for. They get that
            layer's gradient, for which `weights` get zeros, so that they end with nothing to reduce.

    Returns:
        What the last layer gave on.
    """
    trees = tuple(None if tree is None else tuple(tree) for tree in (weights, copies, first))
    if saved is _NOTHING:
        parts, trees = (partial(_in_turn, tuple(parts)),), tuple(None if tree is None else (tree,) for tree in trees)
    stack = _Stack(tuple(parts), dtype, saved, made_first)
    return _run(stack, *trees, shared, x)


def _in_turn(parts: tuple[Part, ...], weights: tuple[Any, ...], x: Any, shared: Any) -> Any:
    for part, own in zip(parts, weights, strict=True):
        x = part(own, x, shared)
    return x


@partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["tree", "places"])
@dataclass(frozen=True)
class _Kept:
    """A pull-back (`jax.vjp`) without those of its arrays that are at hand again when it is needed."""

    leaves: tuple[jax.Array, ...]
    tree: Any
    """The pull-back's own structure."""
    places: tuple[int | None, ...]
    """Of each array of the pull-back: its place among those at hand; None: it is the next of `leaves`."""

    @staticmethod
    def of(pull_back: Any, at_hand: Any) -> "_Kept":
        place_of = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(at_hand))}
        leaves, tree = jax.tree.flatten(pull_back)
        places = tuple(place_of.get(id(leaf)) for leaf in leaves)
        return _Kept(tuple(leaf for leaf, place in zip(leaves, places, strict=True) if place is None), tree, places)

    def pull_back(self, at_hand: Any) -> Any:
        again, kept = jax.tree.leaves(at_hand), iter(self.leaves)
        return jax.tree.unflatten(self.tree, [next(kept) if place is None else again[place] for place in self.places])


@dataclass(frozen=True)
class _Stack:
    """What is known before there are arrays."""

    parts: tuple[Part, ...]
    dtype: DTypeLike
    saved: Policy | None
    made_first: Policy

    def gather(self, stored: Any, copies: Any, index: int | jax.Array) -> Any:
        return gathered(_at(stored, index), self.dtype) if copies is None else _at(copies, index)

    def layer(self, weights: Any, shared: Any, x: Any) -> tuple[Any, Any]:
        """The activations behind a layer, and what its backward pass needs."""
        if self.saved is _NOTHING:
            (part,), (own,) = self.parts, weights
            return part(own, x, shared), x
        kept = []
        for part, own in zip(self.parts, weights, strict=True):

            def run(own: Any, x: Any, part: Part = part) -> Any:
                return part(own, x, shared)

            if self.saved is not None:
                run = jax.checkpoint(run, policy=self.saved, prevent_cse=False)
            x, pull_back = jax.vjp(run, own, x)
            kept.append(_Kept.of(pull_back, (own, shared)))
        return x, kept

    def layer_back(self, weights: Any, shared: Any, kept: Any, dx: Any, meanwhile: Any) -> tuple[Any, Any, Any]:
        """Gradients of a layer's weights and input.

        `meanwhile` is made during the first phase or used after it, and comes back as it is to be used.
        """
        if self.saved is _NOTHING:
            (part,), (own,) = self.parts, weights
            run = jax.checkpoint(lambda own, x: part(own, x, shared), policy=self.made_first, prevent_cse=False)
            _, pull_back = jax.vjp(run, own, kept)
            pull_back, meanwhile = jax.lax.optimization_barrier((pull_back, meanwhile))
            d_own, dx = pull_back(dx)
            return (d_own,), dx, meanwhile
        d_weights: list[Any] = []
        for own, own_kept in reversed(list(zip(weights, kept, strict=True))):
            d_own, dx = own_kept.pull_back((own, shared))(dx)
            d_weights.insert(0, d_own)
            if len(d_weights) == 1:
                d_weights, dx, meanwhile = jax.lax.optimization_barrier((d_weights, dx, meanwhile))
        return tuple(d_weights), dx, meanwhile

    def reduce_into(self, grads: Any, stored: Any, index: int | jax.Array, d_weights: Any) -> Any:
        """`grads` of all layers with those of one, which are unreduced."""
        _, pull_back = jax.vjp(partial(gathered, dtype=self.dtype), _at(stored, 0))
        (reduced,) = pull_back(d_weights)
        return jax.tree.map(lambda all, one: _with(all, one, index), grads, reduced)


def _at(stacked: Any, index: int | jax.Array) -> Any:
    """By number: a slice such as `stacked[1:]` would copy what is saved of all layers."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)


def _with(stacked: jax.Array, one: jax.Array, index: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stacked, one, index, 0)


def _room(one: jax.ShapeDtypeStruct, count: int, shared: Any) -> jax.Array:
    """Zeros for `count` of what is like `one`."""
    spec = one.sharding.spec
    lies = one.sharding.update(spec=spec.update(partitions=(None, *spec.partitions)))
    return jax.lax.broadcast(after(jnp.zeros((), one.dtype), shared), (count, *one.shape), out_sharding=lies)


def _last(stored: Any) -> int:
    return jax.tree.leaves(stored)[0].shape[0] - 1


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(stack: _Stack, stored: Any, copies: Any, first: Any, shared: Any, x: Any) -> Any:
    return _forward(stack, stored, copies, first, shared, x)[0]


def _forward(stack: _Stack, stored: Any, copies: Any, first: Any, shared: Any, x: Any) -> tuple[Any, Any]:
    def step(index: jax.Array, carry: Any) -> Any:
        x, weights, kept = carry
        upcoming = stack.gather(stored, copies, index + 1)
        x, own = stack.layer(weights, shared, x)
        return x, upcoming, [_with(stacked, one, index) for stacked, one in zip(kept, jax.tree.leaves(own), strict=True)]

    last, kept = _last(stored), []
    weights = stack.gather(stored, copies, 0) if first is None else first
    if last > 0:
        like = jax.eval_shape(lambda weights, x: jax.tree.leaves(stack.layer(weights, shared, x)[1]), weights, x)
        room = [_room(one, last, shared) for one in like]
        # Counted, not given numbers: XLA copies beside the computation where the place follows from the loop's own count.
        x, weights, kept = jax.lax.fori_loop(0, last, step, (x, weights, room))
    x, kept_last = stack.layer(weights, shared, x)
    return x, (stored, copies, first, shared, kept, weights, kept_last)


def _backward(stack: _Stack, residuals: Any, dx: Any) -> tuple[Any, None, Any, None, Any]:
    stored, copies, first, shared, kept, weights, kept_last = residuals
    last, grads = _last(stored), jax.tree.map(lambda x: no_gradient(x, after(jnp.zeros((), x.dtype), dx)), stored)

    def kept_of(index: int | jax.Array) -> Any:
        return jax.tree.unflatten(jax.tree.structure(kept_last), _at(kept, index))

    def step(carry: Any, index: jax.Array) -> Any:
        dx, weights, above, grads = carry
        upcoming = stack.gather(stored, copies, index - 1)
        d_weights, dx, (upcoming, above) = stack.layer_back(weights, shared, kept_of(index), dx, (upcoming, above))
        return (dx, upcoming, d_weights, stack.reduce_into(grads, stored, index + 1, above)), None

    if last > 0:
        upcoming = stack.gather(stored, copies, last - 1)
        above, dx, weights = stack.layer_back(weights, shared, kept_last, dx, upcoming)
        (dx, weights, above, grads), _ = jax.lax.scan(step, (dx, weights, above, grads), jnp.arange(last - 1, 0, -1))
        d_first, dx, above = stack.layer_back(weights, shared, kept_of(0), dx, above)
        grads = stack.reduce_into(grads, stored, 1, above)
    else:
        d_first, dx, _ = stack.layer_back(weights, shared, kept_last, dx, ())
    if first is None:
        return stack.reduce_into(grads, stored, 0, d_first), None, None, None, dx
    return grads, None, d_first, None, dx


_run.defvjp(_forward, _backward)
