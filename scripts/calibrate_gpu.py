"""Measures on one GPU the constants of the cost model, and the error of plans against real training steps.

    python scripts/calibrate_gpu.py --output runs/h100.yaml

Takes some minutes and writes a file for `hardware.calibration`. Each constant is chosen so that the cost model predicts the
GPU's time for a program: a loop over random data, compiled by XLA like the training step and replayed like a plan. Next,
llamajax's own attention runs on one row, which gives a GPU few programs; the script compares the measured and the predicted
share of the rate with many rows. Last, three runs that fit one card are measured, and planned with the built-in and with the
measured constants. Each measurement runs in its own process, so that it finds the GPU empty.

`--device cpu` runs the same at toy size, without a GPU. Its file is marked, and plans refuse it.
"""

import dataclasses
import itertools
import math
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a machine where llamajax is not installed
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides XLA's warnings about its trials while compiling

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

import llamajax
from llamajax.config.command import parse_args
from llamajax.config.file import dump_config
from llamajax.config.parallel import DistributedConfig, MeshConfig
from llamajax.config.rules import Settings
from llamajax.config.run import Config
from llamajax.errors import EnvironmentMismatchError
from llamajax.estimates.calibration import MeasuredGrid, MeasuredRun, Measurement, Versions
from llamajax.estimates.gpus import GPUS, Gpu, find_gpu
from llamajax.estimates.machine import Machine
from llamajax.kernels.choice import compute_capability
from llamajax.parallel import startup
from llamajax.planning.cost.replay import replay
from llamajax.planning.plan import make_plan, replayed
from llamajax.planning.scheduling import compile_here, resolve_here
from llamajax.planning.xla.compile import check_compiler, prepare_environment
from llamajax.planning.xla.hlo import Module
from llamajax.planning.xla.parse import parse
from llamajax.processes.exit import end_with, exit_code
from llamajax.step.batch import Batch, batch_sharding
from llamajax.step.compile import lower
from llamajax.step.state import abstract_state, init_state
from llamajax.step.step import one_behind
from llamajax.units import format_bytes
from llamajax.watch.console import log_own, waiting
from llamajax.watch.option_files import check_outputs, write_output
from scripts.calibration.programs import (
    FULL,
    MANY_ROWS,
    PASSES,
    SIZES,
    SMALL_GRIDS,
    Device,
    Shapes,
    Sizes,
    Work,
    arguments_of,
    programs,
    random,
    repeated,
    scores_behind,
    scores_of,
    shipped,
)
from scripts.checkout import commit

NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(Settings):
    """Settings of the measurement and its output file."""

    output: str
    """File to write, for `hardware.calibration`."""
    device: Device = "gpu"
    """`gpu`: the first visible GPU. `cpu`: everything at toy size, to try the script."""


_ONE = {"hardware.gpus_per_node": 1, "mesh.fsdp": 1, "train.grad_accum_steps": 1}
_LLAMA = _ONE | {"train.global_batch_size": 8, "data.seq_len": 2048}
_NARROW = _LLAMA | {
    "model.vocab_size": 32_000, "model.embed_dim": 1024, "model.mlp_dim": 4096, "model.num_heads": 16,
    "model.attend_across_documents": False,
}  # fmt: skip
_LONG = _LLAMA | {
    "train.global_batch_size": 1, "data.seq_len": 32_768, "model.max_seq_len": 32_768, "model.num_heads": 16,
    "model.head_dim": 128, "model.remat": "save_attention_qkv",
}  # fmt: skip
_TOY = _LLAMA | {
    "model.vocab_size": 512, "model.embed_dim": 64, "model.mlp_dim": 128, "model.num_layers": 2, "model.num_heads": 4,
    "model.num_kv_heads": 2, "model.head_dim": 16, "data.seq_len": 128, "mesh.num_cpu_devices": 1,
}  # fmt: skip
RUNS: dict[Device, dict[str, dict[str, Any]]] = {
    "gpu": {
        "1B, rows of 2,048": _LLAMA,
        "width 1,024, documents closed": _NARROW,
        "1B, heads of 128, rows of 32,768": _LONG,
    },
    "cpu": {"toy": _TOY, "toy, narrow": _TOY | {"model.embed_dim": 32}, "toy, long rows": _TOY | {"data.seq_len": 512}},
}
"""Changes to the shipped configuration of Llama-3.2 1B, for runs on one device (a GPU of 40 GB). There cuDNN computes
attention, and llamajax's own kernels compute it for closed documents."""


