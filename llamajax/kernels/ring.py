"""Ring attention (arXiv:2310.01889): keys and values travel from device to device while each device attends to those that it
has.

Rows are in the zigzag order of `llamajax.parallel.sequence`: a device has an early and a late half of its tokens. It first
attends to its own keys. At step s it has the keys and values of the device s places before it, and it attends to two of the
four pairs of halves, which are seen whole. Its late queries see the early keys of every other device. If the other device is
earlier in the row, its early queries see the early keys too; else its late queries see the late keys. So all devices have
the same work. Meanwhile the keys and values of the next step are on their way, and the sums of their gradients follow them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from llamajax.config.parallel import axes_of
from llamajax.kernels.block import Gradients, How, Part, Place, attend_block, attend_block_backward, merge
from llamajax.kernels.choice import Kernel
from llamajax.kernels.plain import Keys, LogSumExp, Mask, Queries
from llamajax.kernels.task import Language
from llamajax.parallel.sequence import pass_on, zigzag_indices
from llamajax.parallel.sharding import spec

Tree = TypeVar("Tree")
SegmentIds = Int32[Array, "B T"] | None
Block = tuple[jax.Array, jax.Array]
"""Keys and values of one device's tokens."""
_Q = spec("batch", "seq", "kv_heads", None, "head_dim")
_KV = spec("batch", "seq", "kv_heads", "head_dim")
_LSE = spec("batch", "seq", "kv_heads", None)
_TOKENS = spec("batch", "seq")


def attend(
    q: Queries, k: Keys, v: Keys, mask: Mask, scale: float, *, kernel: Kernel = "plain", interpret: bool = False
) -> tuple[Queries, LogSumExp]:
    """Same contract as `llamajax.kernels.attention.attend`, for rows in zigzag order that are split over more than one
    device."""
    language: Language | None = kernel if kernel == "pallas" or kernel == "triton" else None
    return _attend(q, k, v, mask.segment_ids, How(mask.window, scale, interpret, language))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Queries, k: Keys, v: Keys, segment_ids: SegmentIds, how: How) -> tuple[Queries, LogSumExp]:
    on_device = partial(_forward, how=how)
    in_specs, out_specs = (_Q, _KV, _KV, _TOKENS), (_Q, _LSE)
    # Pallas calls do not say over which axes their results vary.
    return jax.shard_map(on_device, in_specs=in_specs, out_specs=out_specs, check_vma=how.language is None)(
        q, k, v, segment_ids
    )


def _attend_and_keep(
    q: Queries, k: Keys, v: Keys, segment_ids: SegmentIds, how: How
) -> tuple[tuple[Queries, LogSumExp], tuple[Any, ...]]:
    # Named here, so that a policy that saves `attention` saves all that the backward pass needs, and the ring runs only
    # once.
    out, lse = checkpoint_name(_attend(q, k, v, segment_ids, how), "attention")
    return (out, lse), (q, k, v, segment_ids, out, lse)


def _gradients(how: How, kept: tuple[Any, ...], cotangents: tuple[Queries, LogSumExp]) -> tuple[Queries, Keys, Keys, None]:
    on_device, arguments = partial(_backward, how=how), [*kept, *cotangents]
    in_specs, out_specs = (_Q, _KV, _KV, _TOKENS, _Q, _LSE, _Q, _LSE), (_Q, _KV, _KV)
    run = jax.shard_map(on_device, in_specs=in_specs, out_specs=out_specs, check_vma=how.language is None)
    return *run(*arguments), None


_attend.defvjp(_attend_and_keep, _gradients)


