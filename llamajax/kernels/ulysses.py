"""Attention by DeepSpeed-Ulysses (arXiv:2309.14509): devices that split rows exchange tokens for heads, attend to whole rows
of their heads, and exchange the results back."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from llamajax.config.parallel import axes_of
from llamajax.kernels import cudnn, pallas, plain, tokamax_kernel
from llamajax.kernels.choice import Kernel
from llamajax.kernels.plain import Keys, LogSumExp, Mask, Queries
from llamajax.parallel.sharding import spec


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    scale: float,
    *,
    kernel: Kernel,
    interpret: bool = False,
    with_lse: bool = False,
) -> tuple[Queries, LogSumExp | None]:
    """Same contract as `llamajax.kernels.attention.attend`; a device's query heads must be divisible by the sequence axis.

    Kv heads that are not divisible are repeated until they are, each for an equal part of its query heads. No other exchange
    sends less: where every device needs a head, every device must receive its whole rows.

    Args:
        q: see `attention.attend`.
        k: see `attention.attend`.
        v: see `attention.attend`.
        mask: see `attention.attend`.
        scale: see `attention.attend`.
        kernel: kernel that computes attention.
        interpret: see `llamajax.kernels.pallas.attend_to_rows`.
        with_lse: see `attention.attend`; cuDNN and tokamax have none.
    """
    q_spec, kv_spec = spec("batch", "seq", "kv_heads", None, "head_dim"), spec("batch", "seq", "kv_heads", "head_dim")
    if kernel in ("pallas", "triton") and mask.sight is None:
        mask = pallas.see(mask, q.shape[1], q.shape[-1], "ulysses")
    if kernel == "tokamax" and mask.starts is None:
        mask = tokamax_kernel.see(mask)
    # The part of the mask that the kernel reads.
    seen = {"plain": mask.segment_ids, "pallas": mask.sight, "triton": mask.sight, "tokamax": mask.starts, "cudnn": None}[
        kernel
    ]
    in_specs = q_spec, kv_spec, kv_spec, jax.tree.map(lambda x: jax.typeof(x).sharding.spec, seen)
    out_specs = q_spec, spec("batch", "seq", "kv_heads", None)

    # Calls of kernels do not say over which axes their results vary.
    @partial(jax.shard_map, in_specs=in_specs, out_specs=out_specs, check_vma=kernel == "plain")
    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, seen: Any) -> tuple[jax.Array, jax.Array | None]:
        (b, t, K, G, H), axes = q.shape, axes_of("seq")
        num_devices = jax.lax.axis_size(axes)
        repeats = num_devices // math.gcd(K, num_devices)
        to_heads = partial(jax.lax.all_to_all, axis_name=axes, split_axis=2, concat_axis=1, tiled=True)
        to_tokens = partial(jax.lax.all_to_all, axis_name=axes, split_axis=1, concat_axis=2, tiled=True)

        def repeated(x: jax.Array) -> jax.Array:
            # Widened, so that the gradients of repeated heads add up in fp32; sent narrow.
            return jnp.repeat(x.astype(jnp.float32), repeats, axis=2).astype(x.dtype) if repeats > 1 else x

        q = to_heads(q.reshape(b, t, K * repeats, G // repeats, H))
        k, v = to_heads(repeated(k)), to_heads(repeated(v))
        # Named, so that a layer that is recomputed for its backward pass does not repeat the exchange.
        q, k, v = checkpoint_name((q, k, v), "exchanged")
        match kernel:
            case "cudnn":
                out, lse = cudnn.attend_to_rows(q, k, v, window=mask.window, scale=scale), None
            case "pallas" | "triton":
                how = {"window": mask.window, "scale": scale, "interpret": interpret}
                out, lse = pallas.attend_to_rows(q, k, v, seen, **how, language=kernel)
            case "tokamax":
                out, lse = tokamax_kernel.attend_to_rows(q, k, v, seen, window=mask.window, scale=scale), None
            case "plain":
                ids = None if seen is None else plain.whole_rows(seen)
                rows = Mask(window=mask.window, segment_ids=ids)
                out, lse = plain.attend_to_rows(q, k, v, rows, scale, first=0, kv_segment_ids=ids, with_lse=with_lse)
                out = checkpoint_name(out, "attention")
        out = checkpoint_name(to_tokens(out), "exchanged")
        return out.reshape(b, t, K, G, H), None if lse is None else to_tokens(lse).reshape(b, t, K, G)

    return on_device(q, k, v, seen)