class Timing(NamedTuple):
    """Timing of a repeated program: the median, and the distance of the 5th and 95th percentiles relative to it."""

    seconds: float
    spread: float


def timed(results: Iterator[Any], warm_s: float, measured_s: float) -> Timing:
    """Returns the seconds from one result to the next on a device that always has the next one queued."""
    ends: list[float] = []
    seconds: list[float] = []
    for result in one_behind(results):
        jax.block_until_ready(result)
        ends.append(time.perf_counter())
        seconds = [after - before for before, after in itertools.pairwise(ends) if before >= ends[0] + warm_s]
        if len(seconds) >= 5 and ends[-1] >= ends[0] + warm_s + measured_s:
            break
    low, *_, high = statistics.quantiles(seconds, n=20, method="inclusive")
    return Timing(median := statistics.median(seconds), (high - low) / median)


def measured(work: Work, shapes: Shapes, sizes: Sizes) -> tuple[Module, Timing]:
    """Repeats `work` on random data in one program, so that its launch does not matter. Returns the program and its time."""
    arguments = random(shapes)

    def loop(count: int, warm_s: float, measured_s: float) -> tuple[Module, Timing]:
        program = jax.jit(partial(repeated, work, count)).lower(*arguments).compile()
        results = (program(*arguments) for _ in itertools.repeat(None))
        return parse(program.as_text() or ""), timed(results, warm_s, measured_s)

    _, tried = loop(4, 0.0, 0.0)
    return loop(max(4, math.ceil(4 * sizes.loop_s / tried.seconds)), sizes.warm_s, sizes.measured_s)


def solved(name: str, modules: Collection[Module], seconds: float, machine: Machine) -> float:
    """Returns the value of the constant `name` with which the cost model predicts `seconds` for all programs together.

    The predicted time is linear in the seconds of a kernel, and in 1 / share where nothing else bounds a kernel.
    """

    def constant(x: float) -> float:
        return x if name == "kernel_s" else 1 / x

    scores = scores_behind(name)

    def told(x: float) -> float:
        tried = with_constant(machine, name, constant(x))
        return sum(replay(module, tried, {}, scores, FULL).step_time_s for module in modules)

    low, high = (1e-4, 2e-4) if name == "kernel_s" else (1e6, 2e6)
    slope = (told(high) - told(low)) / (high - low)
    return constant(low + (seconds - told(low)) / slope)


def with_constant(machine: Machine, name: str, value: float) -> Machine:
    """Returns the machine with a measured constant."""
    return dataclasses.replace(machine, measured=dataclasses.replace(machine.measured, **{name: value}))


def small_grids(machine: Machine, sizes: Sizes) -> Iterator[MeasuredGrid]:
    """Measures attention's rate on one row as a share of its rate on many rows. Prints it beside `machine`'s share."""
    sizes = sizes._replace(warm_s=sizes.warm_s / 3, measured_s=sizes.measured_s / 3)  # shares need less time, on a warm GPU
    for (name, shape), (passes, (work, count)) in itertools.product(SMALL_GRIDS.items(), PASSES.items()):
        rates = []
        for rows in (1, MANY_ROWS):
            module, timing = measured(work, arguments_of(shape, rows)[:count], sizes)
            told = replay(module, machine, {}, scores_of(shape))
            rates.append((told.flops / timing.seconds, told.flops / told.step_time_s))
        share, predicted = (float(f"{one / many:.4g}") for one, many in zip(*rates, strict=True))
        log_own(f"small grid {name}, {passes}: {share:.3f} of the rate of {MANY_ROWS} rows (predicted: {predicted:.3f})")
        yield MeasuredGrid(name=f"{name}, {passes}", measured=share, predicted=predicted)


def host_link(sizes: Sizes) -> dict[str, Timing]:
    """Times copies of `sizes.elements` float32 to pinned memory of the host, back, and one of each at a time."""
    memories = [jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=k) for k in ("pinned_host", "device")]
    to_host, from_host = (jax.jit(partial(jax.device_put, device=memory)) for memory in memories)
    (here,) = random([jax.ShapeDtypeStruct((sizes.elements,), jnp.float32)])
    there = to_host(here)
    copies = {
        "to host": lambda: to_host(here),
        "from host": lambda: from_host(there),
        "both at once": lambda: (to_host(here), from_host(there)),
    }
    return {
        way: timed((copy() for _ in itertools.repeat(None)), sizes.warm_s, sizes.measured_s) for way, copy in copies.items()
    }


