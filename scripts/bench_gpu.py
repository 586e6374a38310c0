"""Compares llamajax's training step with the strongest others on one GPU, and with the GPU's ceiling.

    python scripts/bench_gpu.py [--models 1b] [--seq 4096] [--packed no,yes] [--rows hf,llamajax] [--json FILE]

Rows: `hf` is transformers' Llama with torch.compile and SDPA; `torch_ideal` is the strongest step in torch that we can
write; `jax_naive` is plain jax as one would write it first; `llamajax` is the real training step. `ceiling` is a step's
products and attention alone, each by the faster of torch and jax. All rows start from the same weights and see the same
random tokens. They use AdamW with fp32 master weights, compute in bfloat16 and have no data loader; each chooses its own
micro-batch and recomputation. Every row and round runs in its own process, rounds alternate in order (A B B A), and figures
are medians of all windows of steps. `MFU` counts the attention that documents see, `full` the whole square of attention.
`spread` is the distance of the windows' quartiles, and `apart` the distance of the slowest round from the fastest, both as
shares of the time. `x torch` is the speed relative to the faster of torch's rows.

A row is refused, with a one-line reason and exit code 1, if it is faster than the ceiling, has other losses or gradients
than the others, lacks fused attention, takes more memory than the GPU has, or was not measured in every round.

Needs jax, flax, optax, chex and jaxtyping, torch and transformers for torch's rows, and no network; llamajax need not be
installed. `--toy` runs the same at toy size on a CPU and reports no times.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a machine where llamajax is not installed

import jax

from llamajax.launching.program import bound
from llamajax.processes.exit import end_with, exit_code
from llamajax.units import format_duration
from llamajax.watch.console import log_own, print_table, waiting
from llamajax.watch.option_files import check_outputs, write_output
from scripts.bench import card
from scripts.bench.case import MODELS, REMATS, ROOT, TORCH_ROWS, TOY, Case, Choice
from scripts.bench.checks import refusals
from scripts.bench.child import Task
from scripts.bench.figures import Run, ceiling, ceiling_figures, figures, peak_flops, table
from scripts.bench.weights import write_weights
from scripts.checkout import commit

PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "triton", "transformers", "nvidia-cudnn-cu13")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line. Exits with code 2 on mistakes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models, lengths = tuple(name for name in MODELS if name != TOY), ("2048", "4096", "8192")
    parser.add_argument("--toy", action="store_true", help="run on a CPU, with packed rows of 128 tokens")
    parser.add_argument("--models", type=several(models), help=f"some of {', '.join(models)}; default: 1b")
    parser.add_argument("--seq", type=several(lengths), help="tokens per row; default: 4096")
    parser.add_argument("--packed", type=several(("no", "yes")), help="yes: several documents per row; default: no")
    parser.add_argument("--rows", type=several(tuple(REMATS)), help=f"some of {', '.join(REMATS)}; default: all possible")
    parser.add_argument("--rounds", type=int, choices=range(1, 10), metavar="1-9", help="default: 2, or 1 with --toy")
    parser.add_argument("--choices", type=_choices, default={}, help="ROW=MICRO_BATCH:REMAT,..., overrides the rows' own")
    parser.add_argument(
        "--minutes", type=_minutes, default=9.5, help="time limit, after which running processes are ended; default: 9.5"
    )
    parser.add_argument("--json", help="file for all results")
    found = parser.parse_args(arguments)
    if found.toy and (found.models or found.seq):
        parser.error("--toy sets its own model and rows; leave out --models and --seq")
    found.models = (TOY,) if found.toy else found.models or ("1b",)
    found.seq = ("128",) if found.toy else found.seq or ("4096",)
    left_out = TORCH_ROWS if not found.rows and not all(map(importlib.util.find_spec, ("torch", "transformers"))) else ()
    if left_out:
        log_own(f"left out   {', '.join(left_out)}: torch and transformers are not both installed")
    found.rows = found.rows or tuple(row for row in REMATS if row not in left_out)
    found.rounds = found.rounds or (1 if found.toy else 2)
    found.packed = found.packed or (("yes",) if found.toy else ("no",))
    return found


def several(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; choose from {', '.join(known)}")
        return names

    return read


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 <= minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes")
    return minutes


def _choices(text: str) -> dict[str, Choice]:
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\w+)=([1-9][0-9]*):(\w+)", part)
        if match is None or match[3] not in REMATS.get(match[1], ()):
            able = "; ".join(f"{row}: {', '.join(remats)}" for row, remats in REMATS.items())
            raise argparse.ArgumentTypeError(f"{part!r} must have the form llamajax=4:none; choose from {able}")
        found[match[1]] = Choice(micro_batch=int(match[2]), remat=match[3])
    return found


class Benchmark:
    """Processes that measure, one after the other."""

    def __init__(self, options: argparse.Namespace, hardware: dict[str, Any], folder: Path) -> None:
        self._options, self._hardware, self._folder = options, hardware, folder
        self._env = environment(folder, toy=options.toy)
        self._started, self._done, self._all = time.monotonic(), 0, 0

    def measure(self) -> Iterator[dict[str, Any]]:
        """Yields each finished case: its `case`, `rows`, the reasons of `refused` rows, and everything `measured`."""
        options = self._options
        named = itertools.product(options.models, options.seq, options.packed)
        cases = [Case(model=model, seq_len=int(seq), packed=packed == "yes") for model, seq, packed in named]
        self._all = len(cases) * (len(self._parts()) + options.rounds * len(options.rows))
        yield from map(self._case, cases)

    def _parts(self) -> list[str]:
        """Returns the modules that measure the ceiling."""
        return ["jax_rows", *(["torch_rows"] if set(TORCH_ROWS) & set(self._options.rows) else [])]

    def _case(self, case: Case) -> dict[str, Any]:
        options, memory_bytes = self._options, self._hardware["memory_bytes"]
        weights = self._folder / case.model
        if not weights.exists():
            weights.mkdir()
            with waiting(f"drawing the weights of {case.model}"):
                write_weights(case, weights)
        task = Task(row="ceiling", case=case, weights=str(weights), memory_bytes=memory_bytes)
        parts = [self._run(module, task, 1) for module in self._parts()]
        best = ceiling(case, parts)
        forms = parts[-1].get("attention", {})
        fastest = min(forms, key=forms.__getitem__, default=None)

        runs: dict[str, list[Run]] = {row: [] for row in options.rows}
        for number in range(options.rounds):
            for row in options.rows[:: 1 if number % 2 == 0 else -1]:
                chosen = (Choice(**run["choice"]) for run in runs[row] if "choice" in run)
                choice = options.choices.get(row) or next(chosen, None)
                one = dataclasses.replace(task, row=row, choice=choice, attention=fastest if row == "torch_ideal" else None)
                runs[row].append(self._run("torch_rows" if row in TORCH_ROWS else "jax_rows", one, number + 1))

        refused = {"ceiling": [part["error"] for part in parts if "error" in part]}
        refused |= refusals(case, memory_bytes, best, runs)
        peak, source = peak_flops(self._hardware["name"], best)
        rows = {} if best is None else {"ceiling": ceiling_figures(case, best, peak)}
        rows |= {row: figures(case, best, peak, own) for row, own in runs.items()}
        rows = {row: found | {"refused": refused[row]} for row, found in rows.items()}
        self._tell(case, rows, refused, source)
        measured = {"ceiling": parts, "rows": runs}
        return {"case": dataclasses.asdict(case), "rows": rows, "refused": refused, "measured": measured}

    def _run(self, module: str, task: Task, number: int) -> dict[str, Any]:
        """Returns the answer of a row's process, or `error`."""
        what = f"{task.case}: {task.row}{f' by {module[:-5]}' if task.row == 'ceiling' else f', round {number}'}"
        left = 60 * self._options.minutes - (time.monotonic() - self._started)
        command = bound([sys.executable, "-m", f"scripts.bench.{module}", task.encode()])
        log, found = self._folder / "log", dict[str, Any]()
        with waiting(what), log.open("w") as stderr, card.Watch(self._folder / "samples", toy=self._options.toy) as watch:
            try:
                if left <= 0:
                    raise subprocess.TimeoutExpired(command, 0)
                done = subprocess.run(
                    command, cwd=ROOT, env=self._env, stdout=subprocess.PIPE, stderr=stderr, timeout=left, check=True
                )
                found |= json.loads(done.stdout)
            except subprocess.TimeoutExpired:
                found["error"] = "no time was left; raise --minutes, or name fewer cases or rows"
            except subprocess.CalledProcessError as error:
                last = (log.read_text(errors="replace").strip() or "without a word").splitlines()[-1]
                found["error"] = f"ended with exit code {error.returncode}: {last[:300]}"
        if "started" in found:
            found |= watch.between(found["started"], found["ended"])
        self._done += 1
        took = time.monotonic() - self._started
        eta = format_duration(took / self._done * (self._all - self._done))
        log_own(f"{self._done:>{len(str(self._all))}}/{self._all}  {what}  {found.get('error', 'measured')}  ETA {eta}")
        return {"row": task.row, "round": number} | found

    def _tell(self, case: Case, rows: dict[str, Any], refused: dict[str, list[str]], source: str) -> None:
        log_own("")
        print_table(table(case, rows))
        if case.is_toy:
            log_own("not measured: times, and whether attention is fused, because a CPU cannot show them")
        else:
            log_own(f"{case.tokens:,} tokens per step; MFU is a share of the peak: {source}")
        if sum("choice" in row for row in rows.values()) < 2:
            log_own("not compared: losses and gradients, because only one row has them; name more --rows")
        for row, reasons in refused.items():
            for reason in reasons:
                log_own(f"refused    {row}: {reason}")
        log_own("")


