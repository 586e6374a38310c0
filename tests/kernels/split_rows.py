"""Attention of random rows in each form, for tests to compare: outputs, log-sum-exps and gradients, in the rows' order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamajax.config.model import AttentionKernel
from llamajax.config.parallel import MeshConfig, SequenceForm
from llamajax.kernels.attention import Mask, attend
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec

SCALE = 0.4
NAMES = ("out", "lse", "d_q", "d_k", "d_v")


def zigzag(num_devices: int, length: int) -> np.ndarray:
    """Index in the row of what lies at each place: chunk after chunk, device after device."""
    chunks = np.arange(length).reshape(2 * num_devices, -1)
    return np.concatenate([chunks[[device, -1 - device]].ravel() for device in range(num_devices)])


@functools.cache
def results(
    form: SequenceForm,
    *,
    data: int = 1,
    fsdp: int = 1,
    sequence: int = 1,
    tensor: int = 1,
    T: int = 32,
    K: int = 2,
    G: int = 2,
    window: int | None = None,
    packed: bool = True,
    dtype: str = "float32",
    kernel: AttentionKernel = "auto",
) -> dict[str, np.ndarray]:
    """Returns results by `NAMES`, of two rows with heads of four numbers, for random gradients of `out` and `lse`."""
    sizes: dict[str, Any] = {"data": data, "fsdp": fsdp, "sequence": sequence, "tensor": tensor}
    jax.set_mesh(make_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))]))
    order = zigzag(sequence, T) if form == "ring" else np.arange(T)
    rng, heads = np.random.default_rng(0), ("kv_heads", None, None)

    def on_mesh(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        values = rng.standard_normal(shape, np.float32)[:, order]
        return jax.device_put(jnp.asarray(values, dtype), spec("batch", "seq", *heads[: len(shape) - 2]))

    q, k, v = on_mesh((2, T, K, G, 4), dtype), on_mesh((2, T, K, 4), dtype), on_mesh((2, T, K, 4), dtype)
    d_out, d_lse = on_mesh((2, T, K, G, 4), "float32"), on_mesh((2, T, K, G), "float32")
    ids = np.cumsum(rng.random((2, T)) < 0.15, axis=1).astype(np.int32)[:, order]
    mask = Mask(window=window, segment_ids=jax.device_put(ids, spec("batch", "seq")) if packed else None)

    def weighted(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, lse = attend(q, k, v, mask, SCALE, kernel=kernel, sequence=form, with_lse=True)
        assert lse is not None
        assert (out.dtype, lse.dtype) == (dtype, "float32")
        assert jax.typeof(out).sharding == jax.typeof(q).sharding
        return jnp.sum(out.astype(jnp.float32) * d_out) + jnp.sum(lse * d_lse), (out, lse)

    (_, outs), gradients = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    back = np.argsort(order)
    return {name: np.asarray(x, np.float32)[:, back] for name, x in zip(NAMES, (*outs, *gradients), strict=True)}


def check(form: SequenceForm, axes: dict[str, int], **case: Any) -> None:
    """Checks that the form on a mesh equals one device, to 1e-5 in fp32."""
    own, one = results(form, **axes, **case), results("gather", **case | {"kernel": "plain"})
    for name in NAMES:
        np.testing.assert_allclose(own[name], one[name], rtol=0, atol=1e-5, err_msg=name)


def check_bf16(form: SequenceForm, **how: Any) -> None:
    """Checks that the form on four devices is about as near to fp32 as gathered keys and values are."""
    case: dict[str, Any] = {"T": 64, "K": 2, "G": 4}
    exact = results("gather", **case)
    own = results(form, sequence=4, dtype="bfloat16", **case, **how)
    gathered = results("gather", sequence=4, dtype="bfloat16", **case)
    for name in NAMES:
        far, allowed = (float(np.sqrt(np.mean((x[name] - exact[name]) ** 2))) for x in (own, gathered))
        assert far <= 1.25 * allowed, name
