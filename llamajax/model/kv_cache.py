"""Cache of the keys and values of tokens already read, so that one more token costs one token's work.

The token of row b at position p is in slot p. Slots are split over the sequence axis, rows over the batch axes and heads
over the tensor axis, so the cache of a long text uses only its share of each device's memory.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int32

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import axes_of, num_parts
from llamajax.kernels.attention import Keys
from llamajax.parallel.sharding import spec

Cached = Float[Array, "L B K S H"]
_CACHE_SPEC = spec(None, "batch", "kv_heads", "seq", "head_dim")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Cached keys and values of all layers for B rows, in S slots per row."""

    keys: Cached
    """Rotated by their positions, in `compute_dtype`; sharded (None, "batch", "kv_heads", "seq"). Heads come before
    slots; otherwise the attention's batched matmuls would copy the whole cache into this order at every step."""
    values: Cached
    """Values, sharded like `keys`."""
    lengths: Int32[Array, "B"]
    """Number of tokens read so far, sharded ("batch"). The contents of later slots are never read."""

    @staticmethod
    def empty(config: ModelConfig, batch_size: int, max_seq_len: int) -> "KVCache":
        """Returns a cache without tokens and with room for `max_seq_len` per row, or a few more where the sequence axis does
        not divide it.

        `batch_size` must be divisible by the devices that share the batch.
        """
        parts = num_parts("seq", jax.sharding.get_abstract_mesh().shape)
        num_slots = math.ceil(max_seq_len / parts) * parts
        heads = config.computed_kv_heads(jax.sharding.get_abstract_mesh().shape)
        shape = (config.num_layers, batch_size, heads, num_slots, config.head_dim)
        keys, values = (jnp.zeros(shape, config.compute_dtype, out_sharding=_CACHE_SPEC) for _ in range(2))
        return KVCache(keys, values, jnp.zeros((batch_size,), jnp.int32, out_sharding=spec("batch")))


def write_prompt(cached: Cached, layer: Int32[Array, ""], new: Keys) -> Cached:
    """Returns `cached` with a prompt's keys or values in a layer's first T slots.

    The slots after them are cleared.
    """
    new_spec = spec("batch", "seq", "kv_heads", "head_dim")

    @partial(jax.shard_map, in_specs=(_CACHE_SPEC, spec(), new_spec), out_specs=_CACHE_SPEC)
    def write(cached: jax.Array, layer: jax.Array, new: jax.Array) -> jax.Array:
        own_slots = cached.shape[3]
        # Prompt and cache are split into parts of different sizes, so a device's slots may hold others' tokens.
        whole = jax.lax.all_gather(new, axes_of("seq"), axis=1, tiled=True)
        whole = jnp.pad(whole, ((0, 0), (0, own_slots * jax.lax.axis_size(axes_of("seq")) - whole.shape[1]), (0, 0), (0, 0)))
        own = jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(axes_of("seq")) * own_slots, own_slots, axis=1)
        written = jax.lax.dynamic_update_index_in_dim(cached, jnp.moveaxis(own, 1, 2), layer, axis=0)
        # The matmuls that made `new` and read it prefer another layout; without this constraint XLA converts the whole cache
        # into theirs and back again.
        return with_layout_constraint(written, Layout(major_to_minor=tuple(range(written.ndim))))

    return write(cached, layer, new)


def append(cache: KVCache, k: Float[Array, "L B 1 K H"], v: Float[Array, "L B 1 K H"]) -> KVCache:
    """Returns the cache with one more token per row, with keys `k` and values `v`.

    It writes all layers at once, after the last one has read its past: only then can the cache be written in place.
    """
    new_spec = spec(None, "batch", None, "kv_heads", "head_dim")

    @partial(jax.shard_map, in_specs=(_CACHE_SPEC, new_spec, spec("batch")), out_specs=_CACHE_SPEC)
    def write(cached: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
        L, b, K, own_slots, _ = cached.shape
        slots = lengths - jax.lax.axis_index(axes_of("seq")) * own_slots
        slots = jnp.where(slots < 0, own_slots, slots)  # out of bounds, like any slot of another device
        layers, rows, heads = jnp.ogrid[:L, :b, :K]
        return cached.at[layers, rows, heads, slots[None, :, None]].set(new[:, :, 0], mode="drop", unique_indices=True)

    keys, values = write(cache.keys, k, cache.lengths), write(cache.values, v, cache.lengths)
    return KVCache(keys, values, cache.lengths + 1)
