"""Attention in one kernel: NVIDIA cuDNN's, as jax offers it. Scores never reach the GPU's memory.

The plain form beside it is `llamajax.model.attention.attend`.
"""

from functools import partial

import jax
import jax.numpy as jnp

from llamajax.errors import EnvironmentMismatchError
from llamajax.sharding import TABLE, spec

MAX_HEAD_DIM = 128
"""Widest head that cuDNN takes on every GPU with bfloat16; Hopper's would go to 256."""
_PLATFORMS = ("gpu", "cuda")


def obstacle(q: jax.Array | jax.ShapeDtypeStruct, segment_ids: jax.Array | jax.ShapeDtypeStruct | None) -> str | None:
    """Why cuDNN cannot do this attention on the devices of the current mesh; None if it can.

    Args:
        q: [B, T, K, G, H] queries.
        segment_ids: int32 [B, T], or None if every row is one document.
    """
    mesh = jax.sharding.get_abstract_mesh()
    head_dim = q.shape[-1]
    if mesh.abstract_device is None or mesh.abstract_device.platform not in _PLATFORMS:
        return "it needs NVIDIA GPUs"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"model.compute_dtype is {q.dtype}, and it takes bfloat16 and float16"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"model.head_dim is {head_dim}, and it takes multiples of 8 up to {MAX_HEAD_DIM}"
    if segment_ids is not None:
        return "documents of one row are closed to each other; model.attend_across_documents opens them"
    if any(mesh.shape[axis] > 1 for axis in TABLE.seq):
        return "mesh.sequence splits the rows, and its causal mask begins with the row"
    return None


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    """Causal attention, as `llamajax.model.attention.attend` without segments; only where there is no `obstacle`.

    Args:
        q: [B, T, K, G, H] queries by the kv head they share, sharded ("batch", "seq", "kv_heads", None, "head_dim").
        k: [B, T, K, H] keys, sharded ("batch", "seq", "kv_heads", "head_dim").
        v: [B, T, K, H] values, likewise.
        window: newest keys, its own included, that a query sees; None: all.

    Returns:
        [B, T, K, G, H] of q's dtype and sharding; scores and softmax are fp32.

    Raises:
        EnvironmentMismatchError: cuDNN is not installed.
    """
    q_spec, kv_spec = spec("batch", "seq", "kv_heads", None, "head_dim"), spec("batch", "seq", "kv_heads", "head_dim")
    # jax's cuDNN calls do not say over which axes their results vary.
    return jax.shard_map(
        partial(_on_device, window=window), in_specs=(q_spec, kv_spec, kv_spec), out_specs=q_spec, check_vma=False
    )(q, k, v)


def _on_device(q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None) -> jax.Array:
    b, t, K, G, H = q.shape
    try:
        out = jax.nn.dot_product_attention(
            q.reshape(b, t, K * G, H),
            k,
            v,
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
