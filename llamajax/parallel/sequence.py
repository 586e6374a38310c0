"""The order of a row's tokens over the devices that split it, and the exchange around those devices.

In zigzag order, as in ring attention for causal rows (github.com/zhuzilin/ring-flash-attention), a row over n devices is cut
into 2 n chunks, and device i has the chunks i and 2 n - 1 - i, an early and a late one, so that all devices have the same
number of keys to see.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jaxtyping import Array, Int32, Shaped

from llamajax.config.parallel import SequenceForm, axes_of, num_parts
from llamajax.parallel.sharding import spec


def laid_out(x: Int32[Array, "B T"], form: SequenceForm) -> Int32[Array, "B T"]:
    """Returns `x`, with rows in their own order, in the order of `form`; sharded ("batch", "seq").

    A `ring` requires T to be divisible by twice the devices that split it.
    """
    return in_order(jax.reshard(x, spec("batch", "seq")), form)


def in_order(x: Int32[Array, "*B T"], form: SequenceForm) -> Int32[Array, "*B T"]:
    """Returns `x` in the order of `form`, like `laid_out`, with its first dims split as they are."""
    if (order := _order(form)) is None:
        return x
    lies = jax.typeof(x).sharding.spec
    # Use whole rows; they are only integers.
    chunks = jax.reshard(x, P(*lies.partitions[:-1], None)).reshape(*x.shape[:-1], len(order), -1)
    return jax.reshard(chunks[..., order, :].reshape(x.shape), lies)


def whole_rows(x: Shaped[Array, "B T"], form: SequenceForm) -> Shaped[Array, "B T"]:
    """Returns numbers of single tokens in the order of `form` as whole rows in their own order; sharded ("batch", None)."""
    x = jax.reshard(x, spec("batch", None))
    if (order := _order(form)) is None:
        return x
    return x.reshape(x.shape[0], len(order), -1)[:, np.argsort(order)].reshape(x.shape)


def _order(form: SequenceForm) -> np.ndarray | None:
    """Returns the order of a row's chunks; None: their own."""
    num_devices = num_parts("seq", jax.sharding.get_abstract_mesh().shape)
    if form != "ring" or num_devices == 1:
        return None
    return np.stack([np.arange(num_devices), 2 * num_devices - 1 - np.arange(num_devices)], axis=1).reshape(-1)


def reordered(x: Shaped[Array, "b T *d"], form: SequenceForm, *, back: bool = False) -> Shaped[Array, "b T *d"]:
    """On one device, within `shard_map`: returns whole rows that lie in the order of `form` in their own order, or `back`
    again. Slices, unlike indices, are no constants that a checkpointed layer would save."""
    if (order := _order(form)) is None:
        return x
    chunks = jnp.split(x, len(order), axis=1)
    return jnp.concatenate([chunks[place] for place in (order if back else np.argsort(order))], axis=1)


def zigzag_indices(device: int | Int32[Array, ""], length: int) -> Int32[Array, "length"]:
    """On one device, within `shard_map`: returns the indices in the row of the tokens of device `device`, in zigzag
    order."""
    chunk = jnp.arange(length // 2)
    last = 2 * jax.lax.axis_size(axes_of("seq")) - 1
    return jnp.concatenate([device * len(chunk) + chunk, (last - device) * len(chunk) + chunk])


def pass_on(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """On one device, within `shard_map`: sends the arrays to the next device and returns the arrays of the previous one.

    The arrays have one shape and travel in one piece, because XLA runs one collective at a time.
    """
    num_devices = jax.lax.axis_size(axes_of("seq"))
    ring = [(device, (device + 1) % num_devices) for device in range(num_devices)]
    return tuple(jax.lax.ppermute(jnp.stack(arrays), axes_of("seq"), ring))
