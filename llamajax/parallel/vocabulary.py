"""A table with one row per id, with rows split over devices along `vocab` for compute; it uses explicit collectives.

It is stored with rows along `vocab` and columns along `embed`; if its rows cannot be divided, with columns along
`embed_tensor`. Devices then exchange columns for rows; the last rows may be padding.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from llamajax.config.parallel import axes_of, num_parts
from llamajax.parallel.arrays import after
from llamajax.parallel.sharding import spec
from llamajax.parallel.tensor import residual_spec, shared_axes
from llamajax.parallel.zero import weight

_NO_ID = -2
"""Id of a padding row; neither a token id nor a target of the loss."""


def table(num_rows: int, num_columns: int, dtype: DTypeLike, init: Callable[..., jax.Array]) -> nnx.Param:
    """Returns a `weight` [V, D] with a copy for compute of [R, D]: R is V, rounded up to a multiple of the devices of
    `vocab`."""
    even = num_rows % num_parts("vocab", jax.sharding.get_abstract_mesh().shape) == 0
    return weight(
        (num_rows, num_columns),
        dtype,
        stored=("vocab", "embed") if even else (None, "embed_tensor"),
        compute=("vocab", None),
        init=init,
        arrange=_exchange,
    )


def _exchange(stored: Float[Array, "V D"], dtype: DTypeLike) -> Float[Array, "R D"]:
    """Casts to `dtype` and reshards to rows along `vocab` and columns along `embed`."""
    if axes_of("embed_tensor") != jax.typeof(stored).sharding.spec[1]:
        return stored.astype(dtype)

    @partial(jax.shard_map, in_specs=jax.typeof(stored).sharding.spec, out_specs=spec("vocab", "embed"))
    def on_device(part: jax.Array) -> jax.Array:
        fill = -part.shape[0] % jax.lax.axis_size(axes_of("vocab"))
        return jax.lax.all_to_all(jnp.pad(part, ((0, fill), (0, 0))), axes_of("vocab"), 0, 1, tiled=True)

    return on_device(stored.astype(dtype))


def look_up(table: Float[Array, "R D"], ids: Int32[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns the rows of the ids, sharded by `residual_spec`. Every device looks up ids in its own part of the rows.

    Otherwise the sharding of the lookup and of its transpose, a scatter, would be left to XLA's heuristics.

    Args:
        table: the table's copy for compute; every device adds up the gradients of its own tokens.
        ids: below V.
    """
    id_spec, table_spec = jax.typeof(ids).sharding.spec, jax.typeof(table).sharding.spec
    out_spec = residual_spec(ids.shape, id_spec)
    if id_spec[1] is None:  # the devices of `seq` have the same tokens
        table_spec = P(*table_spec.partitions, reduced=table_spec.reduced - frozenset(axes_of("seq")))
        table = jax.reshard(table, table_spec)

    @partial(jax.shard_map, in_specs=(table_spec, id_spec), out_specs=out_spec)
    def on_device(rows: jax.Array, ids: jax.Array) -> jax.Array:
        index = ids - jax.lax.axis_index(axes_of("vocab")) * rows.shape[0]
        index = jnp.where(index < 0, rows.shape[0], index)  # out of bounds, like any row of another device
        return sum_tokens(_rows_at(rows, index), out_spec)

    return on_device(table, ids)


