"""The order in which a row lies over the devices that split it, and what travels around them.

In zigzag order, as for ring attention on causal rows (github.com/zhuzilin/ring-flash-attention), a row over n devices is cut
into 2 n chunks, and device i has the chunks i and 2 n - 1 - i: an early and a late one, so that all have as much to see.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from llamajax.config.parallel import SequenceForm, axes_of, num_parts
from llamajax.parallel.sharding import spec


def laid_out(x: Int32[Array, "B T"], form: SequenceForm) -> Int32[Array, "B T"]:
    """`x`, whose rows are in their own order, in that of `form`; sharded ("batch", "seq").

    A `ring` needs T to be divisible by twice the devices that split it.
    """
    num_devices = num_parts("seq", jax.sharding.get_abstract_mesh().shape)
    if form != "ring" or num_devices == 1:
        return jax.reshard(x, spec("batch", "seq"))
    # Whole rows, which are only integers.
    chunks = jax.reshard(x, spec("batch", None)).reshape(x.shape[0], 2 * num_devices, -1)
    order = np.stack([np.arange(num_devices), 2 * num_devices - 1 - np.arange(num_devices)], axis=1).reshape(-1)
    return jax.reshard(chunks[:, order].reshape(x.shape), spec("batch", "seq"))


def zigzag_indices(device: int | Int32[Array, ""], length: int) -> Int32[Array, "length"]:
    """On one device, within `shard_map`: where the tokens of a device of its row stand in that row, in zigzag order."""
    chunk = jnp.arange(length // 2)
    last = 2 * jax.lax.axis_size(axes_of("seq")) - 1
    return jnp.concatenate([device * len(chunk) + chunk, (last - device) * len(chunk) + chunk])


def pass_on(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """On one device, within `shard_map`: what the device before has, once each has sent its own to the one after it.

    The arrays are alike, and travel in one piece, because XLA has one collective at a time under way.
    """
    num_devices = jax.lax.axis_size(axes_of("seq"))
    ring = [(device, (device + 1) % num_devices) for device in range(num_devices)]
    return tuple(jax.lax.ppermute(jnp.stack(arrays), axes_of("seq"), ring))
