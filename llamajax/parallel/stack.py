"""Runs the layers of the model in one of the forms of `parallel.stack`.

`run_layers` is the plain loop (`scan`): XLA's loops end with every layer, so a layer's first gather has nothing before it to
hide behind, and its last scatter nothing after it.

`run_prefetching` hides the communication of layers: weights arrive one layer ahead, gradients leave one layer behind. In a
loop (`prefetch`) it carries, besides the activations, the gathered weights of the next layer and the unreduced gradients of
the previous one. In the backward pass a barrier separates each layer into two phases, because one collective runs at a time:
the gather hides behind the first phase, the scatter behind the second.

In a loop, everything that a layer keeps for its backward pass is copied into a stack and read from there. Written out layer
by layer (`unrolled`) it stays where it was created, at the price of a program that grows with the layers. Barriers then
separate the layers, which XLA would otherwise mix: it would gather all weights at once, and scatter all gradients at the
end.

Saved values may wait in host memory (`offloaded`). They leave while the next kernels run, and return one layer ahead. In a
loop they are its results, because memory for these is allocated on the host and nowhere else. Written out, a layer's values
leave while the next layer runs, between barriers: without them XLA drops both copies, or copies when the backward pass
starts, and says nothing. The last layers' values stay, because they are needed at once.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from llamajax.parallel.arrays import after
from llamajax.parallel.host_memory import DEVICE, HOST, moved
from llamajax.parallel.saved_values import Kept, Kind, Names, Policy, joined, kind_of, marked, noting, parted, unmarked
from llamajax.parallel.zero import PreparedWeights, gathered, no_gradient, stand_ins, trained_only, with_stand_ins

Part = Callable[[Any, Any, Any], Any]
"""A part of a layer: a function from its gathered weights, the activations and data shared by all layers to the next
activations."""
Layers = tuple[tuple[Any, ...], tuple[Any, ...] | None]
"""Weights of each part: first the weights of all layers, with a leading dim L; then those of the first layer, if gathered
earlier."""

NOTHING = jax.checkpoint_policies.nothing_saveable


@jax.named_scope("layers")
def run_layers(
    layers: PreparedWeights[Any],
    run_layer: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    carry: Any,
    inputs: Any = None,
    shared: Sequence[Any] = (None,),
    *,
    dtype: DTypeLike,
    saved: Policy | None = None,
) -> tuple[Any, Any]:
    """Runs layers one after the other, as one loop: compile time does not grow with their number.

    Args:
        layers: all layers as one tree, with weights that have a leading dim L.
        run_layer: function from the carry, a layer with gathered weights, the layer's inputs and the data shared by its kind
            to the next carry and the layer's results.
        carry: carry of the first layer.
        inputs: inputs of each layer, a tree of arrays with a leading dim L.
        shared: data for each kind of layer, in the order in which the kinds repeat. The loop body contains one round of
            them.
        dtype: dtype of the gathered weights.
        saved: values of a layer, besides its carry, that the forward pass saves for the backward pass; all others are
            recomputed, and weights are gathered again. None: everything is saved, with the gathered weights.

    Returns:
        The last carry, and the results of all layers with a leading dim L.
    """

    def step(shared: Any, carry: Any, of_layer: tuple[PreparedWeights[Any], Any]) -> tuple[Any, Any]:
        layer, own_inputs = of_layer
        return run_layer(carry, gathered(layer.trained, dtype, layer.copies), own_inputs, shared)

    steps = [partial(step, own) for own in shared]
    if saved is not None:
        steps = [jax.checkpoint(step, policy=saved, prevent_cse=len(steps) > 1) for step in steps]
    stacked = layers, inputs
    if len(steps) == 1:
        return jax.lax.scan(steps[0], carry, stacked)
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    # Separating the last few layers from whole rounds would copy the stacks.
    period = len(steps) if num_layers % len(steps) == 0 else num_layers

    def run_round(carry: Any, of_round: Any) -> tuple[Any, Any]:
        results = []
        for place in range(period):
            carry, result = steps[place % len(steps)](carry, jax.tree.map(lambda x, place=place: x[place], of_round))
            results.append(result)
        return carry, jax.tree.map(lambda *each: jnp.stack(each), *results)

    rounds = jax.tree.map(partial(reshape_layers, 1, (num_layers // period, period)), stacked)
    carry, results = jax.lax.scan(run_round, carry, rounds)
    return carry, jax.tree.map(partial(reshape_layers, 2, (num_layers,)), results)


def reshape_layers(count: int, dims: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Replaces the first `count` dims, over layers, which are not split. Names the sharding of the other dims, because jax
    loses it for dims of size one."""
    lies = jax.typeof(x).sharding.spec
    partitions = (*[None] * len(dims), *lies.partitions[count:])
    return jax.lax.reshape(x, (*dims, *x.shape[count:]), out_sharding=lies.update(partitions=partitions))


