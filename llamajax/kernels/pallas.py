"""FlashAttention (arXiv:2205.14135, arXiv:2307.08691) in Pallas, or in the language of Triton, which compiles both for
NVIDIA GPUs: no score reaches the GPU's memory, and tiles of scores that no query sees are not computed.

Query heads that share keys and values read the same ones. The backward pass computes the scores again, twice: once to add up
the gradient of each query, once those of each key, so that no two programs add to one number and sums have one order.

What is `on one device` is called within `shard_map`.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.parallel import SequenceForm, axes_of
from llamajax.kernels import pallas_kernels
from llamajax.kernels.plain import Keys, LogSumExp, Mask, Queries, whole_rows
from llamajax.kernels.task import Build, Language, Task
from llamajax.kernels.tiles import Documents, Sight, Sizes, Tiles, TileSize, tiles
from llamajax.parallel.sharding import spec


def see(mask: Mask, seq_len: int, head_dim: int, sequence: SequenceForm) -> Mask:
    """The mask of rows with its `sight`, made once for all layers: of whole rows in the form `ulysses`, else of those parts
    of their queries that devices have. A ring makes its own at every step."""
    is_whole, rows_differ = sequence == "ulysses", mask.segment_ids is not None
    split_over = None if is_whole else "seq"
    by_queries: Any = spec("batch", split_over)
    by_rows: Any = spec("batch", None)
    of_tiles: Any = by_queries if rows_differ else spec(None, split_over)
    documents = Documents(by_queries, by_rows) if rows_differ else None
    of_offset: Any = spec(split_over)
    out_specs = Sight(Tiles(of_tiles, of_tiles), of_offset, documents)

    @partial(jax.shard_map, in_specs=(spec("batch", "seq"),), out_specs=out_specs, check_vma=False)
    def on_device(ids: jax.Array | None) -> Sight:
        length = seq_len // jax.lax.axis_size(axes_of("seq"))
        whole = None if ids is None else whole_rows(ids)
        if is_whole:
            documents = None if whole is None else Documents(whole, whole)
            return sight(seq_len, seq_len, head_dim, window=mask.window, documents=documents)
        documents = None if ids is None or whole is None else Documents(ids, whole)
        first = jax.lax.axis_index(axes_of("seq")) * length
        return sight(length, seq_len, head_dim, offset=first, window=mask.window, documents=documents)

    return dataclasses.replace(mask, sight=on_device(mask.segment_ids))


def attend(
    q: Queries, k: Keys, v: Keys, mask: Mask, scale: float, *, interpret: bool, language: Language = "pallas"
) -> tuple[Queries, LogSumExp]:
    """As the door. Queries stay on their part of the sequence; the keys and values of the whole row come to them."""
    mask = mask if mask.sight is not None else see(mask, q.shape[1], q.shape[-1], "gather")
    assert mask.sight is not None
    q_spec, kv_spec = spec("batch", "seq", "kv_heads", None, "head_dim"), spec("batch", "seq", "kv_heads", "head_dim")
    in_specs = q_spec, kv_spec, kv_spec, jax.tree.map(lambda x: jax.typeof(x).sharding.spec, mask.sight)

    # Pallas calls do not say over which axes their results vary.
    @partial(jax.shard_map, in_specs=in_specs, out_specs=(q_spec, spec("batch", "seq", "kv_heads", None)), check_vma=False)
    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight) -> tuple[jax.Array, jax.Array]:
        k, v = whole_rows(k), whole_rows(v)
        how = {"window": mask.window, "scale": scale, "interpret": interpret}
        return attend_to_rows(q, k, v, sight, **how, language=language)

    return on_device(q, k, v, mask.sight)


def sight(
    num_queries: int,
    num_keys: int,
    head_dim: int,
    *,
    offset: int | Int32[Array, ""] = 0,
    window: int | None = None,
    documents: Documents | None = None,
) -> Sight:
    """On one device: what consecutive queries see of consecutive keys, see `Mask`.

    Args:
        num_queries: their number.
        num_keys: theirs.
        head_dim: width of a head.
        offset: index in their row of the first query less that of the first key.
        window: see `Mask`.
        documents: of the tokens.
    """
    q_ids, k_ids = documents or (None, None)
    seen = tiles(
        sizes(num_queries, num_keys, head_dim), num_queries, num_keys, offset=offset, window=window, q_ids=q_ids, k_ids=k_ids
    )
    return Sight(seen, jnp.reshape(jnp.asarray(offset, jnp.int32), (1,)), documents)


def attend_to_rows(
    q: Float[Array, "b t K G H"],
    k: Float[Array, "b s K H"],
    v: Float[Array, "b s K H"],
    sight: Sight,
    *,
    window: int | None,
    scale: float,
    interpret: bool,
    language: Language = "pallas",
) -> tuple[Float[Array, "b t K G H"], Float32[Array, "b t K G"]]:
    """On one device: softmax(scale * q k^T) v over the keys that a query sees, softmax and sums in fp32; and the log-sum-exp
    of its scores.

    A query that sees no key has zeros, and -inf. Both results have gradients. Remat knows what the backward pass needs of
    them as `attention`.

    Args:
        q: queries.
        k: keys.
        v: their values.
        sight: what the function of that name makes for these.
        window: the same as there.
        scale: of the scores.
        interpret: compute as jax does, or Triton's own interpreter, on any device and slowly, what Triton would compile.
        language: of the kernels.
    """
    return _attend(q, k, v, sight, _How(window, scale, interpret, language))


class _How(NamedTuple):
    """What `attend_part` and `part_gradients` are told beside arrays."""

    window: int | None
    scale: float
    interpret: bool
    language: Language


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, how: _How) -> tuple[jax.Array, jax.Array]:
    return _attend_and_keep(q, k, v, sight, how)[0]


def _attend_and_keep(
    q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, how: _How
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    out, lse = attend_part(q, k, v, sight, **how._asdict())
    # Named here, so that who keeps `attention` has all that the backward pass needs, and the kernel runs only once.
    out, lse = checkpoint_name((out, lse), "attention")
    return (out, by_query(lse, q.shape[2])), (q, k, v, sight, out, lse)


def _gradients(
    how: _How, kept: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, sight, out, lse = kept
    d_out, d_lse = cotangents
    d_scores = by_head(d_lse - jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1))
    gradients = part_gradients(q, k, v, lse, d_out, d_scores, sight, **how._asdict())
    return *gradients, None


_attend.defvjp(_attend_and_keep, _gradients)


def by_query(x: Float32[Array, "b N t"], num_kv_heads: int) -> Float32[Array, "b t K G"]:
    """As the rest of the program has it what kernels have by head: one number for every query."""
    b, N, t = x.shape
    return jnp.moveaxis(x, 1, 2).reshape(b, t, num_kv_heads, N // num_kv_heads)


def by_head(x: Float32[Array, "b t K G"]) -> Float32[Array, "b N t"]:
    """The other way round."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1), 1, 2)


