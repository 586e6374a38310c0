"""Programs that measure a GPU's constants, and the loop that repeats each of them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llamajax.config.file import load_config
from llamajax.config.run import Config
from llamajax.kernels import cudnn, grouped_pallas, pallas, tokamax_kernel
from llamajax.kernels.choice import Site, obstacle
from llamajax.parallel.dispatch import Groups
from llamajax.planning.cost.attention import Scores, computed_scores
from llamajax.planning.cost.experts import Loads
from llamajax.step.resolve import resolve_planned
from scripts.checkout import ROOT

Device = Literal["gpu", "cpu"]


class Sizes(NamedTuple):
    """How much is measured: rows of square matrices, and elements of every array whose bytes count; and for how many
    seconds: a loop, all loops before anything counts (a busy GPU lowers its clocks), and all that do."""

    square: int
    elements: int
    loop_s: float
    warm_s: float
    measured_s: float


SIZES = {"gpu": Sizes(8192, 2**28, 0.2, 3.0, 6.0), "cpu": Sizes(512, 2**20, 0.02, 0.1, 0.3)}
Work = Callable[..., Any]
Shapes = list[jax.ShapeDtypeStruct]


def many_kernels(x: jax.Array) -> jax.Array:
    """Runs 32 kernels that move almost no data."""
    for _ in range(32):
        x = lax.optimization_barrier(1 - x)
    return x


def adamw(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes an elementwise update of [N] float32."""
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return p - 1e-3 * (m * lax.rsqrt(jnp.abs(v) + 1e-8) + 0.1 * p), m, v


def rms_norm(x: jax.Array) -> jax.Array:
    """Computes the RMS norm of rows [T, D] bfloat16, for reductions."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


ATTENTION = {
    "model.head_dim": 128, "model.attend_across_documents": True, "data.seq_len": 4096, "mesh.fsdp": 1,
    "hardware.gpus_per_node": 1,
}  # fmt: skip
"""Changes to the shipped configuration for measuring attention: whole rows of 4,096 tokens."""


def by_cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return cudnn.attend_to_rows(q, k, v, window=None, scale=q.shape[-1] ** -0.5)


def by_pallas(q: jax.Array, k: jax.Array, v: jax.Array, *, interpret: bool = False) -> jax.Array:
    sight = pallas.sight(q.shape[1], k.shape[1], q.shape[-1])
    return pallas.attend_to_rows(q, k, v, sight, window=None, scale=q.shape[-1] ** -0.5, interpret=interpret)[0]


def and_gradients(attention: Work, q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
    """Both passes."""
    out, pull_back = jax.vjp(attention, q, k, v)
    return out, pull_back(d_out)


def by_tokamax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return tokamax_kernel.attend_to_rows(q, k, v, None, window=None, scale=q.shape[-1] ** -0.5)


EXPERTS, GROUPED_ROWS = 16, 32_768
"""Experts and tokens of the grouped products that are measured, which have the widths of Qwen3-30B-A3B."""


def random_groups(num_experts: int, num_rows: int) -> Groups:
    """Returns groups of all rows, in random order. Their sizes are uneven, so tiles are shared as in training."""
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(num_rows, np.full(num_experts, 1 / num_experts)).astype(np.int32)
    order = rng.permutation(num_rows).astype(np.int32)
    place = np.argsort(order).astype(np.int32)
    return Groups(*map(jnp.asarray, (order, sizes, np.ones(num_rows, bool), place)))


def by_grouped(x: jax.Array, w: jax.Array, d: jax.Array, *, interpret: bool = False) -> Any:
    """Computes the products of tokens [R, K] with their expert's matrix [E, K, N], and both gradients."""
    groups = random_groups(len(w), len(x))
    products = partial(grouped_pallas.times, groups=groups, interpret=interpret)
    gradient = grouped_pallas.weight_gradients(x, d, groups, "x", interpret=interpret)
    return products(x, w, named="x"), products(d, w, named="out", transposed=True), gradient


class AttentionShape(NamedTuple):
    """Shape of attention over whole rows on one device."""

    seq_len: int
    kv_heads: int
    queries_per_kv_head: int
    head_dim: int


SMALL_GRIDS = {
    "1B, row of 4,096": AttentionShape(4096, 8, 4, 64),
    "8B, row of 4,096": AttentionShape(4096, 8, 4, 128),
    "70B on tensor 8, row of 8,192": AttentionShape(8192, 1, 8, 128),
}
"""Shapes of attention with few programs in one row."""
MANY_ROWS = 16
"""Number of rows that keep every core busy until the end, with the heads of each shape."""
PASSES: dict[str, tuple[Work, int]] = {"forward": (by_pallas, 3), "both passes": (partial(and_gradients, by_pallas), 4)}
"""Computation of each pass, and the number of its arguments."""