@jax.named_scope("layers")
def run_prefetching(
    weights: PreparedWeights[Layers],
    parts: Sequence[Part],
    x: Any,
    shared: Any = None,
    *,
    dtype: DTypeLike,
    saved: Policy | None,
    made_first: Policy,
    whole: Part | None = None,
    unrolled: bool = False,
    names: Sequence[Names] = (),
    offloaded: Collection[str] = (),
) -> Any:
    """Runs layers one after the other, each of them part by part.

    Args:
        weights: one tree per part. If the first layer's weights were gathered earlier, the layers start without a wait;
            these weights then get that layer's gradient and the others get zeros for it, so that the layers end with nothing
            to reduce.
        parts: parts of a layer.
        x: input of the first layer; every layer returns such a tree, for example a residual stream and sums over layers.
        shared: data for every part of every layer; it gets no gradient. The memory for the layers' saved values is allocated
            once it exists.
        dtype: dtype of the gathered weights.
        saved: values of a layer that the forward pass saves for the backward pass; all others are recomputed. It also saves
            the input of each part, so that the backward pass of the last part is the first phase; with
            `jax.checkpoint_policies.nothing_saveable` it saves only the layer's input, and the recomputation is the first
            phase. None: everything is saved. Gathered weights are never saved.
        made_first: policy for values recomputed in phase one and kept for phase two. Include expensive values only; cheap
            ones fuse better into their consumer.
        whole: function that does the same as all parts in turn, with a tuple of their weights, and runs in their place; its
            backward pass is not cut into phases. None: the parts in turn.
        unrolled: write out every layer; the program has no loop over them.
        names: names of each part's saved values; needed for `offloaded`.
        offloaded: names of the saved values that wait in host memory. Values with fewer than three dims always stay.

    Returns:
        The output of the last layer.
    """
    stack = Stack.of(
        parts,
        dtype=dtype,
        saved=saved,
        made_first=made_first,
        whole=whole,
        unrolled=unrolled,
        names=names,
        offloaded=offloaded,
    )
    weights = weights.part(lambda layers: tuple(None if trees is None else stack.grouped(trees) for trees in layers))
    return _run(stack, weights, shared, x)


def _in_turn(parts: tuple[Part, ...], weights: tuple[Any, ...], x: Any, shared: Any) -> Any:
    for part, own in zip(parts, weights, strict=True):
        x = part(own, x, shared)
    return x


