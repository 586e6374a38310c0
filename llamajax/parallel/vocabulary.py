"""A table with a row per id, split by rows along `vocab` and stored with its columns along `embed`: collectives by hand."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from llamajax.config.parallel import axes_of
from llamajax.parallel.sharding import spec
from llamajax.parallel.tensor import residual_spec, shared_axes


def look_up(table: Float[Array, "V D"], ids: Int32[Array, "B T"], dtype: DTypeLike) -> Float[Array, "B T D"]:
    """The ids' rows as `dtype`, laid out by `residual_spec`. Every device looks ids up in its part of the rows.

    A sharded lookup and its transpose, a scatter, would otherwise be left to XLA's guess.
    """
    id_spec = jax.typeof(ids).sharding.spec
    id_axes = axes_of("batch") if id_spec[1] is None else axes_of("batch") + axes_of("seq")
    out_spec = residual_spec(ids.shape, id_spec)

    @partial(jax.shard_map, in_specs=(spec("vocab", "embed"), id_spec), out_specs=out_spec)
    def on_device(table: jax.Array, ids: jax.Array) -> jax.Array:
        # Varying before the gather: the transpose first scatters the gradient over `embed`, then reduces what is left.
        reduced_last = tuple(axis for axis in id_axes if axis not in axes_of("embed"))
        with jax.named_scope("gather_weight"):
            rows = jax.lax.pcast(table.astype(dtype), reduced_last, to="varying")
            rows = jax.lax.all_gather(rows, axes_of("embed"), axis=1, tiled=True)
        # fp32 only locally: the transpose adds up the gradients of all places with the same id, and a bf16 sum stops
        # growing after a few hundred of them.
        index = ids - jax.lax.axis_index(axes_of("vocab")) * rows.shape[0]
        index = jnp.where(index < 0, rows.shape[0], index)  # out of bounds like any other row that lies elsewhere
        found = rows.astype(jnp.float32).at[index].get(mode="fill", fill_value=0).astype(dtype)
        return sum_tokens(found, out_spec)

    return on_device(table, ids)


def sum_tokens(x: Float[Array, "b t D"], out_spec: P) -> Float[Array, "b t_out D"]:
    """On one device, within `shard_map`: its part of the sum of what the devices of `vocab` have, for `residual_spec`."""
    if axes := shared_axes(out_spec):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True)
    return jax.lax.psum(x, axes_of("vocab"))


def whole_rows(part: Float[Array, "v d"], dtype: DTypeLike) -> tuple[Float[Array, "v D"], Int32[Array, "v"]]:
    """On one device, within `shard_map`: the rows that it has of a table, whole and as `dtype`, and their ids."""
    with jax.named_scope("gather_weight"):
        rows = jax.lax.all_gather(part.astype(dtype), axes_of("embed"), axis=1, tiled=True)
    return rows, jax.lax.axis_index(axes_of("vocab")) * rows.shape[0] + jnp.arange(rows.shape[0])


class SplitSoftmax(NamedTuple):
    """A softmax over all ids, of whose scores a device has those of its own rows."""

    exps: Float32[Array, "*n v"]
    """Exponentials of the own scores less `largest`."""
    total: Float32[Array, "*n"]
    """Sum of all exponentials."""
    largest: Float32[Array, "*n"]
    """The largest of all scores; the log-sum-exp is `log(total) + largest`."""
    target: Float32[Array, "*n"]
    """Score of the target."""


def split_softmax(scores: Float32[Array, "*n v"], is_target: Bool[Array, "*n v"]) -> SplitSoftmax:
    """On one device, within `shard_map`: from the scores of its own rows, and whether each is the target's."""
    largest = jax.lax.pmax(jnp.max(scores, axis=-1), axes_of("vocab"))
    exps = jnp.exp(scores - largest[..., None])
    own_sums = jnp.sum(exps, axis=-1), jnp.sum(jnp.where(is_target, scores, 0.0), axis=-1)
    total, target = jax.lax.psum(own_sums, axes_of("vocab"))
    return SplitSoftmax(exps, total, largest, target)
