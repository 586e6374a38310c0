"""Saved values that wait in host memory change no number, whatever the form of the stack."""

import functools

import jax
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.stack import run_prefetching
from llamajax.parallel.zero import PreparedWeights
from tests.parallel.test_stack import (
    NAMES,
    ON_HOST,
    SAVED,
    activations,
    first_part,
    layers,
    policy,
    prefetching,
    value_and_gradients,
)

HOST = jax.memory.Space.Host


def forms():
    """Six layers of three forms every day, with other values saved; one or three of every form in a slow run, the rest
    in `long`."""
    for place, (unrolled, num_kinds) in enumerate([(False, 1), (True, 1), (False, 2), (True, 2)]):
        for number, saved in enumerate(SAVED):
            for num_layers in (1, 2, 3, 6):
                everyday = num_layers == 6 and place == number
                sampled = num_layers in (1, 3) and (place + number) % 3 == 1
                yield pytest.param(
                    unrolled,
                    num_kinds,
                    saved,
                    num_layers,
                    marks=() if everyday else pytest.mark.slow if sampled else pytest.mark.long,
                )


@pytest.mark.parametrize(("unrolled", "num_kinds", "saved", "num_layers"), list(forms()))
def test_gradients_are_the_same_to_the_last_bit(unrolled, num_kinds, saved, num_layers):
    jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    x, *shared = activations(num_layers, 1 + num_kinds)
    run = functools.partial(prefetching, unrolled=unrolled)
    weights = layers(num_layers)
    expected = value_and_gradients(run, weights, x, tuple(shared), saved)
    found = value_and_gradients(functools.partial(run, offloaded=ON_HOST), weights, x, tuple(shared), saved)
    for own, like in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(own, like)
    assert all(np.abs(like).max() > 1e-3 for like in jax.tree.leaves(expected))


def saved_on_host(run, x):
    """Values on the host that four layers save."""

    def saved(weights, x):
        return jax.vjp(run, weights, x)[1]

    return [value for value in jax.jit(saved).trace(layers(4), x).jaxpr.out_avals if value.memory_space == HOST]


@pytest.mark.parametrize("unrolled", [False, True], ids=["loop", "unrolled"])
@pytest.mark.parametrize(
    ("offloaded", "per_layer"), [((), 0), (("input",), 1), (("projected",), 1), (("between", "projected"), 2), (ON_HOST, 3)]
)
def test_the_named_values_of_all_but_the_last_layers_wait_on_the_host(unrolled, offloaded, per_layer):
    jax.set_mesh(make_mesh(MeshConfig(fsdp=8)))
    (x,) = activations(0, 1)

    def run(weights, x):
        return prefetching(weights, x, x, ("projected",), unrolled=unrolled, offloaded=offloaded)

    # The last of four layers is needed at once; written out, the one before it is as well.
    assert sum(value.size for value in saved_on_host(run, x)) == (2 if unrolled else 3) * per_layer * x.size


def test_what_is_small_stays_on_the_card():
    jax.set_mesh(make_mesh(MeshConfig(fsdp=8)))
    (x,) = activations(0, 1)

    def part(matrix, carried, shared):
        return first_part(matrix, carried[0], shared), carried[1] + 1

    made_first = policy(("projected",))
    assert made_first is not None

    def run(weights, x):
        carried = x, jax.numpy.zeros(x.shape[:2], out_sharding=spec("batch", "seq"))
        return run_prefetching(
            PreparedWeights((weights, None)), (part, part), carried, [x],
            dtype="float32", saved=policy(()), made_first=made_first, names=NAMES, offloaded=ON_HOST,
        )  # fmt: skip

    assert [value.shape for value in saved_on_host(run, x)] == [(3, *x.shape)]