@dataclass(frozen=True)
class Stack:
    """How layers run: the static arguments of `run_prefetching`."""

    parts: tuple[Part, ...]
    is_merged: bool
    """Whether the only part has the weights of all parts of a layer."""
    dtype: DTypeLike
    saved: Policy | None
    made_first: Policy
    unrolled: bool
    names: tuple[Names, ...]
    offloaded: frozenset[str]

    @staticmethod
    def of(
        parts: Sequence[Part],
        *,
        dtype: DTypeLike,
        saved: Policy | None,
        made_first: Policy,
        whole: Part | None = None,
        unrolled: bool = True,
        names: Sequence[Names] = (),
        offloaded: Collection[str] = (),
    ) -> "Stack":
        """Returns the stack of layers with these parts; arguments as for `run_prefetching`. A layer that saves only its
        input runs as one part."""
        whole = partial(_in_turn, tuple(parts)) if whole is None and saved is NOTHING else whole
        own = tuple(parts) if whole is None else (whole,)
        return Stack(own, whole is not None, dtype, saved, made_first, unrolled, tuple(names), frozenset(offloaded))

    def grouped(self, weights: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns one tree of weights for each of the stack's parts, from one tree for each part of a layer."""
        return (weights,) if self.is_merged else weights

    def ungrouped(self, weights: tuple[Any, ...]) -> tuple[Any, ...]:
        """Reverts `grouped`."""
        return weights[0] if self.is_merged else weights

    def gather(self, weights: PreparedWeights[Layers], index: int | jax.Array) -> Any:
        return gathered(_at(weights.used[0], index), self.dtype)

    def layer(self, weights: Any, shared: Any, x: Any) -> tuple[Any, Any]:
        """Returns the activations after a layer, and the values that its backward pass needs."""
        if self.saved is NOTHING:
            (part,), (own,) = self.parts, weights
            return part(own, x, shared), marked(x, self._goes_away(0, x, {}))
        kept = []
        for number, (part, own) in enumerate(zip(self.parts, weights, strict=True)):

            def run(into: Any, x: Any, part: Part = part, own: Any = own) -> Any:
                return part(with_stand_ins(own, into), x, shared)

            named: dict[Kind, set[str]] = {}
            if self.saved is not None:
                run = jax.checkpoint(run, policy=noting(self.saved, named), prevent_cse=False)
            out, pull_back = jax.vjp(run, stand_ins(own), x)
            kept.append(marked(Kept.of(pull_back, (own, shared)), self._goes_away(number, x, named)))
            x = out
        return x, kept

    def _goes_away(self, part: int, x: Any, named: Mapping[Kind, set[str]]) -> Callable[[jax.Array], bool]:
        """Returns the test for saved values of a part that wait in host memory: of those that are its input `x`, those of
        the `named` kinds, and others. Values of one kind go together."""
        inputs = set(map(id, jax.tree.leaves(x)))

        def goes_away(leaf: jax.Array) -> bool:
            if not self.offloaded or leaf.ndim < 3:
                return False
            of_input, of_others = self.names[part]
            names = {of_input} if id(leaf) in inputs else named.get(kind_of(jax.typeof(leaf)), {of_others})
            return not self.offloaded.isdisjoint(names)

        return goes_away

    def layer_back(self, weights: Any, shared: Any, kept: Any, dx: Any, meanwhile: Any) -> tuple[Any, Any, Any]:
        """Returns the gradients of a layer's weights and input.

        `meanwhile` is computed during the first phase or used after it, and is returned for later use.
        """
        kept = unmarked(kept)
        if self.saved is NOTHING:
            (part,), (own,) = self.parts, weights

            def run(into: Any, x: Any) -> Any:
                return part(with_stand_ins(own, into), x, shared)

            again = jax.checkpoint(run, policy=self.made_first, prevent_cse=False)
            _, pull_back = jax.vjp(again, stand_ins(own), kept)
            if jax.tree.leaves(meanwhile):
                pull_back, meanwhile = jax.lax.optimization_barrier((pull_back, meanwhile))
            d_own, dx = pull_back(dx)
            return (d_own,), dx, meanwhile
        d_weights: list[Any] = []
        for own, own_kept in reversed(list(zip(weights, kept, strict=True))):
            d_own, dx = own_kept.pull_back((own, shared))(dx)
            d_weights.insert(0, d_own)
            if len(d_weights) == 1 < len(weights) and jax.tree.leaves(meanwhile):
                d_weights, dx, meanwhile = jax.lax.optimization_barrier((d_weights, dx, meanwhile))
        return tuple(d_weights), dx, meanwhile

    def reduced(self, stored: Any, d_weights: Any) -> Any:
        """Returns the gradients of a layer's weights as stored, from the unreduced gradients of the gathered weights."""
        _, pull_back = jax.vjp(partial(gathered, dtype=self.dtype), _at(trained_only(stored), 0))
        (reduced,) = pull_back(d_weights)
        return reduced


def _at(stacked: Any, index: int | jax.Array) -> Any:
    """Reads one layer of a stack by index: a slice such as `stacked[1:]` would copy the saved values of all layers."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)


def _with(stacked: Any, one: Any, index: int | jax.Array) -> Any:
    return jax.tree.map(lambda all, own: jax.lax.dynamic_update_index_in_dim(all, own, index, 0), stacked, one)


def _room(one: jax.ShapeDtypeStruct, count: int, shared: Any) -> jax.Array:
    """Returns zeros for `count` arrays like `one`."""
    spec = one.sharding.spec
    lies = one.sharding.update(spec=spec.update(partitions=(None, *spec.partitions)))
    return jax.lax.broadcast(after(jnp.zeros((), one.dtype), shared), (count, *one.shape), out_sharding=lies)


def separated(others: Any, weights: Any) -> tuple[Any, Any]:
    """Puts a barrier on `others` and the gathered weights: nothing uses one of them before all exist.

    Scales have no barrier, because layers read them where they are stored.
    """
    leaves, tree = jax.tree.flatten(weights)
    places = [place for place, leaf in enumerate(leaves) if leaf.ndim > 1]
    others, whole = jax.lax.optimization_barrier((others, [leaves[place] for place in places]))
    for place, leaf in zip(places, whole, strict=True):
        leaves[place] = leaf
    return others, jax.tree.unflatten(tree, leaves)


def _last(stored: Any) -> int:
    return jax.tree.leaves(stored)[0].shape[0] - 1


def _index(number: Any, place: int, period: int) -> Any:
    """Returns the index of the layer at `place` of round `number`."""
    return number if period == 1 else number * period + place


def _is_parted(stack: Stack, shared: tuple[Any, ...]) -> bool:
    """Returns whether layers are written out one after the other, with barriers between them."""
    return stack.unrolled or len(shared) > 1


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(stack: Stack, prepared: PreparedWeights[Layers], shared: Any, x: Any) -> Any:
    return _forward(stack, prepared, shared, x)[0]


def _forward(stack: Stack, prepared: PreparedWeights[Layers], shared: Any, x: Any) -> tuple[Any, Any]:
    (stored, _), (_, first) = prepared.trained, prepared.used
    period, is_parted, last = len(shared), _is_parted(stack, shared), _last(stored)

    def step(place: int, index: jax.Array, x: Any, weights: Any) -> tuple[Any, Any, Any]:
        if is_parted:
            (index, x), weights = separated((index, x), weights)
        upcoming = stack.gather(prepared, index + 1)
        x, own = stack.layer(weights, shared[place % period], x)
        return x, upcoming, own

    def round_of_loop(carry: Any, _: None) -> Any:
        number, x, weights, rooms = carry
        away = []
        for place in range(period):
            x, weights, own = step(place, _index(number, place, period), x, weights)
            staying, leaving = parted(own)
            rooms = [*rooms[:place], _with(rooms[place], staying, number), *rooms[place + 1 :]]
            away.append(moved(leaving, HOST))
        return (number + 1, x, weights, rooms), away

    num_rounds = 0 if stack.unrolled else last // period
    weights = stack.gather(prepared, 0) if first is None else first
    stacks, kept = [], []
    if num_rounds:
        like = [jax.eval_shape(lambda weights, x, own=own: stack.layer(weights, own, x)[1], weights, x) for own in shared]
        rooms = [[_room(one, num_rounds, shared) for one in parted(own)[0]] for own in like]
        # A counter instead of given numbers: XLA copies in parallel with the computation if the index follows from the
        # loop's own counter.
        carry = jnp.int32(0), x, weights, rooms
        (_, x, weights, rooms), away = jax.lax.scan(round_of_loop, carry, None, length=num_rounds)
        stacks = list(map(joined, like, rooms, away))
    for number in range(num_rounds * period, last):
        x, weights, own = step(number, jnp.int32(number), x, weights)
        if kept and (below := parted(kept[-1]))[1]:
            (x, weights), away = jax.lax.optimization_barrier(((x, weights), moved(below[1], HOST)))
            kept[-1] = joined(kept[-1], below[0], away)
        kept.append(own)
    x, kept_last = stack.layer(weights, shared[last % period], x)
    return x, (prepared, shared, stacks, kept, weights, kept_last)


def _backward(stack: Stack, residuals: Any, dx: Any) -> tuple[Any, None, Any]:
    prepared, shared, stacks, kept, weights, kept_last = residuals
    stored, first = prepared.trained
    period, is_parted, last = len(shared), _is_parted(stack, shared), _last(stored)
    grads = jax.tree.map(lambda x: no_gradient(x, after(jnp.zeros((), x.dtype), dx)), trained_only(stored))

    looped = last - len(kept)

    def saved_by(place: int, number: int | jax.Array) -> Any:
        """Returns what the layer at `place` of round `number` saved."""
        index = number * period + place
        return kept[index - looped] if isinstance(index, int) and index >= looped else _at(stacks[place], number)

    def step(place: int, number: int | jax.Array, carry: Any) -> Any:
        """Runs one layer's backward pass, reduces the gradients of the layer above and brings back what the layer below
        saved."""
        (dx, weights, above, own_away), grads = carry
        index, own = jnp.asarray(_index(number, place, period), jnp.int32), saved_by(place, number)
        below = saved_by(place - 1, number) if place else saved_by(period - 1, number - 1)
        staying, coming = parted(own)[0], parted(below)[1]
        if is_parted:
            # Recomputed values must not come from the forward pass, which would have to keep them.
            waiting = index, staying, own_away, coming, dx, above
            (index, staying, own_away, coming, dx, above), weights = separated(waiting, weights)
        upcoming, coming = stack.gather(prepared, index - 1), moved(coming, DEVICE)
        own = joined(own, staying, own_away)
        d_weights, dx, (weights, above) = stack.layer_back(weights, shared[place], own, dx, (upcoming, above))
        reduced, above = stack.reduced(stored, above), d_weights
        if is_parted:
            (index, reduced, dx, above), weights = separated((index, reduced, dx, above), weights)
        return (dx, weights, above, coming), _with(grads, reduced, index + 1)

    def round_of_loop(carry: Any, number: jax.Array) -> tuple[Any, None]:
        for place in reversed(range(period)):
            carry = step(place, number, carry)
        return carry, None

    if last > 0:
        upcoming = stack.gather(prepared, last - 1)
        if is_parted:
            kept_last, dx = jax.lax.optimization_barrier((kept_last, dx))
        coming = moved(parted(saved_by((last - 1) % period, (last - 1) // period))[1], DEVICE)
        above, dx, weights = stack.layer_back(weights, shared[last % period], kept_last, dx, upcoming)
        carry = (dx, weights, above, coming), grads
        for index in range(last - 1, max(looped, 1) - 1, -1):
            carry = step(index % period, index // period, carry)
        if looped:
            carry, _ = jax.lax.scan(round_of_loop, carry, jnp.arange(looped // period - 1, 0, -1))
            for place in range(period - 1, 0, -1):
                carry = step(place, 0, carry)
        carry, grads = carry
        kept_first = saved_by(0, 0)
        staying = parted(kept_first)[0]
        if is_parted:
            carry, staying = jax.lax.optimization_barrier((carry, staying))
        dx, weights, above, coming = carry
        kept_first = joined(kept_first, staying, coming)
        d_first, dx, above = stack.layer_back(weights, shared[0], kept_first, dx, above)
        reduced = stack.reduced(stored, above)
        if is_parted:
            d_first, dx, reduced = jax.lax.optimization_barrier((d_first, dx, reduced))
        grads = _with(grads, reduced, 1)
    else:
        d_first, dx, _ = stack.layer_back(weights, shared[0], kept_last, dx, ())
    if first is None:
        grads, d_first = _with(grads, stack.reduced(stored, d_first), 0), None
    return PreparedWeights((grads, d_first)), None, dx


_run.defvjp(_forward, _backward)