def data_sheet(device: Device, kind: str) -> Gpu:
    """Returns the data sheet of the GPU that jax calls `kind`, or raises `EnvironmentMismatchError`; an H100's data sheet
    replaces the CPU's."""
    gpu = find_gpu(kind if device == "gpu" else "NVIDIA H100 80GB HBM3")
    if gpu is None:
        names = ", ".join(name for known in GPUS for name in known.device_kinds)
        raise EnvironmentMismatchError(
            f"--device gpu: plans do not support {kind}; measure one of {names}, or use --device cpu"
        )
    return gpu


def measure_constants(device: Device, command: str) -> Measurement:
    """Measures the constants of the device for `command`, and prints each at once. Raises the errors of `data_sheet`."""
    startup.connect(MeshConfig(num_cpu_devices=1 if device == "cpu" else None), DistributedConfig())
    found, sizes = jax.local_devices()[0], SIZES[device]
    gpu = data_sheet(device, found.device_kind)
    machine = Machine(gpu=gpu)
    rates = f"{gpu.peak_flops / 1e12:g} TFLOP/s, {gpu.memory_bandwidth / 1e12:.3g} TB/s"
    log_own(f"device     {found.device_kind}, jax {jax.__version__}; efficiencies refer to {gpu.name}'s data sheet: {rates}")

    def known(name: str, value: float, timings: Collection[Timing]) -> Machine:
        built_in, spread = getattr(machine.built_in, name), max(timing.spread for timing in timings)
        log_own(f"{name:30} {value:<9.4g} (built in: {built_in:.4g}), spread {spread:.1%}")
        return with_constant(machine, name, float(f"{value:.4g}"))

    with waiting("measuring") as doing:
        for name, several in programs(device, compute_capability()).items():
            doing(f"measuring {name}")
            modules, timings = zip(*(measured(work, shapes, sizes) for work, shapes in several), strict=True)
            machine = known(name, solved(name, modules, sum(timing.seconds for timing in timings), machine), timings)
        doing("measuring host_bandwidth")
        ways = host_link(sizes)
        rate = {way: 4 * sizes.elements / timing.seconds for way, timing in ways.items()}
        log_own(
            f"host link  {', '.join(f'{way} {rate[way] / 1e9:.1f} GB/s' for way in ways)}, each way; the slowest counts"
        )  # fmt: skip
        machine = known("host_bandwidth", min(rate.values()), ways.values())
        doing("measuring small grids")
        grids = tuple(small_grids(machine, sizes)) if device == "gpu" else ()
    stay = [f"{name} {getattr(machine.built_in, name):g}" for name, of in vars(machine.measured).items() if of is None]
    log_own(f"built in   {', '.join(stay)}: {NOT_MEASURED}; networks need more than one GPU, tokamax its extra")
    name: Any = "cpu" if device == "cpu" else gpu.name.lower()
    return Measurement(
        gpu=name, device=found.device_kind, date=str(date.today()), command=command, commit=commit(),
        versions=Versions(
            llamajax=llamajax.__version__, python=platform.python_version(), jax=jax.__version__,
            jaxlib=jaxlib.version.__version__, platform=" ".join(found.client.platform_version.split()),
        ),
        constants=machine.measured, small_grids=grids,
    )  # fmt: skip


def measure_step(config: Config, device: Device) -> tuple[Timing, int | None]:
    """Measures the training step: its time, and the peak bytes of arrays if the device reports them."""
    startup.start(config)
    run = resolve_here(config)
    step = compile_here(run, lower(run, abstract_state(config))).step
    state, batch = init_state(config), random_batch(config)

    def losses() -> Iterator[jax.Array]:
        nonlocal state
        while True:
            state, metrics = step(state, batch)
            yield metrics["loss"]

    timing = timed(losses(), SIZES[device].warm_s, SIZES[device].measured_s)
    stats = jax.local_devices()[0].memory_stats()
    return timing, None if stats is None else stats["peak_bytes_in_use"]


