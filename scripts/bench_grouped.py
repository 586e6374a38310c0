"""Compares the kernels that multiply tokens by their experts' matrices on one GPU, forward and backward.

    python scripts/bench_grouped.py [--models qwen3_30b_a3b,mixtral_8x7b] [--rows 128,512,2048,8192] [--json FILE]

Measures one layer's experts, the products into their hidden layers and out of them with SwiGLU between, with random
bfloat16 numbers: the 16 experts of Qwen3-30B-A3B that a GPU among eight has, and Mixtral's eight on one GPU. `rows` is the
mean number of tokens per expert; every expert has another number, and tokens lie in random order. `dense` is one expert that
computes as many tokens, by XLA's own products. Kernels are called as training calls them (`model.experts.kernel`) and
alternate in order (A B B A). For each pass alone the table shows the median of the rounds in ms; `spread`, the distance of
their quartiles as a share of the median; `tflops`; `of peak`, their share of the data sheet's 16-bit peak, for float8 too;
and `of dense`, the speed as a share of `dense`. A backward pass has twice the products.

Exit code 1: a kernel failed, or its results or gradients differ from the definition. `--toy` runs all this on a CPU.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a machine where llamajax is not installed

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from rich.table import Table

from llamajax.estimates.gpus import find_gpu
from llamajax.kernels.choice import GroupedSite, compute_capability, grouped_obstacle, is_on_gpu
from llamajax.kernels.grouped import experts_on_rows
from llamajax.kernels.grouped_pallas import padded
from llamajax.parallel.dispatch import Groups
from llamajax.parallel.float8 import E4M3, LEAST_CAPABILITY, Float8, rounded
from llamajax.processes.exit import end_with
from scripts.bench import compare
from scripts.bench.compare import Rounds, several_numbers, take_turns
from scripts.bench_gpu import several

KERNELS = ("dense", "pallas", "pallas float8", "tokamax", "plain")
PASSES = {"forward": 1, "backward": 2}
"""Passes with the number of their products, relative to the forward pass."""
TOLERANCE = {"bfloat16": 2e-2, "float8": 0.15}
"""Largest error, as a share of the norm of the exact array."""


class Shape(NamedTuple):
    """Shape of a layer's experts on one device."""

    experts: int
    width: int
    hidden: int


MODELS = {"qwen3_30b_a3b": Shape(16, 2048, 768), "mixtral_8x7b": Shape(8, 4096, 14336)}
TOY = {"toy": Shape(4, 40, 24)}


class Case(NamedTuple):
    """Experts of a model, and the mean number of each one's tokens."""

    model: str
    rows: int

    def __str__(self) -> str:
        return f"{self.model}, {self.rows:,} tokens per expert"