def attend_part(
    q: Float[Array, "b t K G H"],
    k: Float[Array, "b s K H"],
    v: Float[Array, "b s K H"],
    sight: Sight,
    *,
    window: int | None,
    scale: float,
    interpret: bool,
    language: Language = "pallas",
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "b t K G H"], Float32[Array, "b N t"]]:
    """On one device: as `attend_to_rows`, without a derivative, in `dtype` (default: q's); the log-sum-exp by head."""
    (b, t, K, G, H), s = q.shape, k.shape[1]
    task = Task("attention_forward", _builds(t, s, H)[0], b, t, s, K, G, H, scale, window)
    results = [
        jax.ShapeDtypeStruct((b, t, K * G, H), dtype or q.dtype),
        jax.ShapeDtypeStruct((b, K * G, t), jnp.float32),
    ]
    arrays = q.reshape(b, t, K * G, H), k, v
    out, lse = _launch(language)(task, sight.tiles.of_queries, sight, arrays, results, interpret=interpret)
    return out.reshape(q.shape), lse


def part_gradients(
    q: Float[Array, "b t K G H"],
    k: Float[Array, "b s K H"],
    v: Float[Array, "b s K H"],
    lse: Float32[Array, "b N t"],
    d_out: Float[Array, "b t K G H"],
    d_scores: Float32[Array, "b N t"],
    sight: Sight,
    *,
    window: int | None,
    scale: float,
    interpret: bool,
    language: Language = "pallas",
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "b t K G H"], Float[Array, "b s K H"], Float[Array, "b s K H"]]:
    """On one device: what these keys add to the gradients of attention to all keys.

    Args:
        q: see `attend_to_rows`.
        k: see there.
        v: see there.
        lse: over all keys that the queries see, in whichever part.
        d_out: gradient of the whole output, in q's dtype.
        d_scores: what the gradient of a score has beside that of its weight: the gradient of `lse`, less the product of
            `d_out` and the whole output.
        sight: see there.
        window: see there.
        scale: see there.
        interpret: see there.
        language: see there.
        dtype: of the results; default: q's.

    Returns:
        For q, k and v.
    """
    (b, t, K, G, H), s = q.shape, k.shape[1]
    _, of_queries, of_keys = _builds(t, s, H)
    arrays = q.reshape(b, t, K * G, H), k, v, d_out.reshape(b, t, K * G, H), lse, d_scores
    launch = partial(_launch(language), interpret=interpret)

    task = Task("attention_backward_queries", of_queries, b, t, s, K, G, H, scale, window)
    results = [jax.ShapeDtypeStruct((b, t, K * G, H), dtype or q.dtype)]
    (d_q,) = launch(task, sight.tiles.of_queries, sight, arrays, results)

    task = Task("attention_backward_keys", of_keys, b, t, s, K, G, H, scale, window)
    parts = _parts_of_group(G, math.prod(task.grid))
    results = [jax.ShapeDtypeStruct((b, s, K * parts, H), jnp.float32 if parts > 1 else dtype or k.dtype)] * 2
    d_k, d_v = launch(task._replace(parts=parts), sight.tiles.of_keys, sight, arrays, results)
    if parts > 1:
        d_k, d_v = (jnp.sum(d.reshape(b, s, K, parts, H), axis=3).astype(dtype or k.dtype) for d in (d_k, d_v))
    return d_q.reshape(b, t, K, G, H), d_k, d_v