def _forward(
    q: Float[Array, "b t K G H"],
    k: Float[Array, "b t K H"],
    v: Float[Array, "b t K H"],
    segment_ids: Int32[Array, "b t"] | None,
    *,
    how: How,
) -> tuple[Float[Array, "b t K G H"], Float32[Array, "b t K G"]]:
    """Computes one device's part of `_attend`."""
    source_of = _sources(q.shape[0], q.shape[1], segment_ids)
    num_devices, own = jax.lax.axis_size(axes_of("seq")), source_of(0)
    early, late = _cut((q, own.place))

    def attend_to(queries: tuple[jax.Array, Place], keys: tuple[Block, Place]) -> Part:
        def attend() -> Part:
            return attend_block(queries[0], *keys[0], queries[1], keys[1], how)

        def see_nothing(part: Part) -> Part:
            return Part(jnp.zeros_like(part.out), jnp.full_like(part.lse, -jnp.inf))

        return _where_seen(queries[1], keys[1], how, attend, see_nothing)

    def add_block(parts: tuple[Part, Part], block: Block, step: int | jax.Array) -> tuple[Part, Part]:
        source = source_of(step)
        early_keys, late_keys = _cut((block, source.place))
        of_late = attend_to(late, early_keys)
        of_either = attend_to(_choose(source.is_later, late, early), _choose(source.is_later, late_keys, early_keys))
        nothing = of_either._replace(lse=jnp.full_like(of_either.lse, -jnp.inf))
        of_early_too, of_late_too = _choose(source.is_later, (nothing, of_either), (of_either, nothing))
        return merge(parts[0], of_early_too), merge(merge(parts[1], of_late), of_late_too)

    def turn(carry: tuple[tuple[Part, Part], Block], step: jax.Array) -> tuple[tuple[tuple[Part, Part], Block], None]:
        parts, block = carry
        following = _pass_on(block)
        return (add_block(parts, block, step), following), None

    following = _pass_on((k, v))
    early_keys, late_keys = _cut(((k, v), own.place))
    parts = attend_to(early, early_keys), merge(attend_to(late, late_keys), attend_to(late, early_keys))
    (parts, block), _ = jax.lax.scan(turn, (parts, following), jnp.arange(1, num_devices - 1))
    out, lse = _join(*add_block(parts, block, num_devices - 1))
    return out.astype(q.dtype), lse


def _backward(
    q: Float[Array, "b t K G H"],
    k: Float[Array, "b t K H"],
    v: Float[Array, "b t K H"],
    segment_ids: Int32[Array, "b t"] | None,
    out: Float[Array, "b t K G H"],
    lse: Float32[Array, "b t K G"],
    d_out: Float[Array, "b t K G H"],
    d_lse: Float32[Array, "b t K G"],
    *,
    how: How,
) -> tuple[Float[Array, "b t K G H"], Float[Array, "b t K H"], Float[Array, "b t K H"]]:
    """Computes one device's part of `_gradients`.

    The gradients of a block start at the device after its own and follow the block around. They are added up in fp32 and
    sent in the dtype of the keys, as in a reduce-scatter. The block's own device adds its contribution at the end; the share
    of its late queries is computed last, while the sums are on their way home.
    """
    source_of = _sources(q.shape[0], q.shape[1], segment_ids)
    num_devices, own = jax.lax.axis_size(axes_of("seq")), source_of(0)
    d_lse = d_lse - jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    early, late = _cut((q, lse, d_out, d_lse, own.place))

    def gradients(queries: tuple[Any, ...], keys: tuple[Block, Place]) -> Gradients:
        (q, lse, d_out, d_lse, place), ((k, v), k_place) = queries, keys

        def differentiate() -> Gradients:
            return attend_block_backward(q, k, v, lse, d_out, d_lse, place, k_place, how)

        return _where_seen(place, k_place, how, differentiate, partial(jax.tree.map, jnp.zeros_like))

    def add_block(d_q: tuple[jax.Array, jax.Array], block: Block, step: int | jax.Array) -> tuple[Any, Block]:
        source = source_of(step)
        early_keys, late_keys = _cut((block, source.place))
        of_late = gradients(late, early_keys)
        of_either = gradients(_choose(source.is_later, late, early), _choose(source.is_later, late_keys, early_keys))
        nothing = jax.tree.map(jnp.zeros_like, of_either)
        of_early_too, of_late_too = _choose(source.is_later, (nothing, of_either), (of_either, nothing))
        d_q = d_q[0] + of_early_too.q, d_q[1] + of_late.q + of_late_too.q
        return d_q, _join((of_late.k + of_early_too.k, of_late.v + of_early_too.v), (of_late_too.k, of_late_too.v))

    def add(sums: Block, d_block: Block) -> Block:
        return jax.tree.map(lambda x, y: (x + y).astype(x.dtype), sums, d_block)

    def turn(carry: tuple[Any, Block, Block], step: jax.Array) -> tuple[tuple[Any, Block, Block], None]:
        d_q, block, sums = carry
        next_k, next_v, d_k, d_v = pass_on(*block, *sums)
        d_q, d_block = add_block(d_q, block, step)
        return (d_q, (next_k, next_v), add((d_k, d_v), d_block)), None

    block = _pass_on((k, v))
    early_keys, late_keys = _cut(((k, v), own.place))
    of_early, of_late = gradients(early, early_keys), gradients(late, late_keys)
    following = _pass_on(block)  # unused, and removed by the compiler, with only two devices
    d_q, d_block = add_block((of_early.q, of_late.q), block, 1)
    sums = d_block[0].astype(k.dtype), d_block[1].astype(v.dtype)
    (d_q, block, sums), _ = jax.lax.scan(turn, (d_q, following, sums), jnp.arange(2, num_devices - 1))
    if num_devices > 2:
        sums = _pass_on(sums)
        d_q, d_block = add_block(d_q, block, num_devices - 1)
        sums = add(sums, d_block)
    sums = _pass_on(sums)
    last = gradients(late, early_keys)
    d_own = _join((of_early.k + last.k, of_early.v + last.v), (of_late.k, of_late.v))
    return _join(d_q[0], d_q[1] + last.q).astype(q.dtype), *add(sums, d_own)


