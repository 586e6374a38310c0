"""Products of tokens with their experts' matrices, by every kernel that runs here, against the definition; and the kernels in
Pallas as XLA compiles them for GPUs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.experts import ExpertKernel
from llamajax.config.parallel import MeshConfig
from llamajax.kernels import grouped
from llamajax.kernels.grouped import Form, experts_on_rows
from llamajax.kernels.grouped_pallas import Named, visits
from llamajax.parallel.dispatch import Groups
from llamajax.parallel.float8 import E4M3, E5M2, Float8, rounded
from llamajax.parallel.mesh import make_mesh

R, M, E, I_, F = 330, 300, 4, 40, 72
"""Rows, places for them, experts, widths: none of them is a multiple of a tile."""
SIZES = {
    "uneven": (5, 0, 170, 22),
    "all in one": (0, 300, 0, 0),
    "whole tiles": (128, 128, 0, 44),
    "one row": (0, 0, 0, 1),
    "no rows": (0, 0, 0, 0),
}


on_device = functools.partial(jax.shard_map, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)


@pytest.fixture(autouse=True)
def _one_device():
    jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1]))


def groups_of(sizes: tuple[int, ...], seed: int = 0) -> Groups:
    """Groups of random rows; places beyond them name a row that has an expert."""
    order, num = np.random.default_rng(seed).permutation(R)[:M].astype(np.int32), sum(sizes)
    order[num:] = order[0]
    is_row, place = np.zeros(R, bool), np.zeros(R, np.int32)
    is_row[order[:num]], place[order[:num]] = True, np.arange(num)
    return Groups(*map(jnp.asarray, (order, np.asarray(sizes, np.int32), is_row, place)))


def experts_of(groups: Groups) -> np.ndarray:
    """The expert of each row as one-hot [R, E]; zeros for rows of none."""
    of_place = np.repeat(np.arange(E), np.asarray(groups.sizes))
    hot = np.zeros((R, E), np.float32)
    hot[np.asarray(groups.order)[: len(of_place)], of_place] = 1
    return hot


def drawn(dtype: str = "float32") -> Any:
    rng = np.random.default_rng(1)
    shapes = (R, I_), (R,), (E, I_, 2, F), (E, F, I_), (R, I_)
    x, weights, w_gate_up, w_down, d = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return jnp.asarray(x, dtype), jnp.asarray(weights), jnp.asarray(w_gate_up, dtype), jnp.asarray(w_down, dtype), d


@functools.cache
def results(kernel: ExpertKernel, dtype: str) -> Any:
    """Returns a compiled function from groups to the results of `experts_on_rows` and all gradients, by rows that NaN
    replaces where they have no expert."""

    @jax.jit
    @on_device
    def run(groups: Groups, x: jax.Array, weights: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, d: jax.Array) -> Any:
        is_row = groups.is_row[:, None]

        def loss(x: jax.Array, weights: jax.Array, *matrices: jax.Array) -> Any:
            y = experts_on_rows(x, weights, groups, *matrices, kernel)
            y = jnp.where(is_row, y, 0)
            return jnp.sum(y.astype(jnp.float32) * d), y

        known = jnp.where(is_row, x, jnp.nan), jnp.where(groups.is_row, weights, jnp.nan), w_gate_up, w_down
        (_, y), (d_x, *gradients) = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*known)
        return y, jnp.where(is_row, d_x, 0), *gradients

    return lambda groups: run(groups, *drawn(dtype))


@functools.cache
def definition() -> Any:
    x, weights, *matrices, d = drawn()

    @jax.jit
    def run(hot: jax.Array) -> Any:
        def loss(x: jax.Array, weights: jax.Array, w_gate_up: jax.Array, w_down: jax.Array) -> Any:
            h = jnp.einsum("RI,EIAF,RE->ARF", x, w_gate_up, hot, precision="highest")
            hidden = jax.nn.silu(h[0]) * h[1] * weights[:, None]
            y = jnp.einsum("RF,EFI,RE->RI", hidden, w_down, hot, precision="highest")
            return jnp.sum(y * d), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, weights, *matrices)
        return y, *gradients

    return run


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("kernel", "dtype", "bound"),
    [
        ("plain", "float32", 1e-5),
        ("pallas", "float32", 1e-5),
        pytest.param("pallas", "bfloat16", 3e-2, marks=pytest.mark.slow),
    ],
)
def test_results_and_gradients_are_those_of_the_definition(kernel: ExpertKernel, dtype: str, bound: float, sizes: str):
    groups = groups_of(SIZES[sizes])
    found, expected = results(kernel, dtype)(groups), definition()(experts_of(groups))
    for name, own, true in zip(("y", "x", "weights", "w_gate_up", "w_down"), found, expected, strict=True):
        true = np.asarray(true)
        np.testing.assert_allclose(
            np.asarray(own, np.float32), true, rtol=0, atol=bound * max(np.abs(true).max(), 1e-3), err_msg=name
        )


def test_a_tile_is_visited_once_for_every_expert_in_it():
    found = visits(jnp.asarray([5, 0, 170, 22, 0]), 300)
    assert found.count[0] == 4
    assert list(zip(found.expert[:4].tolist(), found.tile[:4].tolist(), strict=True)) == [(0, 0), (2, 0), (2, 1), (3, 1)]
    assert found.bounds.tolist() == [0, 5, 5, 175, 197, 197]
    for sizes in ([300, 0, 0], [99, 100, 101], [0, 0, 0]):
        own = visits(jnp.asarray(sizes), 300)
        assert own.count[0] <= len(own.tile)


def plain_values(x: Float8) -> np.ndarray:
    return np.asarray(x.values, np.float32) * np.asarray(x.scale)


@pytest.mark.parametrize("form", ["plain", "interpreted"])
@pytest.mark.parametrize("named", ["x", "out"])
def test_products_in_float8_are_those_of_rounded_factors(form: Form, named: Named):
    """Rows of no expert, which may hold anything, change no scale."""
    groups, rng = groups_of(SIZES["uneven"]), np.random.default_rng(2)
    num, hot = int(groups.sizes.sum()), experts_of(groups)
    x, d = (rng.standard_normal((R, width)).astype(np.float32) for width in (I_, F))
    w = rounded(jnp.asarray(rng.standard_normal((E, I_, F)), jnp.float32), E4M3)
    w = dataclasses.replace(w, stand_in=jnp.zeros(w.shape))
    padding = groups._replace(order=jnp.pad(groups.order, (0, 384 - M)))
    order = np.asarray(padding.order)

    def at_rows(rows: np.ndarray) -> np.ndarray:
        return np.where(np.asarray(groups.is_row)[:, None], rows, np.nan)

    def in_places(rows: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(order))[:, None] < num, rows[order], np.nan)

    @jax.jit
    @on_device
    def run(x: jax.Array, d: jax.Array, w: Float8, groups: Groups) -> Any:
        function = grouped.rows_to_groups if named == "x" else grouped.groups_to_rows
        y, pull_back = jax.vjp(lambda x, own: function(form, x, dataclasses.replace(w, stand_in=own), groups), x, w.stand_in)
        return y, *pull_back(d)

    ways = (at_rows, in_places) if named == "x" else (in_places, at_rows)
    y, d_x, d_w = run(ways[0](x), ways[1](d), w, padding)
    x8, d8 = (plain_values(rounded(jnp.asarray(hot.any(1)[:, None] * a), form)) for a, form in ((x, E4M3), (d, E5M2)))
    w8 = plain_values(w)
    expected = np.einsum("RI,EIF,RE->RF", x8, w8, hot), np.einsum("RF,EIF,RE->RI", d8, w8, hot)
    for own, true, way in zip((y, d_x), expected, ways[::-1], strict=True):
        known = way(true)
        np.testing.assert_allclose(np.where(np.isnan(known), np.nan, own), known, rtol=0, atol=1e-4)
    np.testing.assert_allclose(d_w, np.einsum("RI,RF,RE->EIF", x8, d8, hot), rtol=0, atol=1e-3)
