"""The way of tokens to the experts that they chose and back, on the devices that split the experts (`PEERS`).

Every device has one block of equal size for every peer: a header with the tokens' weights and their number for each expert,
and behind it slots for tokens, in the order of the peer's experts. One all-to-all sends whole blocks, or those of their rows
that are filled. No shape depends on what the router chose. Places come from prefix sums, and tokens move by gathers, forward
and backward.

All functions run on one device, within `shard_map`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.parallel import axes_of
from llamajax.estimates.experts import header_rows

PEERS = axes_of("experts")
"""Mesh axes that split the experts."""
_ROWS_AT_ONCE = 128
"""Tokens whose prefix sums one product computes."""


class Block(NamedTuple):
    """Shape of what goes to one peer."""

    slots: int
    """Rows for tokens."""
    experts: int
    """Experts of the peer."""
    width: int
    """Numbers in a row."""
    terms: int
    """Numbers that represent a float32."""

    @staticmethod
    def of(slots: int, experts: int, width: int, dtype: DTypeLike) -> "Block":
        """Returns the shape for rows of `dtype`."""
        return Block(slots, experts, width, 1 if dtype == jnp.float32 else 3)

    @property
    def header(self) -> int:
        """Rows that hold weights and counts."""
        return header_rows(self.slots, self.experts, self.width, self.terms)

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return self.header + self.slots


class Route(NamedTuple):
    """Where a device's tokens go in one round. Rows are counted over the blocks of all G peers."""

    rows: Int32[Array, "n k"]
    """Row of each choice; G * block.rows where it has none in this round."""
    source: Int32[Array, "G slots"]
    """Choice in each slot, token * k + number; n * k where there is none."""
    counts: Int32[Array, "G E"]
    """Tokens for each expert of each peer."""


def route(chosen: Int32[Array, "n k"], num_experts: int, block: Block, round_: int | Int32[Array, ""] = 0) -> Route:
    """Returns the route of choices; a choice of `num_experts` goes nowhere.

    Args:
        chosen: expert of every choice, in [0, num_experts]; those of a token differ.
        num_experts: number of all experts.
        block: shape of what goes to one peer.
        round_: number of the round. Each takes the next `block.slots` choices of every peer.
    """
    (n, k), peers = chosen.shape, num_experts // block.experts
    before, sizes = _prefix_sums(hits(chosen, num_experts))
    sizes = sizes.reshape(peers, block.experts)
    until = jnp.cumsum(sizes, axis=1)
    safe = jnp.minimum(chosen, num_experts - 1)
    place = (until - sizes).reshape(-1)[safe] + jnp.take_along_axis(before, safe, axis=1) - round_ * block.slots
    is_sent = (chosen < num_experts) & (place >= 0) & (place < block.slots)
    peer, number = safe // block.experts, jnp.arange(n * k, dtype=jnp.int32).reshape(n, k)
    # Choices without a slot have indices of their own beyond the end: `unique_indices` promises that none repeats.
    slot = jnp.where(is_sent, peer * block.slots + place, peers * block.slots + number)
    source = jnp.full(peers * block.slots, n * k, jnp.int32)
    source = source.at[slot.reshape(-1)].set(number.reshape(-1), mode="drop", unique_indices=True)
    until = jnp.clip(until - round_ * block.slots, 0, block.slots)
    return Route(
        rows=jnp.where(is_sent, peer * block.rows + block.header + place, peers * block.rows),
        source=source.reshape(peers, block.slots),
        counts=jnp.diff(until, axis=1, prepend=0),
    )


def hits(chosen: Int32[Array, "*n k"], num_experts: int) -> Int32[Array, "*n E"]:
    """Returns how often each token chose each expert, 0 or 1."""
    return jnp.sum(jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32), axis=-2)


