"""Attention by tokamax (github.com/openxla/tokamax), which uses Hopper's own instructions through jax's Mosaic GPU. No score
reaches the GPU's memory.

It compiles for the architecture of jax's default device; `llamajax.planning.xla.compile` makes the planned GPU the default.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from llamajax.kernels.plain import Keys, Mask, Queries, whole_rows
from llamajax.parallel.sharding import spec


def see(mask: Mask) -> Mask:
    """Returns the mask with its `starts`, computed once for all layers. The tokens of a document are adjacent."""
    if mask.segment_ids is None:
        return mask

    @partial(jax.shard_map, in_specs=(spec("batch", "seq"),), out_specs=spec("batch", None), check_vma=False)
    def on_device(ids: jax.Array) -> jax.Array:
        return starts(whole_rows(ids))

    return dataclasses.replace(mask, starts=on_device(mask.segment_ids))


def starts(segment_ids: Int32[Array, "b T"]) -> Int32[Array, "b T"]:
    """Returns for each token of a row the index at which its document begins."""
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    indices = jnp.where(begins, jnp.arange(1, segment_ids.shape[1])[None], 0)
    return jax.lax.cummax(jnp.pad(indices, ((0, 0), (1, 0))), axis=1)


def attend(q: Queries, k: Keys, v: Keys, mask: Mask, scale: float) -> Queries:
    """Same contract as `llamajax.kernels.attention.attend`, for sites without an `llamajax.kernels.choice.obstacle`."""
    mask = mask if mask.starts is not None else see(mask)
    q_spec, kv_spec = spec("batch", "seq", "kv_heads", None, "head_dim"), spec("batch", "seq", "kv_heads", "head_dim")

    # tokamax's calls do not say over which axes their results vary.
    @partial(jax.shard_map, in_specs=(q_spec, kv_spec, kv_spec, spec("batch", None)), out_specs=q_spec, check_vma=False)
    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array | None) -> jax.Array:
        return attend_to_rows(q, k, v, starts, window=mask.window, scale=scale)

    return on_device(q, k, v, mask.starts)


def attend_to_rows(
    q: Float[Array, "b T K G H"],
    k: Float[Array, "b T K H"],
    v: Float[Array, "b T K H"],
    starts: Int32[Array, "b T"] | None,
    *,
    window: int | None,
    scale: float,
) -> Float[Array, "b T K G H"]:
    """On one device, within `shard_map`: computes `attend` for whole rows. Backward residuals carry the checkpoint name
    `attention`.

    Args:
        q: queries.
        k: keys.
        v: values.
        starts: result of `starts`; None: every row is one document.
        window: see `llamajax.kernels.plain.Mask`.
        scale: factor of the scores.
    """
    b, T, K, G, H = q.shape
    if window is not None:
        # With tokamax's own window, its kernels no longer treat the mask as causal and skip fewer scores.
        first = jnp.maximum(jnp.arange(T) + 1 - window, 0)[None]
        starts = jnp.broadcast_to(first, (b, T)) if starts is None else jnp.maximum(first, starts)
    out: Any = _attend(q.reshape(b, T, K * G, H), k, v, starts, scale)
    return out.reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array | None, scale: float) -> jax.Array:
    return _attend_and_keep(q, k, v, starts, scale)[0]


def _attend_and_keep(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array | None, scale: float
) -> tuple[jax.Array, tuple[Any, ...]]:
    kernel, how = _kernel(), _how(q, k, v, starts, scale)
    with _own_sizes():
        out, (largest, total) = kernel(q, k, v, **how, return_residuals=True)
    # Named here, so that a policy that saves `attention` saves all that the backward pass needs, and the kernel runs only
    # once.
    out, lse = checkpoint_name((out, largest + jnp.log(total)), "attention")
    return out, (q, k, v, starts, out, lse)


def _gradients(scale: float, kept: tuple[Any, ...], d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, starts, out, lse = kept
    how = _how(q, k, v, starts, scale)
    # The kernel takes a row's largest score and its sum of exponentials; lse and 1 give the same weights.
    with _own_sizes():
        gradients = _kernel().vjp((lse, jnp.ones_like(lse)), out, d_out, q, k, v, **how)
    return gradients["q"], gradients["k"], gradients["v"], None


_attend.defvjp(_attend_and_keep, _gradients)


def _kernel() -> Any:
    """Returns the `tokamax.Op` of the forward pass; its `vjp` is the backward pass."""
    # The public module `tokamax.ops.gpu` cannot be imported without jax-triton.
    from tokamax._src.ops.attention import pallas_mosaic_gpu  # pyright: ignore[reportMissingImports]  # an extra

    return pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()


def _how(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array | None, scale: float) -> dict[str, Any]:
    """Returns every argument of both kernels besides the arrays."""
    how = dict(_kernel().bind(q, k, v, logits_scale=scale, is_causal=True).kwargs)
    del how["return_residuals"]
    if starts is not None:
        how["mask"] = dataclasses.replace(how["mask"], k_start=starts[:, None])
    return how


def _own_sizes() -> Any:
    """Selects tiles by tokamax's rule for the shape. It ships tuned tiles for a few shapes and warns about every other."""
    from tokamax import config  # pyright: ignore[reportMissingImports]  # an extra

    return config.ignore_autotuning_cache(True)
