"""Weights and moments in host memory: which of them wait there, how they are created, and how they are updated.

Each layer's part comes to the card, is updated and goes back into the same array, while the next one comes and the one
before leaves. The card holds copies of such weights in `model.compute_dtype`, with which the step computes (ZeRO-Offload,
arXiv:2101.06840; Colossal-AI's Gemini).
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from llamajax.config.run import Config
from llamajax.estimates.formulas import MASTER, state_in_host_memory
from llamajax.model import Llama
from llamajax.parallel.host_memory import DEVICE, HOST, by_layer, is_on_host, moved
from llamajax.parallel.zero import with_value
from llamajax.step.frozen import combine, partition

Tree = TypeVar("Tree")
_IN_FLIGHT = 2
"""Weights of a layer between host and card at once: one comes while the one before leaves."""


def places(config: Config, names: Sequence[str]) -> list[bool]:
    """Returns for the arrays of a state, by their names in it and in its order, whether they wait in host memory."""
    away, seen = state_in_host_memory(config), Counter[str]()
    weights = {weight for weight, _ in away}

    def waits(name: str) -> bool:
        kind, _, rest = name.partition(".")
        if kind == "model":
            return (rest, MASTER) in away
        if kind == "copies":
            return config.offload.parameters == "all" and rest.startswith("layers.")
        weight = next((weight for weight in weights if name.endswith(f".{weight}")), None)
        if kind != "opt_state" or weight is None:
            return False
        seen[weight] += 1
        return (weight, seen[weight] - 1) in away

    return [waits(name) for name in names]


def copies(model: Llama, dtype: DTypeLike, *, on_host: bool) -> Llama | None:
    """Returns the copies to compute with of the weights in host memory, None for the others; None: there are none.

    Args:
        model: the weights.
        dtype: dtype of the copies.
        on_host: whether the copies of layers wait in host memory too.
    """
    nodes, tree = jax.tree.flatten(model, is_leaf=_is_weight)
    if not any(is_on_host(node[...]) for node in nodes):
        return None

    def copy(node: nnx.Param) -> nnx.Param | None:
        if not is_on_host(node[...]):
            return None
        if node.ndim < 3:
            return with_value(node, moved(node[...], DEVICE).astype(dtype))
        return with_value(node, by_layer(lambda own: moved(own.astype(dtype), HOST if on_host else DEVICE), node[...]))

    return jax.tree.unflatten(tree, map(copy, nodes))


def create(
    config: Config,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    model: Llama | None,
    split: Callable[[Any], Any],
) -> tuple[Llama, Any]:
    """Returns initial weights and the optimizer's state. The card holds the matrices of one layer at a time.

    Args:
        config: the run.
        optimizer: its optimizer; it starts the moments of a layer's weight from that weight only.
        key: key of random weights.
        model: weights to start from, in the memory where they wait; None: draw them.
        split: lays out some weights as they are stored.
    """
    away = state_in_host_memory(config)

    def sent(weights: Tree, above: str) -> Tree:
        """Sends master weights, whose names start with `above`, to where they wait."""
        return _changed(weights, lambda path, x: _sent(x, (f"{above}{path}", MASTER) in away))

    def sent_moments(state: Tree, names: Sequence[str]) -> Tree:
        seen = Counter[str]()

        def send(path: str, x: jax.Array) -> jax.Array:
            weight = next(name for name in names if path.endswith(f".{name}"))
            seen[weight] += 1
            return _sent(x, (weight, seen[weight] - 1) in away)

        return _changed(state, send)

    def for_each_layer(layer: Callable[[jax.Array], Tree]) -> Tree:
        """Stacks the results for the indices of all layers, each in its memory."""

        def step(index: jax.Array, _: None) -> tuple[jax.Array, Tree]:
            return index + 1, layer(index)

        return jax.lax.scan(step, jnp.int32(0), None, length=config.model.num_layers)[1]

    if model is None:

        def stack(make: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
            return lambda keys: for_each_layer(lambda index: sent(split(make(keys[index])), "layers."))

        weights = Llama(config.model, key, stack=stack)
    else:
        stored, weights = model.layers, jax.tree.map(lambda weight: weight, model)
        weights.layers = for_each_layer(lambda index: sent(split(moved(_at(stored, index), DEVICE)), "layers."))
    for name in ("embedding", "head"):
        if (table := getattr(weights, name)) is not None:
            table = split(table)
            setattr(weights, name, with_value(table, _sent(table[...], (name, MASTER) in away)))
    trained: Any = partition(config, weights)[0]  # optax's types know dicts and tuples only
    names = [name for name, node in _named_weights(trained).items() if node is not None]
    of_layers = {name for name in names if name.startswith("layers.")}

    def moments(index: jax.Array) -> Any:
        state = sent_moments(optimizer.init(moved(_at(_of(trained, of_layers), index), DEVICE)), names)
        return jax.tree.map(lambda node: node if _is_weight(node) else None, state, is_leaf=_is_node)

    rest = sent_moments(optimizer.init(moved(_of(trained, set(names) - of_layers), DEVICE)), names)
    return weights, combine(for_each_layer(moments), rest)


def is_away(params: Llama, opt_state: Any) -> bool:
    """Returns whether some of the weights or moments are in host memory."""
    return any(map(is_on_host, jax.tree.leaves((params, opt_state))))


class Updated(NamedTuple):
    """Trained weights, moments and copies after an update."""

    params: Any
    opt_state: Any
    copies: Any


def update(
    optimizer: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    copies: Any,
    grads: Any,
    scale: jax.Array,
    applied: jax.Array,
) -> Updated:
    """Updates the trained weights, of which some or their moments are in host memory.

    Args:
        optimizer: an optimizer whose update of a layer's weight depends on that weight, its gradient and its moments only.
        params: the trained weights; None for frozen ones.
        opt_state: the optimizer's state.
        copies: copies on the card of the weights in host memory, which get the new values.
        grads: gradients, of any dtype.
        scale: float32 [], factor of the gradients.
        applied: bool []; where false, nothing changes.
    """
    names = [name for name, node in _named_weights(params).items() if node is not None]
    away = [name for name in names if is_away(_of(params, {name}), _of(opt_state, {name}))]
    stacked = [name for name in away if name.startswith("layers.")]
    one: Callable[..., tuple[Any, Any]] = functools.partial(_update, optimizer, scale=scale, applied=applied)
    at_once = set(names) - set(away)
    on_card = (_of(tree, at_once) for tree in (params, opt_state, grads))
    new_params, new_state = one(*on_card)
    parts = [Updated(new_params, new_state, _of(copies, at_once))]
    for name in sorted(set(away) - set(stacked)):
        stored: Any = tuple(_of(tree, {name}) for tree in (params, opt_state))
        if len(parts) > 1:  # one table after the other
            stored, parts[-1] = jax.lax.optimization_barrier((stored, parts[-1]))
        own = moved(stored, DEVICE)
        new = one(own[0], own[1], _of(grads, {name}))
        low = _of(copies, {name})
        new_params, new_state = _like((_of(params, {name}), _of(opt_state, {name})), new)
        parts.append(Updated(new_params, new_state, _cast_like(low, new[0])))
    of_layers = [Updated(_of(params, {name}), _of(opt_state, {name}), _of(copies, {name})) for name in stacked]
    parts += _update_by_layer(one, of_layers, [_of(grads, {name}) for name in stacked])
    return Updated._make(functools.reduce(combine, several) for several in zip(*parts, strict=True))


def _update_by_layer(one: Callable[..., Any], weights: list[Updated], grads: list[Any]) -> list[Updated]:
    """Updates stacked weights layer by layer: in each layer one after the other."""
    if not weights:
        return []

    def step(index: jax.Array, carry: list[Updated]) -> list[Updated]:
        done, before = list(carry), None
        for place, old in enumerate(carry):
            own: Any = _at((old.params, old.opt_state, grads[place]), index)
            if before is not None:  # otherwise all of them come at once
                own, before = jax.lax.optimization_barrier((own, before))
            own = moved(own, DEVICE)
            if place >= _IN_FLIGHT:  # otherwise the first one leaves when all have come
                own, done[place - _IN_FLIGHT] = jax.lax.optimization_barrier((own, done[place - _IN_FLIGHT]))
            params, opt_state = one(*own)
            before = jax.tree.leaves(params)
            done[place] = Updated(
                *_with((old.params, old.opt_state), (params, opt_state), index), _with(old.copies, params, index)
            )
        return done

    (stack, *_) = jax.tree.leaves(weights[0].params)
    return jax.lax.fori_loop(0, stack.shape[0], step, weights)


def _update(
    optimizer: optax.GradientTransformation, params: Any, opt_state: Any, grads: Any, *, scale: jax.Array, applied: jax.Array
) -> tuple[Any, Any]:
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, grads)
    updates, new = optimizer.update(grads, opt_state, params)
    updated = optax.apply_updates(params, updates), new
    return jax.tree.map(lambda new, old: jnp.where(applied, new, old), updated, (params, opt_state))


def _changed(tree: Tree, change: Callable[[str, jax.Array], jax.Array]) -> Tree:
    """Returns the weights of a tree changed by a function of the path and the array; other arrays stay."""
    nodes, structure = jax.tree.flatten(tree, is_leaf=_is_node)
    paths = _named_weights(tree)
    return jax.tree.unflatten(
        structure,
        [
            with_value(node, change(path, node[...])) if _is_weight(node) else node
            for path, node in zip(paths, nodes, strict=True)
        ],
    )


def _sent(x: jax.Array, away: bool) -> jax.Array:
    return jax.device_put(x, HOST) if away and not is_on_host(x) else x


def _named_weights(tree: Any) -> dict[str, Any]:
    """Returns all weights of a tree by the path, including those that are None."""
    paths, _ = jax.tree.flatten_with_path(tree, is_leaf=_is_node)
    return {jax.tree_util.keystr(path, simple=True, separator="."): node for path, node in paths}


def _of(tree: Tree, names: set[str]) -> Tree:
    """Returns the tree, of weights or of an optimizer, with None for weights other than those `names`."""
    nodes, structure = jax.tree.flatten(tree, is_leaf=_is_node)

    def is_chosen(path: str) -> bool:
        return any(path == name or path.endswith(f".{name}") for name in names)

    return jax.tree.unflatten(
        structure,
        [
            node if not _is_weight(node) or is_chosen(path) else None
            for path, node in zip(_named_weights(tree), nodes, strict=True)
        ],
    )


def _is_weight(node: Any) -> bool:
    return isinstance(node, nnx.Param)


def _is_node(node: Any) -> bool:
    return node is None or _is_weight(node)


def _like(old: Tree, new: Tree) -> Tree:
    """Returns new arrays in the memory of the old ones."""
    return jax.tree.map(lambda a, b: jax.device_put(b, HOST) if is_on_host(a) else b, old, new)


def _cast_like(old: Any, new: Any) -> Any:
    """Returns new values with the dtype of the old ones, where there are old ones."""
    return jax.tree.map(
        lambda a, b: None if a is None else with_value(a, b[...].astype(a[...].dtype)), old, new, is_leaf=_is_node
    )


def _at(tree: Tree, index: jax.Array) -> Tree:
    """Returns one layer of every weight in a tree; other arrays stay whole."""

    def at(node: Any) -> Any:
        if not _is_weight(node):
            return node
        return with_value(node, jax.lax.dynamic_index_in_dim(node[...], index, keepdims=False))

    return jax.tree.map(at, tree, is_leaf=_is_weight)


def _with(tree: Tree, layer: Any, index: jax.Array) -> Tree:
    """Returns the weights of a tree with another value for one layer, where they are; other arrays stay."""

    def put(node: Any, own: Any) -> Any:
        if not _is_weight(node):
            return node
        value = own[...].astype(node[...].dtype)
        value = jax.device_put(value, HOST) if is_on_host(node[...]) else value
        return with_value(node, jax.lax.dynamic_update_index_in_dim(node[...], value, index, 0))

    return jax.tree.map(put, tree, layer, is_leaf=_is_node)