def sizes(num_queries: int, num_keys: int, head_dim: int) -> Sizes:
    """Of the tiles that kernels compute of such scores."""
    forward, _, of_keys = _builds(num_queries, num_keys, head_dim)
    return Sizes(forward.size, of_keys.size)


def _launch(language: Language) -> Any:
    """What launches one kernel that is written in it."""
    if language == "pallas":
        return pallas_kernels.launch
    from llamajax.kernels import triton_kernels  # whose package is an extra

    return triton_kernels.launch


def _parts_of_group(group: int, programs: int) -> int:
    """Into how many programs one for a group of heads is split, which are so many without: the fewest that keep a GPU busy.
    Their sums in fp32 are written and added up, so that none is where there are enough."""
    enough = (parts for parts in range(1, group) if group % parts == 0 and programs * parts >= _ENOUGH_PROGRAMS)
    return next(enough, group)


_ENOUGH_PROGRAMS = 512
"""Of one kernel: about four for each core of an H100. The longest of causal rows takes twice the mean."""


def _builds(num_queries: int, num_keys: int, head_dim: int) -> tuple[Build, Build, Build]:
    """Of the three kernels, the first two of which have one size of tile."""
    lengths = num_queries, num_keys

    def fitted(build: Build) -> Build:
        sides = (min(side, max(_LEAST_SIDE, pl.next_power_of_2(n))) for side, n in zip(build.size, lengths, strict=True))
        return build._replace(size=TileSize(*sides))

    forward, of_queries, of_keys = _BY_WIDTH[max(64, pl.next_power_of_2(head_dim))]
    return fitted(forward), fitted(of_queries), fitted(of_keys)


_LEAST_SIDE = 16
"""Of a tile, that tensor cores take."""

_BY_WIDTH = {
    64: (Build(TileSize(128, 64), 4, 3), Build(TileSize(128, 64), 4, 3), Build(TileSize(64, 64), 4, 3)),
    128: (Build(TileSize(128, 64), 8, 3), Build(TileSize(128, 64), 8, 2), Build(TileSize(64, 64), 8, 2)),
    256: (Build(TileSize(64, 64), 8, 2), Build(TileSize(64, 64), 8, 2), Build(TileSize(32, 64), 8, 2)),
}
"""By the width of heads: tile, warps and stages of the three kernels, the first two of which have one size of tile. The
registers and shared memory of A100 and H100 hold them: with one stage, an H100 would spill 1.3 KB of a thread with heads of
256, since Triton then keeps its operands in registers."""
