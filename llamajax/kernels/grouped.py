"""Products of tokens with their experts' matrices, on one device, within `shard_map`: the rows of an expert are a group.

Rows need not lie group after group: an order names them. On GPUs kernels of our own read and write them where they are, so
that no sorted copy of the tokens is made, forward or backward. The plain product, the reference for all others, and
tokamax's kernels take sorted rows. Matrices in float8 are multiplied by rows, and by gradients, that are rounded here, with
one scale for all rows of the device.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from llamajax.config.experts import ExpertKernel
from llamajax.kernels import grouped_pallas, grouped_sorted
from llamajax.kernels.choice import GroupedSite, choose_grouped, compute_capability, is_on_gpu
from llamajax.kernels.grouped_pallas import Named
from llamajax.parallel.dispatch import Groups
from llamajax.parallel.float8 import Factor, Float8, differentiable, gradient_format, rounded

Form = Literal["pallas", "interpreted", "tokamax", "plain"]
"""Kernel that multiplies; `interpreted` is `pallas` by jax, on any device and slowly."""


def grouped_form(kernel: ExpertKernel, *matrices: Factor) -> Form:
    """Returns the kernel for the current mesh. Raises the errors of `choose_grouped`."""
    is_float8 = any(isinstance(w, Float8) for w in matrices)
    site = GroupedSite(is_on_gpu(), str(matrices[0].dtype), is_float8, compute_capability())
    chosen, _ = choose_grouped(kernel, site)
    return "interpreted" if chosen == "pallas" and not site.is_gpu else chosen


def experts_on_rows(
    x: Float[Array, "R I"],
    weights: Float32[Array, "R"],
    groups: Groups,
    w_gate_up: Float[Array, "E I A F"] | Float8,
    w_down: Float[Array, "E F I"] | Float8,
    kernel: ExpertKernel,
) -> Float[Array, "R I"]:
    """Returns the results of every row's expert, times the row's weight. Rows of no expert hold anything.

    Args:
        x: rows.
        weights: factor of each row.
        groups: rows of each expert.
        w_gate_up: matrices into the experts' hidden layers; A is 2 with gates, else 1.
        w_down: matrices out of them.
        kernel: see `ExpertsConfig.kernel`.
    """
    (*_, A, F), form = w_gate_up.shape, grouped_form(kernel, w_gate_up, w_down)
    if form in ("pallas", "interpreted"):
        groups = groups._replace(order=grouped_pallas.padded(groups.order))
    joined = jax.tree.map(lambda w: w.reshape(*w.shape[:2], A * F) if w.ndim == 4 else w, w_gate_up)
    h = checkpoint_name(rows_to_groups(form, x, joined, groups), "gate_up")
    gate, up = h[:, :F], h[:, F:]
    hidden = jax.nn.silu(gate) * up if A == 2 else jax.nn.silu(gate)
    hidden = hidden.astype(jnp.float32) * in_order(weights, groups)[:, None]
    return groups_to_rows(form, hidden.astype(h.dtype), w_down, groups)


@jax.custom_vjp
def in_order(x: Float32[Array, "R"], groups: Groups) -> Float32[Array, "M"]:
    """Returns the rows' numbers, expert after expert."""
    return x[groups.order]


def _in_order_back(groups: Groups, d: jax.Array) -> tuple[jax.Array, None]:
    return jnp.where(groups.is_row, d[groups.place], 0.0), None


in_order.defvjp(lambda x, groups: (in_order(x, groups), groups), _in_order_back)


def rows_to_groups(
    form: Form, x: Float[Array, "R I"], w: Float[Array, "E I F"] | Float8, groups: Groups
) -> Float[Array, "M F"]:
    """Returns the products of rows with their expert's matrix, expert after expert, in x's dtype."""
    return _products(form, "x", x, *differentiable(w), groups)


def groups_to_rows(
    form: Form, h: Float[Array, "M F"], w: Float[Array, "E F I"] | Float8, groups: Groups
) -> Float[Array, "R I"]:
    """Returns the products of rows that lie expert after expert, each at its row, in h's dtype."""
    return _products(form, "out", h, *differentiable(w), groups)


# `w` is the factor and has no gradient; `stand_in` receives the matrices' gradient.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(form: Form, named: Named, x: jax.Array, w: Factor, stand_in: jax.Array | None, groups: Groups) -> jax.Array:
    return _products_forward(form, named, x, w, stand_in, groups)[0]


def _products_forward(
    form: Form, named: Named, x: jax.Array, w: Factor, stand_in: jax.Array | None, groups: Groups
) -> tuple[jax.Array, Any]:
    factor = _rounded(x, w, groups, at_rows=named == "x")
    return _times(form, factor, w, groups, named), (None if stand_in is None else factor, w, groups)


def _products_backward(form: Form, named: Named, kept: Any, d: jax.Array) -> tuple[jax.Array, None, jax.Array | None, None]:
    x, w, groups = kept
    d_factor = _rounded(d, w, groups, at_rows=named == "out", is_gradient=True)
    d_x = _times(form, d_factor, w, groups, "out" if named == "x" else "x", transposed=True)
    return d_x, None, None if x is None else _weight_gradients(form, x, d_factor, groups, named), None


_products.defvjp(_products_forward, _products_backward)


def _rounded(x: jax.Array, w: Factor, groups: Groups, *, at_rows: bool, is_gradient: bool = False) -> Factor:
    """Returns rows in the format that they are multiplied with `w` in; in float8, rows of no expert are zeros."""
    if not isinstance(w, Float8):
        return x
    is_own = groups.is_row if at_rows else jnp.arange(len(x)) < jnp.sum(groups.sizes)
    return rounded(jnp.where(is_own[:, None], x, 0), gradient_format(w) if is_gradient else w.values.dtype)


def _times(form: Form, x: Factor, w: Factor, groups: Groups, named: Named, *, transposed: bool = False) -> jax.Array:
    if form in ("plain", "tokamax"):
        return grouped_sorted.times(form, x, w, groups, named, transposed=transposed)
    return grouped_pallas.times(x, w, groups, named, transposed=transposed, interpret=form == "interpreted")


def _weight_gradients(form: Form, x: Factor, d: Factor, groups: Groups, named: Named) -> jax.Array:
    if form in ("plain", "tokamax"):
        return grouped_sorted.weight_gradients(form, x, d, groups, named)
    return grouped_pallas.weight_gradients(x, d, groups, named, interpret=form == "interpreted")
