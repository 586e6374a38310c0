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

    def lengths_of(self, rows: Int32[Array, "R"] | None) -> Int32[Array, "R"]:
        """Returns the lengths of rows, see `Past.rows`, sharded ("batch"); None: of all rows."""
        if rows is None:
            return self.lengths

        @partial(jax.shard_map, in_specs=(spec("batch"),) * 2, out_specs=spec("batch"))
        def choose(lengths: jax.Array, rows: jax.Array) -> jax.Array:
            return lengths[rows - jax.lax.axis_index(axes_of("batch")) * lengths.shape[0]]

        return choose(self.lengths, rows)


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


def append(
    cache: KVCache,
    k: Float[Array, "L R T K H"],
    v: Float[Array, "L R T K H"],
    counts: Int32[Array, "R"] | None = None,
    rows: Int32[Array, "R"] | None = None,
) -> KVCache:
    """Returns the cache with T more tokens per row, with keys `k` and values `v`.

    It writes all layers at once, after the last one has read its past: only then can the cache be written in place.

    Args:
        cache: the cache; donate it.
        k: the tokens' keys.
        v: their values.
        counts: how many of each row's tokens are kept, the first ones, sharded ("batch"); None: all.
        rows: which rows of the cache they continue, see `Past.rows`. Rows that keep tokens differ; None: all rows, in order.
    """
    new_spec, by_row = spec(None, "batch", None, "kv_heads", "head_dim"), spec("batch")

    @partial(jax.shard_map, in_specs=(_CACHE_SPEC, new_spec, *[by_row] * 3), out_specs=_CACHE_SPEC)
    def write(cached: jax.Array, new: jax.Array, lengths: jax.Array, counts: jax.Array | None, rows: jax.Array | None):
        L, b, K, own_slots, _ = cached.shape
        R, T = new.shape[1:3]
        own = jnp.arange(b) if rows is None else rows - jax.lax.axis_index(axes_of("batch")) * b
        index = jnp.arange(T)[None, :]
        slots = lengths[own][:, None] + index - jax.lax.axis_index(axes_of("seq")) * own_slots
        is_kept = slots >= 0 if counts is None else (slots >= 0) & (index < counts[:, None])
        # Out of bounds, each in a place of its own: `unique_indices` promises that no index repeats.
        slots = jnp.where(is_kept & (slots < own_slots), slots, own_slots + jnp.arange(R * T).reshape(R, T))
        layers, _, heads, _ = jnp.ogrid[:L, :1, :K, :1]
        place = cached.at[layers, own[None, :, None, None], heads, slots[None, :, None, :]]
        return place.set(jnp.moveaxis(new, 2, 3), mode="drop", unique_indices=True)

    keys, values = (write(old, new, cache.lengths, counts, rows) for old, new in ((cache.keys, k), (cache.values, v)))
    return KVCache(keys, values, _longer(cache.lengths, k.shape[2], counts, rows))


def _longer(
    lengths: Int32[Array, "B"], T: int, counts: Int32[Array, "R"] | None, rows: Int32[Array, "R"] | None
) -> Int32[Array, "B"]:
    if rows is None:
        return lengths + (T if counts is None else counts)

    @partial(jax.shard_map, in_specs=(spec("batch"),) * 3, out_specs=spec("batch"))
    def add(lengths: jax.Array, counts: jax.Array, rows: jax.Array) -> jax.Array:
        return lengths.at[rows - jax.lax.axis_index(axes_of("batch")) * lengths.shape[0]].add(counts)

    return add(lengths, jnp.full_like(rows, T) if counts is None else counts, rows)


def copy_rows(cache: KVCache, sources: Int32[Array, "R"], targets: Int32[Array, "R"]) -> KVCache:
    """Returns the cache with rows copied over others, tokens and length.

    Args:
        cache: the cache; donate it.
        sources: rows to copy, sharded ("batch"): one for each device that has rows of its own, among these.
        targets: rows to copy to, likewise; a device that has nothing to copy copies a row to itself.
    """

    @partial(jax.shard_map, in_specs=(spec("batch"),) * 3, out_specs=spec("batch"))
    def copy_lengths(lengths: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
        first = jax.lax.axis_index(axes_of("batch")) * lengths.shape[0]
        return lengths.at[targets - first].set(lengths[sources - first])

    @partial(jax.shard_map, in_specs=(_CACHE_SPEC, spec("batch"), spec("batch")), out_specs=_CACHE_SPEC)
    def copy(cached: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
        first = jax.lax.axis_index(axes_of("batch")) * cached.shape[1]
        row = jax.lax.dynamic_index_in_dim(cached, sources[0] - first, axis=1)
        return jax.lax.dynamic_update_index_in_dim(cached, row, targets[0] - first, axis=1)

    keys, values = copy(cache.keys, sources, targets), copy(cache.values, sources, targets)
    return KVCache(keys, values, copy_lengths(cache.lengths, sources, targets))
