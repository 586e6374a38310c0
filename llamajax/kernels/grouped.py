"""Products of tokens with their experts' matrices, on one device, within `shard_map`: the rows of an expert are a group.

Rows need not lie group after group: an order names them. On GPUs kernels of our own read and write them where they are, so
that no sorted copy of the tokens is made, forward or backward. XLA's own grouped product (`jax.lax.ragged_dot`) is right
everywhere, but on a GPU it multiplies all tokens by all experts.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from llamajax.config.experts import ExpertKernel
from llamajax.kernels import grouped_pallas
from llamajax.kernels.choice import is_on_gpu
from llamajax.parallel.dispatch import Groups

Form = Literal["pallas", "interpreted", "plain"]
"""Kernel that multiplies; `interpreted` is `pallas` by jax, on any device and slowly."""


def grouped_form(kernel: ExpertKernel) -> Form:
    """Returns the kernel for the current mesh."""
    if kernel == "auto":
        return "pallas" if is_on_gpu() else "plain"
    return kernel


def experts_on_rows(
    x: Float[Array, "R I"],
    weights: Float32[Array, "R"],
    groups: Groups,
    w_gate_up: Float[Array, "E I A F"],
    w_down: Float[Array, "E F I"],
    form: Form,
) -> Float[Array, "R I"]:
    """Returns the results of every row's expert, times the row's weight. Rows of no expert hold anything.

    Args:
        x: rows.
        weights: factor of each row.
        groups: rows of each expert.
        w_gate_up: matrices into the experts' hidden layers; A is 2 with gates, else 1.
        w_down: matrices out of them.
        form: kernel.
    """
    E, I, A, F = w_gate_up.shape
    if form != "plain":
        groups = groups._replace(order=grouped_pallas.padded(groups.order))
    h = checkpoint_name(rows_to_groups(form, x, w_gate_up.reshape(E, I, A * F), groups), "gate_up")
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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rows_to_groups(form: Form, x: Float[Array, "R I"], w: Float[Array, "E I F"], groups: Groups) -> Float[Array, "M F"]:
    """Returns the products of rows with their expert's matrix, expert after expert."""
    if form == "plain":
        return _plain(x[groups.order], w, groups)
    return grouped_pallas.times(x, w, groups, "x", interpret=form == "interpreted")


def _rows_to_groups_back(form: Form, kept: Any, d: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, groups = kept
    if form == "plain":
        _, pull_back = jax.vjp(lambda x, w: _plain(x, w, groups), x[groups.order], w)
        d_ordered, d_w = pull_back(d)
        return _at_rows(d_ordered, groups), d_w, None
    interpret = form == "interpreted"
    d_x = grouped_pallas.times(d, w, groups, "out", transposed=True, num_rows=len(x), interpret=interpret)
    return d_x, grouped_pallas.weight_gradients(x, d, groups, "x", interpret=interpret), None


rows_to_groups.defvjp(lambda form, x, w, groups: (rows_to_groups(form, x, w, groups), (x, w, groups)), _rows_to_groups_back)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def groups_to_rows(form: Form, h: Float[Array, "M F"], w: Float[Array, "E F I"], groups: Groups) -> Float[Array, "R I"]:
    """Returns the products of rows that lie expert after expert, each at its row."""
    if form == "plain":
        return _at_rows(_plain(h, w, groups), groups)
    return grouped_pallas.times(h, w, groups, "out", num_rows=len(groups.is_row), interpret=form == "interpreted")


def _groups_to_rows_back(form: Form, kept: Any, d: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    h, w, groups = kept
    if form == "plain":
        return *jax.vjp(lambda h, w: _plain(h, w, groups), h, w)[1](d[groups.order]), None
    interpret = form == "interpreted"
    d_h = grouped_pallas.times(d, w, groups, "x", transposed=True, interpret=interpret)
    return d_h, grouped_pallas.weight_gradients(h, d, groups, "dy", interpret=interpret), None


groups_to_rows.defvjp(lambda form, h, w, groups: (groups_to_rows(form, h, w, groups), (h, w, groups)), _groups_to_rows_back)


def _plain(x: Float[Array, "M K"], w: Float[Array, "E K N"], groups: Groups) -> Float[Array, "M N"]:
    return jax.lax.ragged_dot(x, w, groups.sizes, preferred_element_type=x.dtype)


def _at_rows(y: Float[Array, "M N"], groups: Groups) -> Float[Array, "R N"]:
    return jnp.where(groups.is_row[:, None], y[groups.place], 0)
