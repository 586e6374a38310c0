"""FlashAttention (arXiv:2205.14135, arXiv:2307.08691) in Pallas, or in Triton's own language; Triton compiles both for
NVIDIA GPUs. No score reaches the GPU's memory, and tiles of scores that no query sees are skipped.

Query heads that share keys and values read the same ones. The backward pass recomputes the scores twice: once to sum the
gradient of each query, once to sum the gradients of each key. So no two programs add to the same number, and sums have one
order.

Functions marked `on one device` are called within `shard_map`.
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
    """Returns the mask with its `sight`, computed once for all layers: for whole rows in the form `ulysses`, else for each
    device's part of the queries. A ring computes its own at every step."""
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
    """Same contract as `attention.attend`. Queries stay on their part of the sequence; the keys and values of the whole row
    are gathered."""
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
    """On one device: returns which scores consecutive queries see of consecutive keys, see `Mask`.

    Args:
        num_queries: number of queries.
        num_keys: number of keys.
        head_dim: width of a head.
        offset: index of the first query in its row minus the index of the first key.
        window: see `Mask`.
        documents: documents of the tokens.
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
    """On one device: returns softmax(scale * q k^T) v over the keys that a query sees, with softmax and sums in fp32; and
    the log-sum-exp of the scores.

    A query that sees no key gets zeros and -inf. Both results have gradients. Backward residuals carry the checkpoint name
    `attention`.

    Args:
        q: queries.
        k: keys.
        v: values.
        sight: result of `sight` for these queries and keys.
        window: same as in `sight`.
        scale: factor of the scores.
        interpret: compute with jax or Triton's interpreter, on any device and slowly, instead of compiling with Triton.
        language: language of the kernels.
    """
    return _attend(q, k, v, sight, _How(window, scale, interpret, language))


class _How(NamedTuple):
    """Static arguments of `attend_part` and `part_gradients`."""

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
    # Named here, so that a policy that saves `attention` saves all that the backward pass needs, and the kernel runs only
    # once.
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
    """Converts one number per query from the kernels' order, by head, to the order of the rest of the program."""
    b, N, t = x.shape
    return jnp.moveaxis(x, 1, 2).reshape(b, t, num_kv_heads, N // num_kv_heads)


def by_head(x: Float32[Array, "b t K G"]) -> Float32[Array, "b N t"]:
    """Inverse of `by_query`."""
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
    """On one device: computes `attend_to_rows` without a derivative, in `dtype` (default: q's); the log-sum-exp is by
    head."""
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
    """On one device: returns the contribution of these keys to the gradients of attention to all keys.

    Args:
        q: see `attend_to_rows`.
        k: see `attend_to_rows`.
        v: see `attend_to_rows`.
        lse: log-sum-exp over all keys that the queries see, in every part.
        d_out: gradient of the whole output, in q's dtype.
        d_scores: the term of a score's gradient besides the gradient of its weight: the gradient of `lse` minus the product
            of `d_out` and the whole output.
        sight: see `attend_to_rows`.
        window: see `attend_to_rows`.
        scale: see `attend_to_rows`.
        interpret: see `attend_to_rows`.
        language: see `attend_to_rows`.
        dtype: dtype of the results; default: q's.

    Returns:
        Gradients of q, k and v.
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
    """Returns the sizes of the tiles that the kernels use for these scores."""
    forward, _, of_keys = _builds(num_queries, num_keys, head_dim)
    return Sizes(forward.size, of_keys.size)


def _launch(language: Language) -> Any:
    """Returns the function that launches a kernel written in this language."""
    if language == "pallas":
        return pallas_kernels.launch
    from llamajax.kernels import triton_kernels  # the package is an extra

    return triton_kernels.launch


def _parts_of_group(group: int, programs: int) -> int:
    """Returns the number of programs that share a group of heads: the fewest that keep a GPU busy, given the number of
    programs without sharing. Shared sums are written in fp32 and added afterwards, so a group is not split where there are
    enough programs."""
    enough = (parts for parts in range(1, group) if group % parts == 0 and programs * parts >= _ENOUGH_PROGRAMS)
    return next(enough, group)


_ENOUGH_PROGRAMS = 512
"""Programs of one kernel that keep a GPU busy: about four per core of an H100. The longest program of causal rows takes
twice the mean time."""


def _builds(num_queries: int, num_keys: int, head_dim: int) -> tuple[Build, Build, Build]:
    """Returns the builds of the three kernels; the first two have the same tile size."""
    lengths = num_queries, num_keys

    def fitted(build: Build) -> Build:
        sides = (min(side, max(_LEAST_SIDE, pl.next_power_of_2(n))) for side, n in zip(build.size, lengths, strict=True))
        return build._replace(size=TileSize(*sides))

    forward, of_queries, of_keys = _BY_WIDTH[max(64, pl.next_power_of_2(head_dim))]
    return fitted(forward), fitted(of_queries), fitted(of_keys)


_LEAST_SIDE = 16
"""Least side of a tile that tensor cores support."""

_BY_WIDTH = {
    64: (Build(TileSize(128, 64), 4, 3), Build(TileSize(128, 64), 4, 3), Build(TileSize(64, 64), 4, 3)),
    128: (Build(TileSize(128, 64), 8, 3), Build(TileSize(128, 64), 8, 2), Build(TileSize(64, 64), 8, 2)),
    256: (Build(TileSize(64, 64), 8, 2), Build(TileSize(64, 64), 8, 2), Build(TileSize(32, 64), 8, 2)),
}
"""Tile, warps and stages of the three kernels by head width; the first two have the same tile size. They fit into the
registers and shared memory of A100 and H100. With one stage, an H100 would spill 1.3 KB per thread for heads of 256, because
Triton then keeps the operands in registers."""
