"""Layers run in order in every form of the stack, with the values and gradients of a plain loop; what is kept for the
backward pass is what is named."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from llamajax.config.parallel import MeshConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.saved_values import Names, Policy
from llamajax.parallel.sharding import spec
from llamajax.parallel.stack import run_layers, run_prefetching
from llamajax.parallel.zero import PreparedWeights, gathered, weight

B, T, D = 8, 4, 8
L, WIDTH = 3, 4
SCALED = np.linspace(0, 1, B * WIDTH, dtype=np.float32).reshape(B, WIDTH)
NAMED = jax.checkpoint_policies.save_any_names_but_these()
SAVED = [None, (), ("projected",)]


class Matrix(nnx.Module):
    """A matrix, split for storage, and a scale, which is read as it is stored."""

    def __init__(self, key: jax.Array):
        def draw(shape: tuple[int, ...], dtype: str, out_sharding: jax.P) -> jax.Array:
            return jax.random.normal(key, shape, dtype, out_sharding=out_sharding) / 5

        self.w = weight((D, D), "float32", stored=("embed", "mlp"), compute=(None, None), init=draw)
        self.scale = weight((D,), "float32", stored=(None,), compute=None, init=jnp.ones)


def first_part(matrix: Matrix, x: jax.Array, shared: jax.Array) -> jax.Array:
    projected = checkpoint_name(jnp.einsum("BTD,DE->BTE", x, matrix.w[...]), "projected")
    return x + jnp.sin(projected) * matrix.scale[...][None, None] + shared


def second_part(matrix: Matrix, x: jax.Array, shared: jax.Array) -> jax.Array:
    return x + jnp.tanh(jnp.einsum("BTD,DE->BTE", x * shared, matrix.w[...])) * matrix.scale[...][None, None]


def layers(num_layers: int) -> tuple[Matrix, Matrix]:
    first, second = jax.random.split(jax.random.key(0))
    make = jax.vmap(Matrix)
    return make(jax.random.split(first, num_layers)), make(jax.random.split(second, num_layers))


def activations(seed: int, count: int) -> list[jax.Array]:
    """Random arrays [B, T, D] on the current mesh."""
    arrays = np.random.default_rng(seed).standard_normal((count, B, T, D), np.float32)
    return [jax.device_put(array, spec("batch", "seq", None)) for array in arrays]


def plain(weights: tuple[Matrix, Matrix], x: jax.Array, shared: jax.Array, _: object) -> jax.Array:
    def run(x: jax.Array, layer: tuple[Matrix, Matrix], _: None, shared: jax.Array) -> tuple[jax.Array, None]:
        return second_part(layer[1], first_part(layer[0], x, shared), shared), None

    return run_layers(PreparedWeights(weights), run, x, shared=[shared], dtype="float32")[0]


def policy(saved: tuple[str, ...] | None) -> Policy | None:
    if not saved:
        return None if saved is None else jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint_policies.save_only_these_names(*saved)


NAMES = Names("input", "projected"), Names("between", "others")
ON_HOST = ("input", "between", "projected", "others")


def prefetching(
    weights: tuple[Matrix, Matrix],
    x: jax.Array,
    shared: Any,
    saved: tuple[str, ...] | None,
    *,
    unrolled: bool = False,
    offloaded: tuple[str, ...] = (),
) -> jax.Array:
    kinds = shared if isinstance(shared, tuple) else (shared,)
    return run_prefetching(
        PreparedWeights((weights, None)), (first_part, second_part), x, kinds,
        dtype="float32", saved=policy(saved), made_first=NAMED, unrolled=unrolled, names=NAMES, offloaded=offloaded,
    )  # fmt: skip


def value_and_gradients(run, weights, x, shared, saved):
    def total(weights, x):
        return jnp.sum(jnp.cos(run(weights, x, shared, saved)))

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(weights, x)


@pytest.mark.parametrize("num_layers", [1, 2, 3, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("unrolled", [False, True], ids=["loop", "unrolled"])
def test_values_and_gradients_are_those_of_a_plain_loop(num_layers, saved, unrolled):
    jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    x, shared = activations(num_layers, 2)
    weights = layers(num_layers)
    expected, expected_grads = value_and_gradients(plain, weights, x, shared, None)
    found, grads = value_and_gradients(functools.partial(prefetching, unrolled=unrolled), weights, x, shared, saved)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for grad, like, stored in zip(*map(jax.tree.leaves, (grads, expected_grads, (weights, x))), strict=True):
        np.testing.assert_allclose(grad, like, rtol=0, atol=1e-5 * np.abs(like).max())
        assert np.abs(like).max() > 1e-3
        assert jax.typeof(grad) == jax.typeof(stored)


@pytest.mark.parametrize("num_layers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("unrolled", [False, True], ids=["loop", "unrolled"])
def test_what_layers_sum_beside_has_its_gradient_in_each_of_them(num_layers, saved, unrolled):
    """Activations are any tree: a part may add to a sum over all layers."""
    jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    x, shared = activations(num_layers, 2)
    factor = jax.device_put(np.random.default_rng(0).standard_normal((B, T), np.float32), spec("batch", "seq"))

    def summing(part):
        def run(matrix, carried, shared):
            (x, total), out = carried, part(matrix, carried[0], shared)
            return out, total + jnp.mean(jnp.square(out - x), axis=-1)

        return run

    parts = summing(first_part), summing(second_part)

    def prefetched(weights, carried):
        return run_prefetching(
            PreparedWeights((weights, None)), parts, carried, [shared],
            dtype="float32", saved=policy(saved), made_first=NAMED, unrolled=unrolled,
        )  # fmt: skip

    def one_by_one(weights, carried):
        for index in range(num_layers):
            for part, matrix in zip(parts, gathered(jax.tree.map(lambda w, i=index: w[i], weights), "float32"), strict=True):
                carried = part(matrix, carried, shared)
        return carried

    def value_and_gradients(run):
        def value(weights, x):
            out, total = run(weights, (x, jnp.zeros((B, T), out_sharding=spec("batch", "seq"))))
            return jnp.sum(jnp.cos(out)) + jnp.sum(factor * total)

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(layers(num_layers), x)

    (found, grads), (expected, expected_grads) = value_and_gradients(prefetched), value_and_gradients(one_by_one)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for grad, like in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(grad, like, rtol=0, atol=1e-5 * np.abs(like).max())


def one_by_one(weights: tuple[Matrix, Matrix], x: jax.Array, shared: tuple[jax.Array, ...], _: object) -> jax.Array:
    """In plain Python."""
    for index in range(len(weights[0].w)):
        first, second = gathered(jax.tree.map(lambda stacked, index=index: stacked[index], weights), "float32")
        own = shared[index % len(shared)]
        x = second_part(second, first_part(first, x, own), own)
    return x


def in_rounds(
    weights: tuple[Matrix, Matrix], x: jax.Array, shared: tuple[jax.Array, ...], saved: tuple[str, ...] | None
) -> jax.Array:
    def run(x: jax.Array, layer: tuple[Matrix, Matrix], _: None, shared: jax.Array) -> tuple[jax.Array, None]:
        return second_part(layer[1], first_part(layer[0], x, shared), shared), None

    return run_layers(PreparedWeights(weights), run, x, shared=shared, dtype="float32", saved=policy(saved))[0]


FORMS = {"loop": prefetching, "unrolled": functools.partial(prefetching, unrolled=True), "scan": in_rounds}


def turns():
    """Each form with other values saved every day; `slow` has eight layers in all ways, most others in one."""
    for number, sizes in enumerate([(8, 3), (1, 2), (3, 2), (7, 3), (6, 3), (2, 2), (6, 2)]):
        for place, form in enumerate(FORMS):
            for other, saved in enumerate(SAVED):
                everyday = number == 0 and place == other
                sampled = number == 0 or (number < 5 and place == other == number % 3)
                marks = () if everyday else pytest.mark.slow if sampled else pytest.mark.long
                yield pytest.param(form, saved, *sizes, marks=marks)


@pytest.mark.parametrize(("form", "saved", "num_layers", "num_kinds"), list(turns()))
def test_layers_of_several_kinds_take_turns(form, saved, num_layers, num_kinds):
    jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    x, *shared = activations(num_layers, 1 + num_kinds)
    weights = layers(num_layers)
    expected, expected_grads = value_and_gradients(one_by_one, weights, x, tuple(shared), None)
    found, grads = value_and_gradients(FORMS[form], weights, x, tuple(shared), saved)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for grad, like, stored in zip(*map(jax.tree.leaves, (grads, expected_grads, (weights, x))), strict=True):
        np.testing.assert_allclose(grad, like, rtol=0, atol=1e-5 * np.abs(like).max())
        assert np.abs(like).max() > 1e-3
        assert jax.typeof(grad) == jax.typeof(stored)


@pytest.mark.parametrize(("saved", "stacks"), [((), 1), (("projected",), 3)])
def test_a_stack_is_kept_of_each_kind(saved, stacks):
    """The stacks hold whole rounds; values that the other layers keep stay where they are made."""
    jax.set_mesh(make_mesh(MeshConfig(fsdp=8)))
    x = jax.device_put(np.zeros((B, T, D), np.float32), spec("batch", "seq", None))

    def out(weights, x):
        return prefetching(weights, x, (x, x), saved)

    _, backward = jax.eval_shape(functools.partial(jax.vjp, out), layers(6), x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(backward)]
    assert shapes.count((2, B, T, D)) == 2 * stacks  # four of the first five layers
    assert shapes.count((B, T, D)) == 2 * stacks + 1  # of the two behind them; and what layers share
    assert not any(len(shape) == 3 and shape[0] == 2 for shape in shapes)


@pytest.mark.parametrize(("saved", "stacks"), [((), 1), (("projected",), 3)])
def test_a_stack_is_kept_of_what_parts_are_given_and_of_what_is_named(saved, stacks):
    """With no names, of the layer's input alone; of gathered weights and of what layers share, nothing."""
    jax.set_mesh(make_mesh(MeshConfig(fsdp=8)))
    x = jax.device_put(np.zeros((B, T, D), np.float32), spec("batch", "seq", None))

    def out(weights, x):
        return prefetching(weights, x, x, saved)

    _, backward = jax.eval_shape(functools.partial(jax.vjp, out), layers(4), x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(backward)]
    assert shapes.count((3, B, T, D)) == stacks  # of all layers but the last
    assert sum(len(shape) == 3 and shape[0] == 3 for shape in shapes) == 0


