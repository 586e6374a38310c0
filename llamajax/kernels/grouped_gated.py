"""Experts' hidden layers in Pallas: the products of `llamajax.kernels.grouped_pallas` whose programs also apply the
activation to their tile, forward and backward, so that no pass of its own reads and writes all rows.

Backward, a program recomputes its tile of the hidden layer from gates and inputs, so the forward pass need not keep it; the
gradient of the hidden layer never reaches memory. All functions run on one device, within `shard_map`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Float32

from llamajax.kernels.grouped_pallas import Tile, multiply, num_tiles, padded
from llamajax.parallel.dispatch import Groups
from llamajax.parallel.float8 import Float8

_TURNS = {4: 4, 2: 2}
"""Parts of a tile whose gradients a program computes in turn, by the bytes of a number: threads lack registers for a whole
tile."""


class Gradients(NamedTuple):
    """Results of the backward pass of a hidden layer, expert after expert."""

    d_h: Float[Array, "P AF"]
    """Gradient of gates and inputs."""
    hidden: Float[Array, "P F"]
    """The hidden layer itself, for the gradient of the matrices out of it."""
    d_weights: Float32[Array, "P"]
    """Gradient of the rows' weights."""


def activated(
    weights: Float32[Array, "n"], gate: Float32[Array, "n F"], *up: Float32[Array, "n F"]
) -> Float32[Array, "n F"]:
    """Returns the hidden layer of rows with these weights: SwiGLU, or SiLU without `up`."""
    hidden = jax.nn.silu(gate) * weights[:, None]
    return hidden * up[0] if up else hidden


def _silu_and_slope(x: Float32[Array, "n F"]) -> tuple[Float32[Array, "n F"], Float32[Array, "n F"]]:
    sigmoid = jax.nn.sigmoid(x)
    silu = x * sigmoid
    return silu, sigmoid + silu * (1 - sigmoid)


def hidden_layer(
    x: Float[Array, "R I"] | Float8,
    w: Float[Array, "E I AF"] | Float8,
    weights: Float32[Array, "R"],
    groups: Groups,
    *,
    gates: int,
    interpret: bool = False,
) -> tuple[Float[Array, "P AF"], Float[Array, "P F"]]:
    """Returns gates and inputs of the rows' hidden layers, and the hidden layers times the rows' weights, expert after
    expert, in x's dtype. Places of no expert are left unwritten.

    Args:
        x: rows.
        w: matrices into the hidden layers, those of gates and inputs beside each other; in float8 if x is.
        weights: factor of each row.
        groups: rows of each expert.
        gates: A, 2 with gates, else 1.
        interpret: compute with jax, on any device and slowly, instead of compiling with Triton.

    Raises:
        ConfigError: an array in float8 is too large.
    """

    def finish(tile: Tile, products: Sequence[jax.Array], others: Sequence[Any], results: Sequence[Any]) -> None:
        (weights,), (h, hidden) = others, results
        # What the backward pass reads is what it differentiates.
        rounded = [product.astype(h.dtype) for product in products]
        for part, own in enumerate(rounded):
            tile.store(h, own, part, gates)
        tile.store(hidden, activated(tile.of_rows(weights), *(own.astype(jnp.float32) for own in rounded)))

    places, width = len(padded(groups.order)), w.shape[2]
    results = [((places, width), x.dtype), ((places, width // gates), x.dtype)]
    h, hidden = multiply(
        "grouped_rows_gated", finish, x, w, groups, results, weights, is_named=True, parts=gates, interpret=interpret
    )
    return h, hidden


def hidden_gradients(
    dy: Float[Array, "R I"] | Float8,
    w: Float[Array, "E F I"] | Float8,
    h: Float[Array, "P AF"],
    weights: Float32[Array, "R"],
    groups: Groups,
    *,
    interpret: bool = False,
) -> Gradients:
    """Returns the gradients of `hidden_layer`; places of no expert hold anything.

    Args:
        dy: gradient of the experts' results, at their rows.
        w: matrices out of the hidden layers; in float8 if dy is.
        h: gates and inputs.
        weights: factor of each row.
        groups: rows of each expert.
        interpret: see `hidden_layer`.

    Raises:
        ConfigError: an array in float8 is too large.
    """
    (places, width), F = h.shape, w.shape[1]
    gates, turns = width // F, _TURNS[h.dtype.itemsize]

    def finish(tile: Tile, products: Sequence[jax.Array], others: Sequence[Any], results: Sequence[Any]) -> None:
        (d_hidden,), (h, weights), (d_h, hidden, d_weights) = products, others, results
        # By hand and in this order, because jax's pull-back of `activated` keeps more numbers than a thread has registers.
        silu, slope = _silu_and_slope(tile.load(h, 0, gates).astype(jnp.float32))
        up = tile.load(h, 1, gates).astype(jnp.float32) if gates == 2 else 1.0
        of_rows, product = tile.of_rows(weights)[:, None], silu * up
        triton.store(d_weights.at[tile.place, tile.number], jnp.sum(d_hidden * product, axis=1), mask=tile.is_own)
        tile.store(hidden, product * of_rows)
        by_row = d_hidden * of_rows
        if gates == 2:
            tile.store(d_h, by_row * silu, 1, gates)
        tile.store(d_h, by_row * slope * up, 0, gates)

    # Each tile writes its own sums over columns, which are then added up in one order.
    of_tiles = (places, num_tiles(F, turns)), jnp.float32
    results = [(h.shape, h.dtype), ((places, F), h.dtype), of_tiles]
    d_h, hidden, d_weights = multiply(
        "grouped_rows_gradient",
        finish,
        dy,
        w,
        groups,
        results,
        h,
        weights,
        is_named=True,
        transposed=True,
        turns=turns,
        interpret=interpret,
    )
    return Gradients(d_h, hidden, jnp.sum(d_weights, axis=1))