def random_batch(config: Config) -> Batch:
    """Yields rows of one document each."""
    rng, shape = np.random.default_rng(), (1, config.train.global_batch_size, config.data.seq_len)
    tokens, targets = rng.integers(config.model.vocab_size, size=(2, *shape), dtype=np.int32)
    ones = np.ones(shape, np.int32)
    fields = {"tokens": tokens, "targets": targets, "segment_ids": ones, "positions": ones.cumsum(-1, dtype=np.int32) - 1}
    return {name: jax.device_put(field, batch_sharding()) for name, field in fields.items()}


def predicted(config: Config, file: str | None) -> tuple[int, float, float | None]:
    """Returns bytes of arrays, and seconds of a step by the built-in constants and by the file's constants."""
    chosen = make_plan(config, suggest=False).chosen
    calibrated = None
    if file is not None:
        calibrated = replayed(chosen.step, config.changed({"hardware.calibration": file})).timeline.step_time_s
    return chosen.memory.peak_bytes, chosen.timeline.step_time_s, calibrated


def compare(settings: CalibrateConfig, gpu: Gpu, pool: Executor) -> tuple[MeasuredRun, ...]:
    """Measures and plans the runs, and prints their differences. Returns the differences with measured constants, for the
    file. `pool` starts a process for each run."""
    base = shipped().changed({"hardware.gpu": gpu.name.lower()})
    on_gpu = settings.device == "gpu"
    row("run", "measured" if on_gpu else "by the CPU", "spread", f"{gpu.name}, built in", f"{gpu.name}, as measured")

    def off(form: Callable[[float], str], told: float | None, measured: float | None) -> str:
        """Formats a prediction and its difference from the GPU's measurement."""
        if told is None:
            return NOT_MEASURED
        return f"{form(told)} ({NOT_MEASURED if measured is None or not on_gpu else f'{told / measured - 1:+.1%}'})"

    compared = []
    for name, changes in RUNS[settings.device].items():
        config = base.changed(changes)
        with waiting(f"training {name}"):
            step, peak = pool.submit(measure_step, config, settings.device).result()
        with waiting(f"planning {name}"):
            planned_peak, built_in, calibrated = predicted(config, settings.output if on_gpu else None)
        predictions = [off("{:.4g} s".format, told, step.seconds) for told in (built_in, calibrated)]
        row(f"{name}: step", f"{step.seconds:.4g} s", f"{step.spread:.1%}", *predictions)
        row(f"{name}: peak", NOT_MEASURED if peak is None else format_bytes(peak), "", off(format_bytes, planned_peak, peak))
        if calibrated is not None:
            compared.append(MeasuredRun(name=name, measured_s=step.seconds, predicted_s=calibrated))
    return tuple(compared)


def row(*cells: str) -> None:
    """Prints one line of the table."""
    log_own("  ".join(cell.ljust(width) for cell, width in zip(cells, (38, 12, 6, 26, 26), strict=False)).rstrip())


def run(settings: CalibrateConfig) -> None:
    """Measures, writes and compares.

    Raises:
        CompilerMissingError: the compiler for plans is missing.
        ConfigError: the file cannot be written.
        EnvironmentMismatchError: no GPU exists, or plans do not support it.
    """
    named = {"--output": settings.output}
    check_outputs(named, named)
    check_compiler()
    prepare_environment()  # this process only plans
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        measurement = pool.submit(measure_constants, settings.device, shlex.join(["python", *sys.argv])).result()
        mark = "" if settings.device == "gpu" else "# Of a CPU, at toy size: for no plan.\n"
        write_output(named, "--output", lambda: mark + dump_config(measurement))
        log_own(f"wrote      {settings.output}, for hardware.calibration")
        runs = compare(settings, data_sheet(settings.device, measurement.device), pool)
        if runs:
            write_output(named, "--output", lambda: dump_config(dataclasses.replace(measurement, runs=runs)))
            log_own(f"wrote      the errors of these {len(runs)} runs, which plans with this file report")


def main() -> int:
    """Parses the command line and measures. Returns the exit code."""
    settings = parse_args(prog="python scripts/calibrate_gpu.py", root=CalibrateConfig).config
    remedies = {"memory_remedy": "a GPU that nothing else uses", "disk_remedy": "check it and try again"}
    return exit_code(lambda: run(settings), disk=settings.output, **remedies)


if __name__ == "__main__":
    end_with(main)