@jax.custom_vjp
def _rows_at(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows by index; zeros where the index is out of bounds."""
    return rows.at[index].get(mode="fill", fill_value=0)


def _rows_at_forward(rows: jax.Array, index: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rows_at(rows, index), (rows, index)


def _rows_at_backward(residuals: tuple[jax.Array, jax.Array], d_found: jax.Array) -> tuple[jax.Array, None]:
    rows, index = residuals
    summed = _sums_by_row(d_found.reshape(-1, d_found.shape[-1]), index.reshape(-1), rows.shape[0])
    # Devices with the same rows add up their sums, either now or, over the axes `reduced`, together with the layers'
    # gradients.
    lies, varies = jax.typeof(rows).manual_axis_type, jax.typeof(d_found).manual_axis_type.varying
    summed = jax.lax.psum(summed, tuple(sorted(varies - lies.varying - lies.reduced))).astype(rows.dtype)
    return jax.lax.pcast(summed, tuple(sorted(lies.reduced)), to="unreduced"), None


_TOKENS_AT_ONCE = 1024
"""Number of tokens with gradients that one product adds up. More tokens mean more FLOPs and fewer passes of the loop; 1,024
cost 0.1% of the FLOPs of a 1B step."""


def _sums_by_row(values: Float[Array, "n D"], index: Int32[Array, "n"], num_rows: int) -> Float32[Array, "R D"]:
    """Adds up, for every row, the values with its index. Drops values with an index out of bounds.

    A scatter-add on a GPU uses atomics: threads add in the order in which they arrive, and two runs differ in the last bits.
    Here a product with ones and zeros adds up the tokens of a chunk that share a row, and the first of them writes the sum.
    The sum is in fp32: in bf16 it stops growing after a few hundred tokens with the same id.
    """
    n = min(_TOKENS_AT_ONCE, len(index))
    fill = -len(index) % n
    values = jnp.pad(values, ((0, fill), (0, 0))).reshape(-1, n, values.shape[-1])
    index = jnp.pad(index, (0, fill), constant_values=num_rows).reshape(-1, n)
    place = jnp.arange(n)
    is_later = jnp.tri(n, k=-1, dtype=bool)[None]
    is_repeat = jnp.any((index[:, :, None] == index[:, None, :]) & is_later, axis=2)
    # A token that does not write gets its own index out of bounds, because `unique_indices` promises that no index repeats.
    target = jnp.where(is_repeat | (index >= num_rows), num_rows + place, index)

    def add(summed: jax.Array, chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        values, index, target = chunk
        same = (index[:, None] == index[None, :]).astype(values.dtype)
        sums = jnp.matmul(same, values, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        return summed.at[target].add(sums, mode="drop", unique_indices=True), None

    varying = tuple(sorted(jax.typeof(values).manual_axis_type.varying))
    zero = jax.lax.pcast(jnp.zeros((), jnp.float32), varying, to="varying")
    zeros = jnp.broadcast_to(after(zero, values), (num_rows, values.shape[-1]))
    return jax.lax.scan(add, zeros, (values, index, target))[0]


_rows_at.defvjp(_rows_at_forward, _rows_at_backward)


def sum_tokens(x: Float[Array, "b t D"], out_spec: P) -> Float[Array, "b t_out D"]:
    """On one device, within `shard_map`: sums x over the devices of `vocab` and returns the device's part for
    `residual_spec`."""
    if axes := shared_axes(out_spec):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True)
    return jax.lax.psum(x, axes_of("vocab"))


def row_ids(rows: Float[Array, "r D"], num_rows: int) -> Int32[Array, "r"]:
    """On one device, within `shard_map`: returns the ids of the device's rows, out of `num_rows` in total."""
    ids = jax.lax.axis_index(axes_of("vocab")) * rows.shape[0] + jnp.arange(rows.shape[0])
    return jnp.where(ids < num_rows, ids, _NO_ID)


def logits(x: Float[Array, "*B D"], table: Float[Array, "R D"], num_rows: int) -> Float32[Array, "*B V"]:
    """Returns the products of x with all `num_rows` rows of a table, given as its copy for compute; in fp32, sharded like x,
    and split over `vocab` where that divides the rows."""
    *dims, _ = jax.typeof(x).sharding.spec
    rows = jax.reshard(table, spec("vocab", None))  # for any x: the devices of an axis may have the same x
    out_spec = P(*dims, *spec("vocab"))
    scores = jnp.einsum("...D,VD->...V", x, rows, preferred_element_type=jnp.float32, out_sharding=out_spec)
    if scores.shape[-1] == num_rows:
        return scores
    return jax.reshard(scores, P(*dims, None))[..., :num_rows]


class SplitSoftmax(NamedTuple):
    """A softmax over all ids; each device has the scores of its own rows."""

    exps: Float32[Array, "*n v"]
    """Exponentials of the device's own scores minus `largest`."""
    total: Float32[Array, "*n"]
    """Sum of all exponentials."""
    largest: Float32[Array, "*n"]
    """The largest of all scores; the log-sum-exp is `log(total) + largest`."""
    target: Float32[Array, "*n"]
    """Score of the target."""


def split_softmax(
    scores: Float32[Array, "*n v"], ids: Int32[Array, "v"], targets: Int32[Array, "*n"]
) -> tuple[SplitSoftmax, Bool[Array, "*n v"]]:
    """On one device, within `shard_map`: computes the softmax from the scores of its own rows and their ids; also returns
    which score is the target's."""
    ids = jnp.expand_dims(ids, range(targets.ndim))
    is_target = targets[..., None] == ids
    scores = jnp.where(ids == _NO_ID, -jnp.inf, scores)
    largest = jax.lax.pmax(jnp.max(scores, axis=-1), axes_of("vocab"))
    exps = jnp.exp(scores - largest[..., None])
    own_sums = jnp.sum(exps, axis=-1), jnp.sum(jnp.where(is_target, scores, 0.0), axis=-1)
    total, target = jax.lax.psum(own_sums, axes_of("vocab"))
    return SplitSoftmax(exps, total, largest, target), is_target
