"""A table with a row per id, whose rows devices share for compute along `vocab`: collectives by hand.

It is stored with its rows along `vocab` and its columns along `embed`; where its rows cannot be divided, with its columns
along `embed_tensor`. Devices then exchange columns for rows, the last of which may be none.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from llamajax.config.parallel import axes_of, num_parts
from llamajax.parallel.sharding import spec
from llamajax.parallel.tensor import residual_spec, shared_axes

_NO_ID = -2
"""Of a row that fills a device's part up; no id and no target of the loss."""


def stored_dims(num_rows: int) -> tuple[str | None, str]:
    """The dims of a table as it is stored on the current mesh."""
    parts = num_parts("vocab", jax.sharding.get_abstract_mesh().shape)
    return ("vocab", "embed") if num_rows % parts == 0 else (None, "embed_tensor")


def look_up(table: Float[Array, "V D"], ids: Int32[Array, "B T"], dtype: DTypeLike) -> Float[Array, "B T D"]:
    """The ids' rows as `dtype`, laid out by `residual_spec`. Every device looks ids up in its part of the rows.

    A sharded lookup and its transpose, a scatter, would otherwise be left to XLA's guess.
    """
    id_spec = jax.typeof(ids).sharding.spec
    table_spec = jax.typeof(table).sharding.spec
    id_axes = axes_of("batch") if id_spec[1] is None else axes_of("batch") + axes_of("seq")
    out_spec = residual_spec(ids.shape, id_spec)

    @partial(jax.shard_map, in_specs=(table_spec, id_spec), out_specs=out_spec)
    def on_device(table: jax.Array, ids: jax.Array) -> jax.Array:
        # Varying before the gather: the transpose first scatters the gradient over `embed`, then reduces what is left.
        reduced_last = tuple(axis for axis in id_axes if axis not in axes_of("embed"))
        with jax.named_scope("gather_weight"):
            rows = jax.lax.pcast(table.astype(dtype), reduced_last, to="varying")
            rows = jax.lax.all_gather(_own_rows(rows, table_spec), axes_of("embed"), axis=1, tiled=True)
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


def whole_rows(
    part: Float[Array, "v d"], table: jax.ShapeDtypeStruct, dtype: DTypeLike
) -> tuple[Float[Array, "r D"], Int32[Array, "r"]]:
    """On one device, within `shard_map`: the rows of a table that it computes with, whole and as `dtype`, and their ids.

    Args:
        part: what the device stores of the table.
        table: shape and sharding of all of it (`jax.typeof`).
        dtype: of the rows.
    """
    with jax.named_scope("gather_weight"):
        rows = _own_rows(part.astype(dtype), table.sharding.spec)
        rows = jax.lax.all_gather(rows, axes_of("embed"), axis=1, tiled=True)
    ids = jax.lax.axis_index(axes_of("vocab")) * rows.shape[0] + jnp.arange(rows.shape[0])
    return rows, jnp.where(ids < table.shape[0], ids, _NO_ID)


def scattered_rows(rows: Float[Array, "r D"], table: jax.ShapeDtypeStruct) -> Float[Array, "v d"]:
    """The reverse: what a device stores of the sum over `embed` of what devices have of the rows."""
    part = jax.lax.psum_scatter(rows, axes_of("embed"), scatter_dimension=1, tiled=True)
    if table.sharding.spec == spec("vocab", "embed"):
        return part
    return jax.lax.all_to_all(part, axes_of("vocab"), 1, 0, tiled=True)[: table.shape[0]]


def _own_rows(part: Float[Array, "v d"], table_spec: P) -> Float[Array, "r c"]:
    """The rows that a device computes with, of columns along `embed`."""
    if table_spec == spec("vocab", "embed"):
        return part
    fill = -part.shape[0] % jax.lax.axis_size(axes_of("vocab"))
    return jax.lax.all_to_all(jnp.pad(part, ((0, fill), (0, 0))), axes_of("vocab"), 0, 1, tiled=True)


def logits(x: Float[Array, "*B D"], table: Float[Array, "V D"]) -> Float32[Array, "*B V"]:
    """x's products with all rows, in fp32, sharded as x is; split over `vocab` where that divides the rows."""
    *dims, _ = x_spec = jax.typeof(x).sharding.spec
    whole = jax.typeof(table)

    @partial(jax.shard_map, in_specs=(x_spec, whole.sharding.spec), out_specs=P(*dims, *spec("vocab")))
    def on_device(x: jax.Array, part: jax.Array) -> jax.Array:
        rows, _ = whole_rows(part, whole, x.dtype)
        return jnp.einsum("...D,vD->...v", x, rows, preferred_element_type=jnp.float32)

    scores = on_device(x, table)
    if scores.shape[-1] == table.shape[0]:
        return scores
    return jax.reshard(scores, P(*dims, None))[..., : table.shape[0]]


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


def split_softmax(
    scores: Float32[Array, "*n v"], ids: Int32[Array, "v"], targets: Int32[Array, "*n"]
) -> tuple[SplitSoftmax, Bool[Array, "*n v"]]:
    """On one device, within `shard_map`: from the scores of its own rows, and their ids; and whether each is the target."""
    ids = jnp.expand_dims(ids, range(targets.ndim))
    is_target = targets[..., None] == ids
    scores = jnp.where(ids == _NO_ID, -jnp.inf, scores)
    largest = jax.lax.pmax(jnp.max(scores, axis=-1), axes_of("vocab"))
    exps = jnp.exp(scores - largest[..., None])
    own_sums = jnp.sum(exps, axis=-1), jnp.sum(jnp.where(is_target, scores, 0.0), axis=-1)
    total, target = jax.lax.psum(own_sums, axes_of("vocab"))
    return SplitSoftmax(exps, total, largest, target), is_target
