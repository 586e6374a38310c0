"""Attention's kernels beside each other, forward and backward, on the device that jax finds.

    python scripts/bench_attention.py [--head_dims 64,128] [--seq_lens 2048,4096,8192] [--documents 0,1000] [--json FILE]

One layer's attention of 16,384 tokens, 32 query heads over 8 kv heads, random bfloat16, causal; `documents` is their mean
length in tokens, 0 for rows that are one document. Kernels take turns, so that a GPU that slows down slows all; the median
of the rounds is told, and its TFLOP/s of what queries see (forward and backward: 3.5 times forward); spreads between
quartiles are in the JSON. Every output and gradient is compared with the plain form's. Without a GPU, toy sizes prove the
script, and times are not told.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llamajax.config.model import AttentionKernel
from llamajax.config.parallel import MeshConfig
from llamajax.errors import ConfigError
from llamajax.kernels.attention import Mask, attend, with_sight
from llamajax.kernels.choice import Kernel
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec

KERNELS: tuple[Kernel, ...] = ("cudnn", "tokamax", "pallas", "plain")
TOLERANCE = 2e-2


class Size(NamedTuple):
    """Of what is measured, and how often."""

    tokens: int
    heads: int
    kv_heads: int
    rounds: int
    calls: int
    """In a round, one after the other."""


GPU, TOY = Size(16_384, 32, 8, rounds=7, calls=10), Size(128, 2, 1, rounds=1, calls=1)


class Case(NamedTuple):
    """A shape of attention."""

    head_dim: int
    seq_len: int
    document_length: int
    """Mean, tokens; 0: rows are one document."""


def segment_ids(case: Case, rows: int) -> np.ndarray | None:
    """Documents that end by chance [rows, seq_len]; None: every row is one."""
    if not case.document_length:
        return None
    ends = np.random.default_rng(1).random((rows, case.seq_len)) < 1 / case.document_length
    return 1 + np.cumsum(ends, axis=1, dtype=np.int32)


def seen_pairs(ids: np.ndarray | None, rows: int, seq_len: int) -> int:
    """Queries with the keys that they see."""
    if ids is None:
        return rows * seq_len * (seq_len + 1) // 2
    index, begins = np.arange(seq_len), np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return int(np.sum(index - np.maximum.accumulate(np.where(begins, index, 0), axis=1) + 1))


def measure(case: Case, size: Size, *, timed: bool) -> list[dict[str, Any]]:
    """A row for each kernel: its times, or why it has none."""
    rows, rng = max(1, size.tokens // case.seq_len), np.random.default_rng(0)
    heads = (rows, case.seq_len, size.kv_heads)
    shapes = ((*heads, size.heads // size.kv_heads, case.head_dim), (*heads, case.head_dim), (*heads, case.head_dim))

    def drawn(shape: tuple[int, ...]) -> jax.Array:
        values = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        return jax.device_put(values, spec("batch", "seq", "kv_heads", *(None,) * (len(shape) - 3)))

    (q, k, v), d_out, ids = map(drawn, shapes), drawn(shapes[0]), segment_ids(case, rows)
    bare = Mask(segment_ids=None if ids is None else jax.device_put(ids, spec("batch", "seq")))
    found: dict[Kernel, tuple[Callable[..., Any], Callable[..., Any]]] = {}
    told: dict[Kernel, dict[str, Any]] = {kernel: case._asdict() | {"kernel": kernel} for kernel in KERNELS}
    truth: tuple[np.ndarray, ...] | None = None
    for kernel in reversed(KERNELS):  # plain first
        try:
            mask = with_sight(bare, jax.ShapeDtypeStruct(q.shape, q.dtype), kernel=kernel)
        except ConfigError as error:
            told[kernel]["cannot"] = str(error)
            continue

        def forward(
            q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = mask, kernel: AttentionKernel = kernel
        ) -> jax.Array:
            return attend(q, k, v, mask, case.head_dim**-0.5, kernel=kernel)[0]

        forward = jax.jit(forward)
        both = jax.jit(lambda q, k, v, forward=forward: jax.vjp(forward, q, k, v)[1](d_out))
        results = tuple(np.asarray(x, np.float32) for x in (forward(q, k, v), *both(q, k, v)))
        truth = truth or results
        told[kernel]["error"] = max(
            float(np.abs(own - true).max() / np.abs(true).max()) for own, true in zip(results, truth, strict=True)
        )
        found[kernel] = forward, both
    seconds: dict[tuple[Kernel, int], list[float]] = {}
    for _ in range(size.rounds):
        for kernel, functions in found.items():
            for way, function in enumerate(functions):
                seconds.setdefault((kernel, way), []).append(_seconds(function, (q, k, v), size.calls))
    flops = 4 * seen_pairs(ids, rows, case.seq_len) * size.heads * case.head_dim
    for (kernel, way), times in seconds.items() if timed else ():
        name, work = (("forward", flops), ("forward_and_backward", 3.5 * flops))[way]
        quartiles = statistics.quantiles(times, n=4)
        told[kernel] |= {
            f"{name}_s": statistics.median(times), f"{name}_spread_s": quartiles[2] - quartiles[0],
            f"{name}_tflops": work / statistics.median(times) / 1e12,
        }  # fmt: skip
    return list(told.values())


def _seconds(function: Callable[..., Any], arguments: tuple[jax.Array, ...], calls: int) -> float:
    result = jax.block_until_ready(function(*arguments))
    started = time.perf_counter()
    for _ in range(calls):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / calls


def table(rows: list[dict[str, Any]]) -> str:
    """For people: a line each."""
    lines = [f"{'head':>5} {'seq':>6} {'docs':>6}  {'kernel':8} {'error':>8} {'forward':>20} {'forward + backward':>22}"]
    for row in rows:
        where = f"{row['head_dim']:>5} {row['seq_len']:>6} {row['document_length'] or '-':>6}  {row['kernel']:8}"
        if "cannot" in row:
            lines.append(f"{where} {row['cannot']}")
            continue
        times = (
            f"{row[f'{way}_s'] * 1e3:8.3f} ms {row[f'{way}_tflops']:5.0f} TF/s" if f"{way}_s" in row else "not measured"
            for way in ("forward", "forward_and_backward")
        )
        lines.append(f"{where} {row['error']:8.1e} {' '.join(f'{text:>21}' for text in times)}")
    return "\n".join(lines)


def run(cases: list[Case], *, toy: bool) -> list[dict[str, Any]]:
    """All cases, each told as it is done.

    Raises:
        SystemExit: a kernel's results are not the plain form's.
    """
    rows = []
    jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1]))
    for case in cases:
        rows += measure(case, TOY if toy else GPU, timed=not toy)
        text = table(rows[-len(KERNELS) :]).split("\n", 1)
        print(text[1] if len(rows) > len(KERNELS) else "\n".join(text), flush=True)
    for row in rows:
        if row.get("error", 0) > TOLERANCE:
            off = f"{row['error']:.1e} off the plain form, and {TOLERANCE} is allowed"
            raise SystemExit(f"{row['kernel']} is {off}: {row}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("head_dims", "64,128"), ("seq_lens", "2048,4096,8192"), ("documents", "0,1000")):
        parser.add_argument(f"--{name}", default=default, help=f"default: {default}")
    parser.add_argument("--json", type=Path, help="file for the rows and what they were measured with")
    options = parser.parse_args()
    head_dims, seq_lens, documents = (
        [int(n) for n in text.split(",")] for text in (options.head_dims, options.seq_lens, options.documents)
    )
    toy = jax.default_backend() != "gpu"
    if toy:
        print("no GPU: toy sizes, and no times")
        seq_lens, documents = [64], [n and 16 for n in documents]
    cases = [Case(head_dim, seq_len, length) for head_dim in head_dims for seq_len in seq_lens for length in documents]
    rows = run(cases, toy=toy)
    if options.json is not None:
        facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "toy": toy}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
