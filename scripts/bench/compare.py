"""Compares kernels case by case on one GPU: every result is checked, and the kernels that are right alternate in order."""

import argparse
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from rich.table import Table

from llamajax.config.parallel import MeshConfig
from llamajax.errors import ConfigError, UserError
from llamajax.parallel.mesh import make_mesh
from llamajax.processes.exit import exit_code
from llamajax.watch.console import log_own, print_table
from llamajax.watch.option_files import check_outputs, write_output
from scripts.bench import card
from scripts.bench_gpu import about

C = TypeVar("C")
Row = dict[str, Any]
"""Figures of a kernel in a case; `wrong` is the reason that its results cannot be trusted."""
REFUSALS = (UserError, jax.errors.JaxRuntimeError, NotImplementedError)
"""Errors by which llamajax, XLA, the GPU or a kernel's library refuses a kernel: the row and the exit code report them."""


class Rounds(NamedTuple):
    """Repetitions of a measurement: `calls` of every kernel in each of `rounds`."""

    rounds: int
    calls: int


GPU, TOY = Rounds(rounds=8, calls=10), Rounds(rounds=2, calls=1)


def take_turns(calls: Mapping[Any, Callable[[], Any]], rounds: Rounds) -> dict[Any, list[float]]:
    """Returns the seconds per call in every round, by name."""
    taken = {which: list[float]() for which in calls}
    for number in range(rounds.rounds):
        for which in list(calls)[:: 1 if number % 2 == 0 else -1]:
            result = jax.block_until_ready(calls[which]())
            started = time.perf_counter()
            for _ in range(rounds.calls):
                result = calls[which]()
            jax.block_until_ready(result)
            taken[which].append((time.perf_counter() - started) / rounds.calls)
    return taken


def reason(error: Exception) -> str:
    """Returns one of `REFUSALS` in one line."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def table(rows: Sequence[Row], forms: Mapping[str, Callable[[Any], str]], of_case: Collection[str]) -> Table:
    """Formats the table of one case: a row for each kernel, without the figures that are those of the case."""
    shown = Table("kernel", box=None, padding=(0, 2, 0, 0), header_style="bold")
    names = {name: None for row in rows for name in row if name not in (*of_case, "kernel")}
    for name in names:
        shown.add_column(name.replace("_", " "), justify="right" if name in forms else "left")
    for row in rows:
        shown.add_row(row["kernel"], *(forms.get(name, str)(row[name]) if name in row else "-" for name in names))
    return shown


def several_numbers(least: int, most: int) -> Callable[[str], tuple[int, ...]]:
    """Returns a reader of comma-separated numbers."""

    def read(text: str) -> tuple[int, ...]:
        numbers = text.split(",")
        if wrong := [number for number in numbers if not number.isdecimal() or not least <= int(number) <= most]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not a whole number from {least} to {most}")
        return tuple(map(int, numbers))

    return read


def compare(
    options: argparse.Namespace,
    cases: Sequence[C],
    measure: Callable[[C, Mapping[str, Any]], list[Row]],
    formatted: Callable[[Sequence[Row]], Table],
    *,
    untimed: str,
) -> int:
    """Measures and prints all cases. Returns the exit code: 1 if a kernel is wrong.

    Args:
        options: `toy` and `json` of the command line.
        cases: the cases.
        measure: function from a case and the hardware to a row for each kernel.
        formatted: function from a case's rows to their table.
        untimed: figures that a CPU does not measure.
    """
    wrong: set[str] = set()

    def measure_all() -> None:
        named, rows = {"--json": options.json} if options.json else {}, list[Row]()
        check_outputs(named, named)
        hardware = card.hardware(toy=options.toy)
        _prepare(toy=options.toy)
        found = about(hardware) | {"toy": options.toy, "rows": rows}
        log_own(f"device     {hardware['name']}{f'; {untimed}: not measured' if options.toy else ''}")
        for case in cases:
            log_own(f"\n{case}")
            own = measure(case, hardware)
            rows += own
            print_table(formatted(own))
            write_output(named, "--json", lambda: json.dumps(found, indent=1) + "\n")
        wrong.update(row["kernel"] for row in rows if "wrong" in row)
        log_own(f"wrong: {', '.join(sorted(wrong))}" if wrong else "no kernel is wrong")

    code = exit_code(
        measure_all, memory_remedy="a GPU that nothing else uses", disk="stdout", disk_remedy="check it and try again"
    )
    return code or bool(wrong)


def _prepare(*, toy: bool) -> None:
    """Makes one GPU, or a CPU, the mesh of this process. Raises `ConfigError` if jax finds no GPU."""
    if toy:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
        jax.config.update("jax_platforms", "cpu")
    os.environ["CUDA_VISIBLE_DEVICES"] = card.index()
    if not toy and jax.default_backend() != "gpu":
        raise ConfigError("nvidia-smi finds a GPU, but jax does not; pip install 'llamajax[cuda13]'")
    jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1]))