def environment(folder: Path, *, toy: bool) -> dict[str, str]:
    """Returns the environment of all processes: one GPU, no network, cached programs of earlier rounds; for a toy, no GPU
    and one thread."""
    own = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if toy:
        quick = {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0",
            "OMP_NUM_THREADS": "1",
        }
        return os.environ | own | quick | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax"}
    return os.environ | own | caches | {"CUDA_VISIBLE_DEVICES": card.index()}


def about(hardware: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts needed to trust or repeat a measurement."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": str(datetime.date.today()),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "hardware": hardware,
        "versions": versions,
    }


def main(arguments: Sequence[str]) -> int:
    """Measures. Returns the exit code: 1 if a row is refused."""
    options = parse(arguments)
    refused: list[str] = []
    code = exit_code(
        lambda: refused.extend(measure(options)),
        memory_remedy="a GPU that nothing else uses", disk=tempfile.gettempdir(), disk_remedy="check it and try again",
    )  # fmt: skip
    return code or bool(refused)


def measure(options: argparse.Namespace) -> list[str]:
    """Measures and prints all cases. Returns the cases with refused rows, and these rows.

    Raises:
        ConfigError: no GPU exists, or a file cannot be written.
    """
    named, cases = {"--json": options.json} if options.json else {}, list[dict[str, Any]]()
    jax.config.update("jax_platforms", "cpu")  # leaves the GPU to the processes that measure
    check_outputs(named, named)
    hardware = card.hardware(toy=options.toy)
    log_own(f"device     {hardware['name']}")
    found = about(hardware) | {"toy": options.toy, "cases": cases}
    with tempfile.TemporaryDirectory(prefix="llamajax-bench-") as folder:
        for case in Benchmark(options, hardware, Path(folder)).measure():
            cases.append(case)
            write_output(named, "--json", lambda: json.dumps(found, indent=1) + "\n")
    by_case = {str(Case(**case["case"])): [row for row, why in case["refused"].items() if why] for case in cases}
    refused = [f"{case}: {', '.join(rows)}" for case, rows in by_case.items() if rows]
    log_own(f"refused: {'; '.join(refused)}" if refused else "no row refused")
    return refused


if __name__ == "__main__":
    end_with(lambda: main(sys.argv[1:]))
