"""Measures the products and the attention of a model alone, in jax and llamajax's kernels on this device."""

from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp

from llamajax.config.model import AttentionKernel
from llamajax.errors import UserError
from llamajax.kernels.attention import Mask, attend, with_sight
from llamajax.kernels.choice import Kernel
from llamajax.parallel import startup
from llamajax.parallel.sharding import spec
from scripts.bench.case import PASSES, Case, Choice
from scripts.bench.child import Task, fastest


def ceiling(task: Task) -> dict[str, Any]:
    """Returns `gemms`, seconds per token of each product; `attention`, seconds per row and layer of each kernel, forward and
    backward; and `unavailable`, kernels that cannot run, with the reason."""
    case = task.case
    startup.start(case.config(Choice(micro_batch=case.rows, remat="none")))
    return {"gemms": _gemms(case)} | _attention(case)


def _random(shape: tuple[int, ...], names: tuple[str | None, ...], seed: int) -> jax.Array:
    return jax.device_put(jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), spec(*names))


def _gemms(case: Case) -> dict[str, float]:
    found, tokens = {}, case.gemm_tokens
    for name, (width, out, _) in case.gemms().items():
        shapes = (tokens, width), (width, out), (tokens, out)
        x, w, d_y = (_random(shape, (None, None), seed) for seed, shape in enumerate(shapes))
        products = (("ti,io->to", x, w), ("to,io->ti", d_y, w), ("ti,to->io", x, d_y))
        for which, (subscripts, left, right) in zip(PASSES, products, strict=True):
            call = partial(jax.jit(partial(jnp.einsum, subscripts)), left, right)
            found[f"{name}, {which}"] = fastest(call, jax.block_until_ready) / tokens
    return found


def _attention(case: Case) -> dict[str, dict[str, Any]]:
    """Measures every kernel that `model.attention_kernel` can name and that makes sense on a GPU."""
    model, B, T = case.network, case.rows, case.seq_len
    K, H, G = model.num_kv_heads, model.head_dim, model.num_heads // model.num_kv_heads
    ids = jax.device_put(case.batch(0)["segment_ids"], spec("batch", "seq")) if case.packed else None
    heads = ("batch", "seq", "kv_heads", None, "head_dim"), ("batch", "seq", "kv_heads", "head_dim")
    q, d_out = (_random((B, T, K, G, H), heads[0], seed) for seed in (0, 3))
    k, v = (_random((B, T, K, H), heads[1], seed) for seed in (1, 2))
    kernels: tuple[Kernel, ...] = tuple(kernel for kernel in get_args(Kernel) if (kernel == "plain") == case.is_toy)
    found: dict[str, dict[str, Any]] = {"attention": {}, "unavailable": {}}
    for kernel in kernels:
        try:
            mask = with_sight(Mask(segment_ids=ids), jax.ShapeDtypeStruct(q.shape, q.dtype), kernel=kernel)

            def forward(
                q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = mask, kernel: AttentionKernel = kernel
            ) -> jax.Array:
                return attend(q, k, v, mask, H**-0.5, kernel=kernel)[0]

            both = jax.jit(lambda q, k, v, d_out, forward=forward: jax.vjp(forward, q, k, v)[1](d_out))
            found["attention"][kernel] = fastest(partial(both, q, k, v, d_out), jax.block_until_ready) / B
        except (UserError, jax.errors.JaxRuntimeError, NotImplementedError) as error:
            found["unavailable"][kernel] = str(error).partition("\n")[0][:200]
    return found
