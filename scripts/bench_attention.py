"""Compares the attention kernels on one GPU, forward and backward.

    python scripts/bench_attention.py [--head_dims 64,128] [--seq_lens 2048,4096,8192] [--documents 0,1000] [--rows 0,1]
                                       [--json FILE]

Measures one layer's causal attention of 16,384 tokens, with 32 query heads over 8 kv heads and random bfloat16 numbers.
`documents` is the mean length of documents in tokens; 0 makes each row one document. `rows` is the number of rows; 0 chooses
as many as give those tokens. One row gives a GPU few programs. Kernels are called as training calls them
(`model.attention_kernel`) and alternate in order (A B B A). For each pass alone the table shows the median of the rounds in
ms; `spread`, the distance of their quartiles as a share of the median; `of best`, the speed as a share of the fastest
kernel's; `tflops`, counting the keys that queries see, and a backward pass as 2.5 forward passes; and `peak`, the memory
that the pass's program needs.

Exit code 1: a kernel failed, or its output or gradients differ from XLA's `plain` form. `--toy` runs all this on a CPU.
"""

import argparse
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a machine where llamajax is not installed

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from llamajax.kernels import choice
from llamajax.kernels.attention import Mask, attend, with_sight
from llamajax.kernels.choice import Kernel, Site, compute_capability, is_on_gpu
from llamajax.parallel.sharding import spec
from llamajax.processes.exit import end_with
from llamajax.units import format_bytes
from scripts.bench import compare
from scripts.bench.compare import Rounds, several_numbers, take_turns

KERNELS: tuple[Kernel, ...] = ("plain", "pallas", "cudnn", "tokamax", "triton")
PASSES = {"forward": 1.0, "backward": 2.5}
"""Passes with the number of their products, relative to the forward pass."""
TOLERANCE = 2e-2  # for bfloat16 results, as a share of the largest number


class Size(NamedTuple):
    """Size of the measurement and its repetitions."""

    tokens: int
    heads: int
    kv_heads: int
    rounds: Rounds


GPU, TOY = Size(16_384, 32, 8, compare.GPU), Size(128, 2, 1, compare.TOY)


class Case(NamedTuple):
    """Shape of attention."""

    head_dim: int
    seq_len: int
    document_length: int
    """Mean length in tokens; 0: each row is one document."""
    rows: int = 0
    """Number of rows; 0: as many as give the tokens of `Size`."""

    def __str__(self) -> str:
        documents = f"documents of {self.document_length:,}" if self.document_length else "one document each"
        number = f"{self.rows} row{'s' if self.rows > 1 else ''}" if self.rows else "rows"
        return f"heads of {self.head_dim}, {number} of {self.seq_len:,}, {documents}"


def segment_ids(case: Case, rows: int) -> np.ndarray | None:
    """Returns ids of documents with random ends [rows, seq_len]; None if each row is one document."""
    if not case.document_length:
        return None
    ends = np.random.default_rng(1).random((rows, case.seq_len)) < 1 / case.document_length
    return 1 + np.cumsum(ends, axis=1, dtype=np.int32)


def seen_pairs(ids: np.ndarray | None, rows: int, seq_len: int) -> int:
    """Returns the number of pairs of a query and a key that it sees."""
    if ids is None:
        return rows * seq_len * (seq_len + 1) // 2
    index, begins = np.arange(seq_len), np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return int(np.sum(index - np.maximum.accumulate(np.where(begins, index, 0), axis=1) + 1))


def obstacle(kernel: Kernel, case: Case) -> str | None:
    """Returns the reason that a kernel cannot compute the case here; None if it can."""
    if kernel in ("tokamax", "triton") and importlib.util.find_spec(kernel) is None:
        return "not installed"
    is_packed, capability = case.document_length > 0, compute_capability()
    site = Site(is_on_gpu(), "bfloat16", case.head_dim, is_packed, "gather", False, capability=capability)
    return choice.obstacle(kernel, site)


