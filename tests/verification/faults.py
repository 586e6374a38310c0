"""Faults in parallel code, put in at the source: what devices do together goes wrong, where there is more than one.

Each is a context; nothing that was compiled within one is used outside.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from llamajax.model import llama
from llamajax.step import loss, step
from llamajax.verification import reference_run


@contextlib.contextmanager
def put_in(target: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`target.name` becomes what `make` makes of it."""
    compiled: Any = reference_run.step_with_gradients  # jax's type of it does not tell of its cache
    compiled.clear_cache()
    with mock.patch.object(target, name, make(getattr(target, name))):
        yield
    compiled.clear_cache()


def _several() -> bool:
    return jax.sharding.get_abstract_mesh().size > 1


def _over(axes: Any, axis: str) -> bool:
    return axis in ((axes,) if isinstance(axes, str) else tuple(axes))


def scaled_sum(axis: str, factor: Callable[[int], float]):
    """Every sum over `axis` that is written by hand is scaled by a function of the axis' size."""

    def make(psum):
        def wrong(x, axes, **options):
            scale = factor(jax.lax.axis_size(axis)) if _over(axes, axis) else 1
            return jax.tree.map(lambda value: (value * scale).astype(value.dtype), psum(x, axes, **options))

        return wrong

    return put_in(jax.lax, "psum", make)


def first_part_only(axis: str):
    """Every sum over `axis` written by hand is the first device's part."""

    def make(psum):
        def wrong(x, axes, **options):
            if _over(axes, axis):
                x = jax.tree.map(lambda value: jnp.where(jax.lax.axis_index(axis) == 0, value, 0), x)
            return psum(x, axes, **options)

        return wrong

    return put_in(jax.lax, "psum", make)


def never_summed(name: str, axis: str):
    """A gradient is another one on every device of `axis`, and nothing checks that its copies are alike."""

    def differ(x: jax.Array) -> jax.Array:
        lies = jax.typeof(x).sharding.spec
        own = jax.shard_map(lambda x: x * (1 + jax.lax.axis_index(axis)), in_specs=lies, out_specs=lies, check_vma=False)
        return own(x)

    return _with_gradient(name, differ)


def mean_scatter(axis: str):
    """The gradients of embedding and head, scattered over `axis`, are divided by its size."""
    return _scattered(axis, lambda part: part / jax.lax.axis_size(axis))


def lost_scatter(axis: str):
    """The last device gets nothing."""
    return _scattered(axis, lambda part: jnp.where(jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1, 0, part))


def turned_scatter(axis: str):
    """Each device gets the part of another."""

    def turn(part: jax.Array) -> jax.Array:
        size = jax.lax.axis_size(axis)
        return jax.lax.ppermute(part, axis, [(i, (i + 1) % size) for i in range(size)])

    return _scattered(axis, turn)


def _scattered(axis: str, change: Callable[[jax.Array], jax.Array]):
    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return x

    def back(_: None, part: jax.Array) -> tuple[jax.Array]:
        lies = jax.typeof(part).sharding.spec
        return (jax.shard_map(change, in_specs=lies, out_specs=lies)(part),)

    same.defvjp(lambda x: (x, None), back)

    def make(gathered):
        def wrong(weights, *given):
            return gathered(jax.tree.map(same, weights) if _several() else weights, *given)

        return wrong

    return put_in(loss, "gathered", make)


def turned_gather(along: str):
    """Every gather over an axis that is written by hand puts each device's part one place further."""

    def make(all_gather):
        def wrong(x, axes, *, axis: int, **options):
            whole = all_gather(x, axes, axis=axis, **options)
            return jnp.roll(whole, x.shape[axis], axis) if _over(axes, along) else whole

        return wrong

    return put_in(jax.lax, "all_gather", make)