def num_rounds(chosen: Int32[Array, "n k"], num_experts: int, block: Block) -> Int32[Array, ""]:
    """Returns the number of rounds that the devices of `PEERS` need for all of their choices."""
    of_peers = hits(chosen.reshape(-1, 1) // block.experts, num_experts // block.experts)
    most = jnp.max(jnp.sum(of_peers, axis=0))
    return jax.lax.pmax(-(-most // block.slots), PEERS)


def _prefix_sums(hits: Int32[Array, "n E"]) -> tuple[Int32[Array, "n E"], Int32[Array, "E"]]:
    """Returns for each row the sum of the rows before it, and the sum of all rows. Products with a triangle of ones sum up
    blocks of rows: they are exact, and cheap on matrix units."""
    n, E = hits.shape
    blocks = jnp.pad(hits, ((0, -n % _ROWS_AT_ONCE), (0, 0))).reshape(-1, _ROWS_AT_ONCE, E).astype(jnp.float32)
    within = jnp.einsum("ij,bjE->biE", jnp.tri(_ROWS_AT_ONCE, k=-1, dtype=jnp.float32), blocks).astype(jnp.int32)
    sums = jnp.sum(blocks, axis=1).astype(jnp.int32)
    until = jnp.cumsum(sums, axis=0)
    return (within + (until - sums)[:, None]).reshape(-1, E)[:n], until[-1]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def pack(x: Float[Array, "n I"], weights: Float32[Array, "n k"], route: Route, block: Block) -> Float[Array, "R I"]:
    """Returns the blocks for all peers, R rows: of every choice its token, which has its number's weight."""
    n, k = weights.shape
    is_there = route.source < n * k
    source = jnp.where(is_there, route.source, 0)
    of_slots = jnp.where(is_there, weights.reshape(-1)[source], 0.0)
    header = _header(jnp.concatenate([of_slots, route.counts.astype(jnp.float32)], axis=1), x.dtype, block)
    rows = jnp.where(is_there[:, :, None], x[source // k], 0)
    return jnp.concatenate([header, rows], axis=1).reshape(-1, block.width)


def _pack_back(block: Block, route: Route, d: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    d_slots = _header_values(d.reshape(-1, block.rows, block.width), block)[:, : block.slots]
    peer, row = jnp.divmod(jnp.minimum(route.rows, d.shape[0] - 1), block.rows)
    d_weights = jnp.where(route.rows < d.shape[0], d_slots[peer, row - block.header], 0.0)
    return collect(d, route, block), d_weights, None


pack.defvjp(lambda x, weights, route, block: (pack(x, weights, route, block), route), _pack_back)


class Filled(NamedTuple):
    """Rows of each block that are filled, its header among them."""

    sent: Int32[Array, "G"]
    """Those of the blocks for the peers."""
    came: Int32[Array, "G"]
    """Those of the blocks that the peers send."""

    @property
    def back(self) -> "Filled":
        """The same rows on their way back."""
        return Filled(self.came, self.sent)


def filled(route: Route, block: Block) -> Filled:
    """Returns the filled rows of blocks; devices tell each other."""
    sent = block.header + jnp.sum(route.counts, axis=1)
    return Filled(sent, jax.lax.all_to_all(sent, PEERS, split_axis=0, concat_axis=0, tiled=True))


def exchange(blocks: Float[Array, "R I"], rows: Filled | None = None) -> Float[Array, "R I"]:
    """Sends every peer its block, and returns the blocks that came; or the filled rows of blocks alone, which XLA does on
    GPUs. Other rows are zeros then."""
    if (peers := jax.lax.axis_size(PEERS)) == 1:
        return blocks
    if rows is not None:
        return _exchange_filled(blocks, rows)
    by_peer = blocks.reshape(peers, -1, blocks.shape[-1])
    return jax.lax.all_to_all(by_peer, PEERS, split_axis=0, concat_axis=0, tiled=True).reshape(blocks.shape)


@jax.custom_vjp
def _exchange_filled(blocks: Float[Array, "R I"], rows: Filled) -> Float[Array, "R I"]:
    peers = len(rows.sent)
    length = len(blocks) // peers
    # Of the type of `rows`, which differ from device to device.
    starts = length * jnp.arange(peers, dtype=jnp.int32) + 0 * rows.sent
    own = length * jax.lax.axis_index(PEERS).astype(jnp.int32) + 0 * rows.sent
    return jax.lax.ragged_all_to_all(blocks, jnp.zeros_like(blocks), starts, rows.sent, own, rows.came, axis_name=PEERS)


_exchange_filled.defvjp(
    lambda blocks, rows: (_exchange_filled(blocks, rows), rows), lambda rows, d: (_exchange_filled(d, rows.back), None)
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def unpack(
    blocks: Float[Array, "R I"], block: Block
) -> tuple[Float[Array, "R I"], Float32[Array, "R"], Int32[Array, "G E"]]:
    """Returns the rows of blocks that came, headers among them; the weight of each row; and the counts."""
    by_peer = blocks.reshape(-1, block.rows, block.width)
    values = _header_values(by_peer, block)
    weights = jnp.pad(values[:, : block.slots], ((0, 0), (block.header, 0))).reshape(-1)
    return blocks, weights, values[:, block.slots :].astype(jnp.int32)


def _unpack_back(block: Block, _: None, d: Any) -> tuple[jax.Array]:
    d_rows, d_weights, _ = d
    d_rows = d_rows.reshape(-1, block.rows, block.width)[:, block.header :]
    d_values = d_weights.reshape(-1, block.rows)[:, block.header :]
    header = _header(jnp.pad(d_values, ((0, 0), (0, block.experts))), d_rows.dtype, block)
    return (jnp.concatenate([header, d_rows], axis=1).reshape(-1, block.width),)


unpack.defvjp(lambda blocks, block: (unpack(blocks, block), None), _unpack_back)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect(y: Float[Array, "R I"], route: Route, block: Block) -> Float[Array, "n I"]:
    """Returns for each token the sum of its choices' rows, added up in float32."""
    total: Any = 0.0
    for row in route.rows.T:
        own = y[jnp.minimum(row, y.shape[0] - 1)].astype(jnp.float32)
        total = total + jnp.where((row < y.shape[0])[:, None], own, 0.0)
    return total.astype(y.dtype)


def _collect_back(block: Block, route: Route, d: jax.Array) -> tuple[jax.Array, None]:
    n, k = route.rows.shape
    is_there = route.source < n * k
    rows = jnp.where(is_there[:, :, None], d[jnp.where(is_there, route.source, 0) // k], 0)
    return jnp.pad(rows, ((0, 0), (block.header, 0), (0, 0))).reshape(-1, block.width), None


collect.defvjp(lambda y, route, block: (collect(y, route, block), route), _collect_back)


class Groups(NamedTuple):
    """The rows of all blocks that came, by expert."""

    order: Int32[Array, "M"]
    """Row at each place, where rows lie expert after expert; any row at places beyond the last."""
    sizes: Int32[Array, "E"]
    """Rows of each expert."""
    is_row: Array
    """Bool [R]: whether a row has a token."""
    place: Int32[Array, "R"]
    """Place of each row with a token, else 0."""


def by_expert(counts: Int32[Array, "G E"], block: Block) -> Groups:
    """Returns the groups of rows that came with these counts."""
    peers, E = counts.shape
    ends = jnp.cumsum(counts, axis=1)
    slot = jnp.arange(block.rows)[None, :] - block.header
    expert = jnp.sum(slot[:, :, None] >= ends[:, None, :], axis=-1, dtype=jnp.int32)
    sizes = jnp.sum(counts, axis=0)
    first = (jnp.cumsum(sizes) - sizes)[None] + jnp.cumsum(counts, axis=0) - counts
    is_row = (slot >= 0) & (expert < E)
    of_expert = (jnp.arange(peers)[:, None], jnp.minimum(expert, E - 1))
    place = first[of_expert] + slot - (ends - counts)[of_expert]
    num_slots, row = peers * block.slots, jnp.arange(peers * block.rows, dtype=jnp.int32)
    index = jnp.where(is_row.reshape(-1), place.reshape(-1), num_slots + row)
    order = jnp.zeros(num_slots, jnp.int32).at[index].set(row, mode="drop", unique_indices=True)
    return Groups(order, sizes, is_row.reshape(-1), jnp.where(is_row, place, 0).reshape(-1))


def _header(values: Float32[Array, "G V"], dtype: DTypeLike, block: Block) -> Float[Array, "G header I"]:
    """Returns rows that represent the values exactly, in a dtype with fewer bits as sums of terms."""
    terms, rest = [], values
    for _ in range(block.terms):
        # A conversion to `dtype` and back would do, but XLA removes it.
        term = jax.lax.reduce_precision(rest, 8, 7) if block.terms > 1 else rest
        terms.append(term)
        rest = rest - term
    flat = jnp.concatenate(terms, axis=1).astype(dtype)
    fill = block.header * block.width - flat.shape[1]
    return jnp.pad(flat, ((0, 0), (0, fill))).reshape(-1, block.header, block.width)


def _header_values(blocks: Float[Array, "G rows I"], block: Block) -> Float32[Array, "G V"]:
    flat = blocks[:, : block.header].reshape(blocks.shape[0], -1).astype(jnp.float32)
    num_values = block.slots + block.experts
    return jnp.sum(flat[:, : block.terms * num_values].reshape(-1, block.terms, num_values), axis=1)
