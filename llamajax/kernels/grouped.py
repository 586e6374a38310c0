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
from llamajax.kernels import grouped_gated, grouped_pallas, grouped_sorted
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
    form = grouped_form(kernel, w_gate_up, w_down)
    if form in ("pallas", "interpreted"):
        groups = groups._replace(order=grouped_pallas.padded(groups.order))
    joined = jax.tree.map(lambda w: w.reshape(*w.shape[:2], -1) if w.ndim == 4 else w, w_gate_up)
    return _experts(form, x, weights, *differentiable(joined), *differentiable(w_down), groups)


# `into` and `out_of` are the factors and have no gradient; their stand-ins receive the matrices' gradients.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(form: Form, *arrays: Any) -> jax.Array:
    return _forward(form, *arrays)[0]


def _forward(
    form: Form,
    x: jax.Array,
    weights: jax.Array,
    into: Factor,
    into_stand_in: jax.Array | None,
    out_of: Factor,
    out_of_stand_in: jax.Array | None,
    groups: Groups,
) -> tuple[jax.Array, Any]:
    rows, gates = _rounded(x, into, groups, at_rows=True), into.shape[2] // out_of.shape[1]
    h, hidden = _hidden_layer(form, rows, into, weights, groups, gates)
    # With three dims it can wait in host memory, see `llamajax.parallel.stack`.
    h = checkpoint_name(h[None], "gate_up")
    y = _times(form, _rounded(hidden, out_of, groups, at_rows=False), out_of, groups, "out")
    # What has no gradient is None; an empty tuple says that another one is wanted, because jax keeps arrays alone.
    wanted = None if into_stand_in is None else rows, None if out_of_stand_in is None else ()
    return y, (*wanted, weights, h, into, out_of, groups)


def _backward(form: Form, kept: Any, dy: jax.Array) -> tuple[jax.Array | None, ...]:
    rows, trains_out_of, weights, h, into, out_of, groups = kept
    d_rows = _rounded(dy, out_of, groups, at_rows=True, is_gradient=True)
    d_h, hidden, d_places = _hidden_gradients(form, d_rows, out_of, h[0], weights, groups)
    d_weights = jnp.where(groups.is_row, d_places[groups.place], 0.0)
    d_out_of = d_into = None
    if trains_out_of is not None:
        hidden = _rounded(hidden, out_of, groups, at_rows=False)
        d_out_of = _weight_gradients(form, hidden, d_rows, groups, "out")
    d_h = _rounded(d_h, into, groups, at_rows=False, is_gradient=True)
    d_x = _times(form, d_h, into, groups, "out", transposed=True)
    if rows is not None:
        d_into = _weight_gradients(form, rows, d_h, groups, "x")
    return d_x, d_weights, None, d_into, None, d_out_of, None


_experts.defvjp(_forward, _backward)


def _hidden_layer(
    form: Form, x: Factor, w: Factor, weights: jax.Array, groups: Groups, gates: int
) -> tuple[jax.Array, jax.Array]:
    if form in ("plain", "tokamax"):
        return grouped_sorted.hidden_layer(form, x, w, weights, groups, gates=gates)
    return grouped_gated.hidden_layer(x, w, weights, groups, gates=gates, interpret=form == "interpreted")


def _hidden_gradients(
    form: Form, dy: Factor, w: Factor, h: jax.Array, weights: jax.Array, groups: Groups
) -> grouped_gated.Gradients:
    if form in ("plain", "tokamax"):
        return grouped_sorted.hidden_gradients(form, dy, w, h, weights, groups)
    return grouped_gated.hidden_gradients(dy, w, h, weights, groups, interpret=form == "interpreted")


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