def random_groups(shape: Shape, rows: int) -> Groups:
    """Returns groups of uneven sizes, whose tokens lie in random order among as many places and a quarter more."""
    rng, num = np.random.default_rng(0), shape.experts * rows
    sizes = rng.multinomial(num, rng.dirichlet(np.full(shape.experts, 8.0))).astype(np.int32)
    order = rng.permutation(num + num // 4).astype(np.int32)
    is_row, place = np.zeros(len(order), bool), np.zeros(len(order), np.int32)
    is_row[order[:num]], place[order[:num]] = True, np.arange(num)
    found = Groups(*map(jnp.asarray, (order[: num + num // 8], sizes, is_row, place)))
    return found._replace(order=padded(found.order))


class Operands(NamedTuple):
    """Inputs of a layer's experts, and the gradient of their results."""

    x: jax.Array
    """Tokens [R, I], in any order."""
    weights: jax.Array
    """Factor of each token's result [R], in float32."""
    w_in: Any
    """Matrices [E, I, 2, F]."""
    w_out: Any
    """Matrices [E, F, I]."""
    d_out: jax.Array
    """Gradient of the results [R, I], at the tokens' rows."""


def random_operands(shape: Shape, groups: Groups) -> Operands:
    rows, (E, width, hidden) = len(groups.is_row), shape
    dims = (rows, width), (rows,), (E, width, 2, hidden), (E, hidden, width), (rows, width)
    drawn = Operands(*(jax.random.normal(jax.random.key(seed), own, jnp.bfloat16) for seed, own in enumerate(dims)))
    return drawn._replace(weights=drawn.weights.astype(jnp.float32))


def operands_of(kernel: str, operands: Operands, num_tokens: int) -> Operands:
    """Returns what a kernel of `KERNELS` multiplies."""
    x, weights, w_in, w_out, d_out = operands
    if kernel == "dense":
        return Operands(x[:num_tokens], weights[:num_tokens], w_in[0], w_out[0], d_out[:num_tokens])
    if "float8" in kernel:
        return operands._replace(w_in=_in_float8(w_in), w_out=_in_float8(w_out))
    return operands


def _in_float8(w: jax.Array) -> Float8:
    return dataclasses.replace(jax.jit(partial(rounded, form=E4M3))(w), stand_in=jnp.zeros_like(w))


def layer(kernel: str, groups: Groups, x: jax.Array, weights: jax.Array, w_in: Any, w_out: Any) -> jax.Array:
    """Returns the experts' results by a kernel of `KERNELS`, or by the `definition`."""
    if kernel == "dense":
        return of_expert(x, weights, w_in, w_out)
    if kernel == "definition":
        return by_definition(groups, x, weights, w_in, w_out)
    asked: Any = kernel.split()[0]
    return experts_on_rows(x, weights, groups, w_in, w_out, asked)


def of_expert(x: jax.Array, weights: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Returns the results of one expert for all tokens."""
    gate, up = jnp.split((x @ w_in.reshape(len(w_in), -1)).astype(jnp.float32), 2, axis=1)
    hidden = jax.nn.silu(gate) * up * weights[:, None]
    return hidden.astype(x.dtype) @ w_out


def by_definition(groups: Groups, x: jax.Array, weights: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Returns the results of every expert for all tokens, added up where it is their own."""
    expert = jnp.searchsorted(jnp.cumsum(groups.sizes), groups.place, side="right")

    @jax.checkpoint
    def add(total: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        number, *matrices = own
        is_own = (expert == number) & groups.is_row
        return total + jnp.where(is_own[:, None], of_expert(x, weights, *matrices), 0), None

    return jax.lax.scan(add, jnp.zeros_like(x), (jnp.arange(len(w_in)), w_in, w_out))[0]


def compiled(kernel: str, groups: Groups, operands: Operands) -> dict[str, jax.stages.Compiled]:
    """Compiles a program of groups and operands for each pass; arrays may be given as shapes."""

    def forward(groups: Groups, operands: Operands) -> Any:
        return layer(kernel, groups, *operands[:4])

    def backward(groups: Groups, operands: Operands) -> Any:
        gradients = jax.vjp(partial(layer, kernel, groups), *operands[:4])[1](operands.d_out)
        return [own.stand_in if isinstance(own, Float8) else own for own in gradients]

    on_device = partial(jax.shard_map, in_specs=P(), out_specs=P(), check_vma=False)
    passes = {"forward": forward, "backward": backward}
    return {name: jax.jit(on_device(own)).lower(groups, operands).compile() for name, own in passes.items()}


def obstacle(kernel: str) -> str | None:
    """Returns the reason that a kernel of `KERNELS` cannot run here; None if it can."""
    asked: Any = kernel.split()[0]
    is_float8, capability = "float8" in kernel, compute_capability()
    if is_float8 and capability is not None and capability < LEAST_CAPABILITY:
        return "these GPUs multiply nothing in float8"
    return grouped_obstacle(asked, GroupedSite(is_on_gpu(), "bfloat16", is_float8, capability)) if asked != "dense" else None


def measure(case: Case, shape: Shape, rounds: Rounds, peak: float | None, *, timed: bool) -> list[dict[str, Any]]:
    """Returns a row for each kernel: its `error`, and the times of both passes; or why it `cannot` or is `wrong`."""
    groups, num_tokens = random_groups(shape, case.rows), shape.experts * case.rows
    operands = random_operands(shape, groups)
    told: dict[str, dict[str, Any]] = {kernel: case._asdict() | {"kernel": kernel} for kernel in KERNELS}
    calls: dict[tuple[str, str], Callable[[], Any]] = {}

    def ways(kernel: str) -> dict[str, Callable[[], Any]]:
        own = operands_of(kernel, operands, num_tokens)
        return {way: partial(program, groups, own) for way, program in compiled(kernel, groups, own).items()}

    truth = results(groups, ways("definition"))
    for kernel, row in told.items():
        if reason := obstacle(kernel):
            row["cannot"] = reason
            continue
        try:
            own = ways(kernel)
            found = truth if kernel == "dense" else results(groups, own)
        except compare.REFUSALS as error:
            row["wrong"] = compare.reason(error)
            continue
        if kernel != "dense":
            off = [np.linalg.norm(own - true) / np.linalg.norm(true) for own, true in zip(found, truth, strict=True)]
            row["error"], most = float(np.max(off)), TOLERANCE["float8" if "float8" in kernel else "bfloat16"]
            if not row["error"] <= most:
                row["wrong"] = f"off the definition by more than {most}"
                continue
        calls |= {(kernel, way): call for way, call in own.items()}
    taken, flops = take_turns(calls, rounds), 6 * num_tokens * shape.width * shape.hidden
    for (kernel, way), seconds in taken.items() if timed else ():
        low, median, high = statistics.quantiles(seconds, n=4)
        rate = PASSES[way] * flops / median
        told[kernel] |= {
            f"{way}_ms": 1e3 * median, f"{way}_spread": (high - low) / median, f"{way}_tflops": rate / 1e12,
            f"{way}_of_dense": statistics.median(taken["dense", way]) / median,
        }  # fmt: skip
        told[kernel] |= {} if peak is None else {f"{way}_of_peak": rate / peak}
    return list(told.values())


def results(groups: Groups, ways: Mapping[str, Callable[[], Any]]) -> list[np.ndarray]:
    """Returns the arrays of both passes, with zeros for rows of no expert."""
    d_x, *gradients = ways["backward"]()
    of_rows = [jnp.where(groups.is_row[:, None], own, 0) for own in (ways["forward"](), d_x)]
    return [np.asarray(own, np.float32) for own in (*of_rows, *gradients)]


_FORMS: dict[str, Callable[[Any], str]] = {"error": "{:.1e}".format}
for _way in PASSES:
    _FORMS |= {f"{_way}_ms": "{:.3f}".format, f"{_way}_spread": "{:.1%}".format, f"{_way}_tflops": "{:.0f}".format}
    _FORMS |= {f"{_way}_of_dense": "{:.0%}".format, f"{_way}_of_peak": "{:.1%}".format}


def table(rows: Sequence[compare.Row]) -> Table:
    """Formats the table of one case."""
    return compare.table(rows, _FORMS, Case._fields)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Case]]:
    """Parses the command line into options and cases. Exits with code 2 on mistakes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="run on a CPU: four small experts of 40 tokens each, no times")
    parser.add_argument("--models", type=several(tuple(MODELS)), help=f"some of {', '.join(MODELS)}; default: all")
    parser.add_argument("--rows", type=several_numbers(1, 2**17), help="mean tokens per expert; default: 128,512,2048,8192")
    parser.add_argument("--json", help="file for all results")
    found = parser.parse_args(arguments)
    if found.toy and (found.models or found.rows):
        parser.error("--toy sets its own experts and tokens; leave out --models and --rows")
    models = tuple(TOY) if found.toy else found.models or tuple(MODELS)
    rows = (40,) if found.toy else found.rows or (128, 512, 2048, 8192)
    return found, list(itertools.starmap(Case, itertools.product(models, rows)))


def main(arguments: Sequence[str]) -> int:
    """Measures. Returns the exit code: 1 if a kernel is wrong."""
    options, cases = parse(arguments)

    def measured(case: Case, hardware: Mapping[str, Any]) -> list[compare.Row]:
        gpu, rounds = find_gpu(hardware["name"]), compare.TOY if options.toy else compare.GPU
        peak = None if gpu is None else gpu.peak_flops
        return measure(case, (MODELS | TOY)[case.model], rounds, peak, timed=not options.toy)

    return compare.compare(options, cases, measured, table, untimed="times")


if __name__ == "__main__":
    end_with(lambda: main(sys.argv[1:]))