def compiled(kernel: Kernel, mask: Mask, heads: tuple[Any, Any, Any], d_out: Any) -> dict[str, jax.stages.Compiled]:
    """Compiles three programs; arrays may be given as shapes.

    `forward` takes q, k, v and the mask with its sight. `keep` takes the same and returns the residuals of the backward
    pass. `backward` takes these and the output's gradient.
    """

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
        return attend(q, k, v, mask, q.shape[-1] ** -0.5, kernel=kernel)[0]

    def keep(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> Callable[[jax.Array], Any]:
        return jax.vjp(lambda q, k, v: forward(q, k, v, mask), q, k, v)[1]

    kept = jax.jit(keep).lower(*heads, mask)
    programs = {"keep": kept, "forward": jax.jit(forward).lower(*heads, mask)}
    programs["backward"] = jax.jit(lambda pull_back, d_out: pull_back(d_out)).lower(kept.out_info, d_out)
    return {name: program.compile() for name, program in programs.items()}


def measure(case: Case, size: Size, *, timed: bool) -> list[dict[str, Any]]:
    """Returns a row for each kernel: its `error`, and time and memory of both passes; or why it `cannot` or is `wrong`."""
    rows = case.rows or max(1, size.tokens // case.seq_len)
    of_keys, ids = (rows, case.seq_len, size.kv_heads, case.head_dim), segment_ids(case, rows)
    of_queries = (*of_keys[:3], size.heads // size.kv_heads, case.head_dim)
    q, k, v, d_out = (_random(shape, seed) for seed, shape in enumerate((of_queries, of_keys, of_keys, of_queries)))
    mask = Mask(segment_ids=None if ids is None else jax.device_put(ids, spec("batch", "seq")))
    told: dict[Kernel, dict[str, Any]] = {kernel: case._asdict() | {"kernel": kernel} for kernel in KERNELS}
    calls: dict[tuple[Kernel, str], Callable[[], Any]] = {}
    made: dict[tuple[Kernel, str], jax.stages.Compiled] = {}
    truth: list[np.ndarray] = []
    for kernel, row in told.items():
        if reason := obstacle(kernel, case):
            row["cannot"] = reason
            continue
        try:
            seen = jax.jit(partial(with_sight, kernel=kernel))(mask, q)
            programs = compiled(kernel, seen, (q, k, v), d_out)
            backward = partial(programs["backward"], programs["keep"](q, k, v, seen), d_out)
            both = {"forward": partial(programs["forward"], q, k, v, seen), "backward": backward}
            results = [np.asarray(x, np.float32) for way in PASSES for x in jax.tree.leaves(both[way]())]
        except compare.REFUSALS as error:
            row["wrong"] = compare.reason(error)
            continue
        truth = results if kernel == "plain" else truth
        if truth:
            off = [np.abs(own - true).max() / np.abs(true).max() for own, true in zip(results, truth, strict=True)]
            row["error"] = float(np.max(off))
            if not row["error"] <= TOLERANCE:
                row["wrong"] = f"off the plain form by more than {TOLERANCE}"
                continue
        made |= {(kernel, way): programs[way] for way in PASSES}
        calls |= {(kernel, way): call for way, call in both.items()}
    flops = 4 * seen_pairs(ids, rows, case.seq_len) * size.heads * case.head_dim
    taken = take_turns(calls, size.rounds)
    for (kernel, way), seconds in taken.items() if timed else ():
        low, median, high = statistics.quantiles(seconds, n=4)
        best = min(statistics.median(times) for (_, other), times in taken.items() if other == way)
        memory: Any = made[kernel, way].memory_analysis()
        told[kernel] |= {
            f"{way}_ms": 1e3 * median, f"{way}_spread": (high - low) / median, f"{way}_of_best": best / median,
            f"{way}_tflops": PASSES[way] * flops / median / 1e12, f"{way}_peak": memory.peak_memory_in_bytes,
        }  # fmt: skip
    return list(told.values())


def _random(shape: tuple[int, ...], seed: int) -> jax.Array:
    lies = spec("batch", "seq", "kv_heads", *(None,) * (len(shape) - 3))
    return jax.device_put(jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), lies)


_FORMS: dict[str, Callable[[Any], str]] = {"error": "{:.1e}".format}
for _way in PASSES:
    _FORMS |= {f"{_way}_ms": "{:.3f}".format, f"{_way}_spread": "{:.1%}".format, f"{_way}_of_best": "{:.0%}".format}
    _FORMS |= {f"{_way}_tflops": "{:.0f}".format, f"{_way}_peak": format_bytes}


def table(rows: Sequence[compare.Row]) -> Table:
    """Formats the table of one case."""
    return compare.table(rows, _FORMS, Case._fields)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Case]]:
    """Parses the command line into options and cases. Exits with code 2 on mistakes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="run on a CPU: rows of 64 tokens, documents of 16, no times")
    parser.add_argument("--head_dims", type=several_numbers(1, 256), help="default: 64,128", default="64,128")
    parser.add_argument("--seq_lens", type=several_numbers(1, 2**20), help="tokens per row; default: 2048,4096,8192")
    parser.add_argument(
        "--documents",
        type=several_numbers(0, 2**20),
        help="mean tokens per document, 0: one document per row; default: 0,1000",
    )
    parser.add_argument(
        "--rows", type=several_numbers(0, 2**20), help="number of rows, 0: as many as give 16,384 tokens; default: 0,1"
    )
    parser.add_argument("--json", help="file for all results")
    found = parser.parse_args(arguments)
    if found.toy and (found.seq_lens or found.documents):
        parser.error("--toy sets its own rows and documents; leave out --seq_lens and --documents")
    seq_lens = found.seq_lens or ((64,) if found.toy else (2048, 4096, 8192))
    documents = found.documents or ((0, 16) if found.toy else (0, 1000))
    rows = found.rows or ((0,) if found.toy else (0, 1))
    return found, list(itertools.starmap(Case, itertools.product(found.head_dims, seq_lens, documents, rows)))


def main(arguments: Sequence[str]) -> int:
    """Measures. Returns the exit code: 1 if a kernel is wrong."""
    options, cases = parse(arguments)
    size = TOY if options.toy else GPU
    return compare.compare(
        options, cases, lambda case, _: measure(case, size, timed=not options.toy), table, untimed="times and memory"
    )


if __name__ == "__main__":
    end_with(lambda: main(sys.argv[1:]))
