"""Attention in one fused kernel, NVIDIA cuDNN, as jax offers it. Scores never reach the GPU's memory."""

from functools import partial
from typing import Any

import jax

from llamajax.errors import EnvironmentMismatchError
from llamajax.kernels.plain import Keys, Queries
from llamajax.parallel.sharding import spec


def workspace_bytes(batch: int, heads: int, kv_heads: int, seq_len: int, head_dim: int) -> int:
    """Returns the device memory that cuDNN's backward pass needs while it runs, besides its arguments and results.

    XLA can ask cuDNN for it only on a GPU. The gradient of the queries is summed in fp32, with one more fp32 number per
    query and head (cudnn-frontend, node/scaled_dot_product_flash_attention.h: `dQ_accum`, `softmax_sum`). Where query heads
    share keys and values, cuDNN first writes the gradients of the keys and values for every query head, in 16 bits (same
    file, `dK_fullhead` and `dV_fullhead`, which the kernels keep in memory before they sum the heads).

    Args:
        batch: rows on the device.
        heads: query heads on the device.
        kv_heads: key/value heads on the device.
        seq_len: tokens per row.
        head_dim: width of a head.
    """
    per_query = 4 * head_dim + 4 + (2 * 2 * head_dim if kv_heads < heads else 0)
    return batch * heads * seq_len * per_query


def is_kernel(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy for `jax.checkpoint` that saves the forward results that the kernel's backward pass reads."""
    return primitive.name.startswith("dot_product_attention_fwd")


def attend(q: Queries, k: Keys, v: Keys, window: int | None, scale: float) -> Queries:
    """Same contract as `llamajax.kernels.attention.attend`, for sites without an `llamajax.kernels.choice.obstacle`.

    Raises:
        EnvironmentMismatchError: cuDNN is not installed.
    """
    q_spec, kv_spec = spec("batch", "seq", "kv_heads", None, "head_dim"), spec("batch", "seq", "kv_heads", "head_dim")
    on_device = partial(attend_to_rows, window=window, scale=scale)
    # jax's cuDNN calls do not say over which axes their results vary.
    return jax.shard_map(on_device, in_specs=(q_spec, kv_spec, kv_spec), out_specs=q_spec, check_vma=False)(q, k, v)


def attend_to_rows(q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None, scale: float) -> jax.Array:
    """Computes `attend` for whole rows on one device, within `shard_map`."""
    b, t, K, G, H = q.shape
    try:
        out = jax.nn.dot_product_attention(
            q.reshape(b, t, K * G, H),
            k,
            v,
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        raise EnvironmentMismatchError(
            "cuDNN, which computes attention, was not found; install nvidia-cudnn-cu13, or set model.attention_kernel: plain"
        ) from error
    return out.reshape(q.shape)