def arguments_of(shape: AttentionShape, rows: int) -> Shapes:
    """Returns queries, keys, values, and the gradient of the output."""
    of_keys = rows, shape.seq_len, shape.kv_heads, shape.head_dim
    of_queries = *of_keys[:3], shape.queries_per_kv_head, shape.head_dim
    return [jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in (of_queries, of_keys, of_keys, of_queries)]


def scores_of(shape: AttentionShape) -> Scores | None:
    """Returns the share of such scores that llamajax's own kernels compute."""
    sizes = {"data.seq_len": shape.seq_len, "model.head_dim": shape.head_dim}
    return computed_scores(resolve_planned(shipped().changed(ATTENTION | sizes | {"model.attention_kernel": "pallas"})))


def scores_behind(constant: str) -> Scores | None:
    """Returns the scores that the attention kernel of this constant computes; None: there is none, or its calls
    themselves tell what they compute."""
    kernel, *_ = constant.split("_")
    if kernel not in ("pallas", "tokamax"):
        return None
    return computed_scores(resolve_planned(shipped().changed(ATTENTION | {"model.attention_kernel": kernel})))


FULL = Loads(mean=(1.0,), busiest=(1.0,), header=0.0)
"""Loads of experts where every place has a row, as in `by_grouped`."""


def shipped() -> Config:
    """Returns the configuration of Llama-3.2 1B."""
    return load_config(ROOT / "configs" / "llama3_2_1b_8xh100.yaml")


def programs(device: Device, capability: tuple[int, ...] | None) -> dict[str, list[tuple[Work, Shapes]]]:
    """Returns the program that measures each constant, in this order: some need the constants before them. `capability` is
    the device's version of CUDA's architectures."""
    sizes, fp32, bf16 = SIZES[device], *(partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16))
    rows, square = bf16((sizes.elements // 2048, 2048)), bf16((sizes.square, sizes.square))
    rows_of = 4, ATTENTION["data.seq_len"], 8
    everywhere: dict[str, list[tuple[Work, Shapes]]] = {
        "kernel_s": [(many_kernels, [fp32((1024,))])],
        "memory_efficiency": [(adamw, [fp32((sizes.elements,))] * 4), (rms_norm, [rows])],
        "matmul_efficiency": [(jnp.matmul, [square] * 2)],
    }
    if device == "cpu":
        return everywhere
    kernels = {"attention": by_cudnn, "pallas": by_pallas}
    if obstacle("tokamax", Site(True, "bfloat16", 128, False, "gather", False, capability=capability)) is None:
        kernels["tokamax"] = by_tokamax
    heads = [*((kernel, attention, 128) for kernel, attention in kernels.items()), ("attention_64", by_cudnn, 64)]
    for name, attention, head_dim in heads:
        q, k = bf16((*rows_of, 4, head_dim)), bf16((*rows_of, head_dim))  # Llama-3's heads: four queries to a key
        everywhere[f"{name}_efficiency"] = [(attention, [q, k, k])]
        everywhere[f"{name}_backward_efficiency"] = [(partial(and_gradients, attention), [q, k, k, q])]
    rows_and_matrices = bf16((GROUPED_ROWS, 2048)), bf16((EXPERTS, 2048, 1536)), bf16((GROUPED_ROWS, 1536))
    everywhere["grouped_efficiency"] = [(by_grouped, list(rows_and_matrices))]
    return everywhere


def repeated(work: Work, count: int, *arguments: jax.Array) -> Any:
    """Returns the last of `count` results of `work`. The sign of each result enters all arguments of the next call, so XLA
    can neither drop a call nor move it out of the loop."""

    def again(_: int, carried: tuple[Any, Any]) -> tuple[Any, Any]:
        sign = jnp.sign(jax.tree.leaves(carried[1])[0].ravel()[0])
        marked = [
            lax.dynamic_update_slice(x, sign.astype(x.dtype).reshape((1,) * x.ndim), (0,) * x.ndim) for x in carried[0]
        ]
        return marked, work(*marked)

    return lax.fori_loop(1, count, again, (list(arguments), work(*arguments)))[1]


def random(shapes: Shapes) -> list[jax.Array]:
    """Returns normally distributed numbers, because zeros cost a GPU less."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True)]