@pytest.mark.parametrize(("saved", "kept"), [((), 1), (("projected",), 3)])
def test_unrolled_layers_keep_the_same_where_it_is_made(saved, kept):
    jax.set_mesh(make_mesh(MeshConfig(fsdp=8)))
    x = jax.device_put(np.zeros((B, T, D), np.float32), spec("batch", "seq", None))
    run = functools.partial(prefetching, unrolled=True)
    _, backward = jax.eval_shape(functools.partial(jax.vjp, lambda weights, x: run(weights, x, x, saved)), layers(4), x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(backward)]
    assert shapes.count((B, T, D)) == 4 * kept + 1  # and what all layers share
    assert not any(len(shape) == 4 for shape in shapes)


class Scale(nnx.Module):
    """A multiple of the unit matrix."""

    def __init__(self, value: jax.Array):
        def unit(shape: tuple[int, ...], dtype: str, out_sharding: jax.P) -> jax.Array:
            return jax.reshard(value * jnp.eye(*shape, dtype=dtype), out_sharding)

        self.w = weight((WIDTH, WIDTH), "float32", stored=(None, "mlp"), compute=(None, None), init=unit)


def scales() -> Scale:
    return jax.vmap(Scale)(jnp.arange(1.0, 1 + L))


def run_scales(layers: Scale, x: jax.Array, saved: tuple[str, ...] | None) -> tuple[jax.Array, jax.Array]:
    def add(x: jax.Array, layer: Scale, addend: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        scaled = checkpoint_name(jnp.einsum("BD,DE->BE", x, layer.w[...]), "scaled")
        return jnp.sin(scaled) + addend, scaled

    policy = None if saved is None else jax.checkpoint_policies.save_only_these_names(*saved)
    return run_layers(PreparedWeights(layers), add, x, jnp.arange(10.0, 10 + L), dtype="float32", saved=policy)


@pytest.mark.parametrize("saved", [None, (), ("scaled",)])
def test_layers_run_in_order_with_their_own_inputs(saved):
    x = SCALED
    out, results = jax.jit(run_scales, static_argnums=2)(scales(), jax.device_put(x, spec("batch", None)), saved)
    for layer in range(L):
        scaled = x * (layer + 1)
        np.testing.assert_allclose(results[layer], scaled, rtol=1e-6)
        x = np.sin(scaled) + 10 + layer
    np.testing.assert_allclose(out, x, rtol=1e-6)


@pytest.mark.parametrize(("saved", "kept"), [((), 1), (("scaled",), 2)])
def test_named_values_are_kept_beside_the_carry(saved, kept):
    x = jax.device_put(SCALED, spec("batch", None))

    def out(layers: Scale, x: jax.Array) -> jax.Array:
        return run_scales(layers, x, saved)[0]

    _, backward = jax.eval_shape(functools.partial(jax.vjp, out), scales(), x)
    assert [leaf.shape for leaf in jax.tree.leaves(backward)].count((L, B, WIDTH)) == kept