def _where_seen(
    q_place: Place, k_place: Place, how: How, compute: Callable[[], Tree], nothing: Callable[[Tree], Tree]
) -> Tree:
    """Returns the result of `compute`, or `nothing` of a like result where the window is too short to reach any of the
    keys."""
    if how.window is None or how.language is not None:
        return compute()
    like = jax.eval_shape(compute)

    def skip() -> Tree:
        results = nothing(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like))
        return jax.tree.map(lambda x, y: jax.lax.pcast(x, tuple(y.manual_axis_type.varying), to="varying"), results, like)

    nearest = q_place.indices[0, 0] - k_place.indices[0, -1]
    return jax.lax.cond(nearest < how.window, compute, skip)


def _pass_on(block: Block) -> Block:
    k, v = pass_on(*block)
    return k, v


class _Source(NamedTuple):
    """The device that a block of keys and values belongs to."""

    place: Place
    """Positions of the device's tokens."""
    is_later: Bool[Array, ""]
    """Whether its early tokens are later in the row than the early tokens of the device that holds the block."""


def _sources(batch: int, length: int, segment_ids: jax.Array | None) -> Callable[[int | jax.Array], _Source]:
    """Returns a function from a step to the source of the block that this device then holds, for tokens [batch, length]."""
    axes = axes_of("seq")
    everyones = None if segment_ids is None else jax.lax.all_gather(segment_ids, axes)

    def source_of(step: int | jax.Array) -> _Source:
        own = jax.lax.axis_index(axes)
        device = (own - step) % jax.lax.axis_size(axes)
        indices = jnp.broadcast_to(zigzag_indices(device, length), (batch, length))
        return _Source(Place(indices, None if everyones is None else everyones[device]), device > own)

    return source_of


def _choose(condition: Bool[Array, ""], one: Tree, other: Tree) -> Tree:
    return jax.tree.map(partial(jnp.where, condition), one, other)


def _cut(tree: Tree) -> tuple[Tree, Tree]:
    """Returns the early and the late tokens of a device."""
    middle = jax.tree.leaves(tree)[0].shape[1] // 2
    return jax.tree.map(lambda x: x[:, :middle], tree), jax.tree.map(lambda x: x[:, middle:], tree)


def _join(early: Tree, late: Tree) -> Tree:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), early, late)