def _rolled(x: jax.Array, shift: int, axis: int) -> jax.Array:
    """`jnp.roll`, which jax 0.12.0.1 refuses where the array's gradient waits for its sum over devices."""
    first, last = jnp.split(x, [-shift % x.shape[axis]], axis)
    return jnp.concatenate([last, first], axis)


def turned_tables():
    """Gathered parts of embedding and head are in the wrong columns."""

    def make(gathered):
        def wrong(*given):
            whole = gathered(*given)
            return jax.tree.map(lambda x: _rolled(x, x.shape[-1] // 2, -1), whole) if _several() else whole

        return wrong

    return put_in(loss, "gathered", make)


def next_index(axis: str):
    """Every device takes itself for the next one along `axis`."""

    def make(axis_index):
        def wrong(axes):
            own = axis_index(axes)
            return (own + 1) % jax.lax.axis_size(axis) if _over(axes, axis) else own

        return wrong

    return put_in(jax.lax, "axis_index", make)


def next_layer():
    """Off by one: each layer computes with the weights of the next."""
    return _with_layers(lambda weights: _rolled(weights, -1, 0))


def lost_gradients_of_layer(layer: int):
    """The gradients of one layer are dropped."""

    def lose(weights: jax.Array) -> jax.Array:
        lost = jax.lax.stop_gradient(weights[layer : layer + 1])
        return jnp.concatenate([weights[:layer], lost, weights[layer + 1 :]])

    return _with_layers(lose)


def _with_layers(change: Callable[[jax.Array], jax.Array]):
    def make(run_layers):
        def wrong(layers, *given, **options):
            return run_layers(jax.tree.map(change, layers) if _several() else layers, *given, **options)

        return wrong

    return put_in(llama, "run_layers", make)


def dropped_micro_batch():
    """The last micro-batch is left out."""

    def make(right):
        return lambda run, model, batch: right(run, model, {name: x[:-1] for name, x in batch.items()})

    return _where_several(reference_run, "loss_and_grads", make)


def mean_of_means():
    """Each micro-batch is divided by its own number of tokens, and then by the number of micro-batches."""

    def make(right):
        def wrong(run, model, batch):
            own = [
                right(run, model, {name: x[i : i + 1] for name, x in batch.items()})
                for i in range(run.config.train.grad_accum_steps)
            ]
            losses, grads = jax.tree.map(lambda *values: sum(values) / len(values), *own)
            return losses | {"tokens": sum(each["tokens"] for each, _ in own)}, grads

        return wrong

    return _where_several(reference_run, "loss_and_grads", make)


def swapped_dims(name: str):
    """The last two dims of a gradient, which are of one size, are swapped."""
    return _with_gradient(name, lambda x: jnp.swapaxes(x, -1, -2))


def _with_gradient(name: str, change: Callable[[jax.Array], jax.Array]):
    def make(right):
        def wrong(run, model, batch):
            losses, grads = right(run, model, batch)
            return losses, jax.tree_util.tree_map_with_path(
                lambda path, x: change(x) if name in jax.tree_util.keystr(path) else x, grads
            )

        return wrong

    return _where_several(reference_run, "loss_and_grads", make)


def stale_moments(after: int):
    """The optimizer's moments are handed on as they were, from the step after this many."""

    def make(right):
        def wrong(config, state, grads, tokens):
            done, metrics = right(config, state, grads, tokens)
            kept = jax.tree.map(
                lambda new, old: jnp.where(state.step < after, new, old) if new.ndim else new,
                done.opt_state,
                state.opt_state,
            )
            return dataclasses.replace(done, opt_state=kept), metrics

        return wrong

    return _where_several(reference_run, "apply_gradients", make)


def norm_without_one_part():
    """Gradients are clipped by a norm that half of the sum is missing from."""
    return _where_several(step, "global_norm", lambda right: lambda grads: right(grads) / 2**0.5)


def _where_several(target: Any, name: str, make: Callable[[Any], Any]):
    return put_in(target, name, lambda right: lambda *given: (make(right) if _several() else right)(*given))
