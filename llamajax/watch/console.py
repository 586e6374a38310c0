"""Prints the output of a run for people: start-up lines and tables, progress during training, and the final summary."""

import contextlib
import io
import math
import os
import platform
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jax
from rich import progress
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import llamajax
from llamajax.config.run import Config
from llamajax.errors import UserError
from llamajax.estimates.formulas import num_active_params, trained_weights
from llamajax.estimates.formulas import num_params as params_of
from llamajax.parallel.arrays import named_arrays
from llamajax.processes import heartbeat, peers
from llamajax.units import format_bytes, format_count, format_duration
from llamajax.watch.run_log import FINAL_STEPS, METRICS_FILE, Record, RunSummary, read_run, summarize


class Screen(Console):
    """A console that ignores output errors: a full disk or a closed pipe behind it does not end a run."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints as `Console.print` does, but never fails when the output cannot be written."""
        with contextlib.suppress(OSError):
            super().print(*args, **kwargs)

    ends_with_reader = False
    """Whether the process does nothing but print, and therefore ends when nobody reads its output."""

    def on_broken_pipe(self) -> None:
        """Ends the process, as rich does, or prints nothing from now on."""
        if self.ends_with_reader:
            super().on_broken_pipe()
        self.quiet = True


CONSOLE = Screen(highlight=False, force_jupyter=False)
"""Standard output, as plain lines in a notebook. All output goes through it, so that lines appear above a live progress
bar."""
_SMOOTHED_STEPS = 20  # the live bar shows speeds over this many steps
_LEAST_S = 1.0  # shortest time over which a line shows speeds: metrics arrive some milliseconds early or late


def is_interactive() -> bool:
    """Returns whether a person watches. Rich's own answer is also yes for a log file when FORCE_COLOR is set."""
    return CONSOLE.file.isatty() and not CONSOLE.is_dumb_terminal


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """Collects the output through `CONSOLE` while the block runs."""
    file, text = CONSOLE._file, io.StringIO()
    CONSOLE._file = text
    try:
        yield text
    finally:
        CONSOLE._file = file


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what the program waits for: `what`, until the yielded function replaces it."""
    if not is_interactive():
        yield lambda what: None
        return
    with CONSOLE.status(what) as status:
        yield status.update


def log(text: str) -> None:
    """Prints one line, on process 0 only."""
    if jax.process_index() == 0:
        CONSOLE.print(text, markup=False, soft_wrap=True)


def log_own(text: str) -> None:
    """Prints one line on any process, with the number of the process if it is not process 0."""
    CONSOLE.print(_with_rank(text), markup=False, soft_wrap=True)


def say(line: str) -> None:
    """Prints a line to stderr, on process 0 only."""
    if jax.process_index() == 0:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def say_own(line: str) -> None:
    """Prints a line to stderr on any process, with the number of the process if it is not process 0."""
    with contextlib.suppress(OSError):
        print(_with_rank(line), file=sys.stderr, flush=True)


def _with_rank(line: str) -> str:
    """Appends the number of a process other than process 0, unless a launcher puts it before every line."""
    is_told = not peers.rank() or heartbeat.VARIABLE in os.environ
    return line if is_told else f"{line} (process {peers.rank()})"


def track(items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """Yields the items and shows progress: a bar on a terminal, a line after each tenth elsewhere."""
    if is_interactive() and jax.process_index() == 0:
        columns = ("{task.description}", progress.BarColumn(), progress.MofNCompleteColumn(), "ETA")
        with progress.Progress(*columns, progress.TimeRemainingColumn(), console=CONSOLE, transient=True) as bar:
            yield from bar.track(items, total=total, description=what)
        return
    started = 0.0
    for done, item in enumerate(items, start=1):
        yield item
        if done == 1:  # the first item includes compilation
            started = time.monotonic()
        elif done * 10 // total > (done - 1) * 10 // total:
            left = (time.monotonic() - started) / (done - 1) * (total - done)
            log(f"{what} {done:>{len(str(total))}}/{total}  ETA {format_duration(left)}")


def print_table(table: Table) -> None:
    """Prints a table, on process 0 only; in a file, each row stays on one line, however long."""
    if jax.process_index() == 0:
        screen = CONSOLE if is_interactive() else Screen(file=CONSOLE.file, width=1000, force_jupyter=False)
        screen.print(table)


def print_stream(prompt: str, pieces: Iterable[str]) -> None:
    """Prints a prompt and then the pieces of its continuation as they arrive.

    All processes take the pieces, and process 0 prints them. A model may produce any text, so control characters of a
    terminal are shown as replacement characters.
    """

    def show(text: str, style: str | None = None) -> None:
        visible = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        if jax.process_index() == 0:
            CONSOLE.print(visible, end="", style=style, markup=False, soft_wrap=True)

    show(prompt, style="bold")
    for piece in pieces:
        show(piece)
    show("\n")


def devices(where: str = "") -> str:
    """Describes the devices of the current mesh and its axes."""
    axes = " x ".join(f"{axis} {size}" for axis, size in jax.sharding.get_mesh().shape.items() if size > 1)
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}{where}; mesh {axes or 'of one device'}"


def print_header(config: Config, model: Any) -> None:
    """Prints what is about to run, and where: versions, devices, mesh, batch, and every array of `model`."""
    in_processes = f" in {jax.process_count()} process{'es' if jax.process_count() > 1 else ''}"
    log(f"llamajax   {llamajax.__version__}, jax {jax.__version__}, Python {platform.python_version()}")
    log(f"run        {config.run_dir}")
    log(f"devices    {devices(in_processes)}")
    num_params = sum(leaf.size for leaf in jax.tree.leaves(model))
    if config.adapters.enabled:  # the sizes of codes and scales are not those of weights
        num_params = params_of(config.model) + sum(trained_weights(config, config.model).values())
    if jax.default_backend() == "cpu" and config.mesh.num_cpu_devices is None:
        log(
            "warning    jax found no accelerator; on the GPUs of this machine, install llamajax[cuda13] and check the driver"
        )
    if config.model.param_dtype == "bfloat16":
        log(
            "warning    model.param_dtype: bfloat16 master weights lose every update below 1/512 of the weight: most updates"
            f" at small learning rates; float32 needs {format_bytes(2 * num_params)} more in all"
        )
    log(f"batch      {config.batch_arithmetic(jax.device_count())}")
    if ramp := config.ramp_arithmetic():
        log(f"ramp       {ramp}")
    if config.train.num_epochs is not None:
        log(f"length     {config.train.num_epochs:g} epochs; the number of steps follows from the packed rows")
    active = f", {format_count(num_active_params(config.model))} of them active" if config.model.experts.enabled else ""
    log(f"model      {format_count(num_params)} parameters ({num_params:,}){active}")
    if config.adapters.enabled:
        own = sum(trained_weights(config, config.model).values())
        log(f"adapters   {config.adapters.described}: {format_count(own)} parameters to train ({own / num_params:.2%})")
    if config.objective.kind != "next_token":
        log(f"objective  {config.objective.described(config.adapters)}")
    print_table(parameter_table(model))


def parameter_table(tree: Any) -> Table:
    """Lists every array of `tree` (or its `jax.ShapeDtypeStruct`): path, shape, dtype, partition, and bytes per device.

    An array without a sharding counts as replicated.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), show_footer=True, header_style="bold", footer_style="bold")
    table.add_column("parameter", footer="total", overflow="fold")
    for name in ("shape", "dtype", "split over", "per device", "all"):
        table.add_column(name, justify="right" if name in ("per device", "all") else "left")
    num_params, total_bytes, device_bytes = 0, 0, 0
    for name, leaf in named_arrays(tree).items():
        shape, split = " x ".join(map(str, leaf.shape)) or "scalar", _split_over(leaf.sharding)
        shard_shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        leaf_bytes = leaf.size * leaf.dtype.itemsize
        shard_bytes = math.prod(shard_shape) * leaf.dtype.itemsize
        num_params, total_bytes, device_bytes = num_params + leaf.size, total_bytes + leaf_bytes, device_bytes + shard_bytes
        table.add_row(name, shape, leaf.dtype.name, split, format_bytes(shard_bytes), format_bytes(leaf_bytes))
    table.columns[1].footer = f"{num_params:,}"
    table.columns[4].footer, table.columns[5].footer = format_bytes(device_bytes), format_bytes(total_bytes)
    return table


def _split_over(sharding: jax.sharding.Sharding | None) -> str:
    """Returns the mesh axes that each dimension is split over: `-, fsdp, sequence+tensor`; just `-` without any split."""
    if not isinstance(sharding, jax.NamedSharding) or sharding.is_fully_replicated:
        return "-"
    dims = ((axes,) if isinstance(axes, str) else axes or ("-",) for axes in sharding.spec)
    return ", ".join("+".join(axes) for axes in dims)


def memory_summary(compiled: Any) -> str:
    """Returns the memory that a compiled program needs on one device, in one line."""
    stats = compiled.memory_analysis()
    if stats is None:
        return "this platform does not report the memory that it needs"
    in_place = stats.alias_size_in_bytes
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes - in_place + stats.temp_size_in_bytes
    parts = [
        f"arguments {format_bytes(stats.argument_size_in_bytes)}",
        f"outputs {format_bytes(stats.output_size_in_bytes)} ({format_bytes(in_place)} in place of arguments)",
        f"temporary {format_bytes(stats.temp_size_in_bytes)}",
    ]
    if stats.peak_memory_in_bytes > stats.temp_size_in_bytes:  # on the CPU, XLA leaves temporaries out of the peak
        parts.append(f"in use at the peak {format_bytes(stats.peak_memory_in_bytes)}")
    if stats.host_temp_size_in_bytes:
        parts.append(f"offloaded to the host {format_bytes(stats.host_temp_size_in_bytes)}")
    return f"memory per device {format_bytes(total)}: {', '.join(parts)}"


class Progress:
    """Shows the progress of training: a live bar on a terminal, a line every `metrics.log_every` steps elsewhere."""

    def __init__(self, config: Config, start_step: int):
        self._num_steps, self._tokens_after = config.train.num_steps, config.tokens_after
        self._log_every = config.metrics.log_every
        self._step = start_step
        self._doing = "starting"
        self._since_line: list[Record] = []
        self._latest: deque[Record] = deque(maxlen=_SMOOTHED_STEPS)
        self._first: tuple[int, float] | None = None
        self._live = Live(get_renderable=self._render, console=CONSOLE, refresh_per_second=4) if is_interactive() else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._doing = ""
        if self._live:
            self._live.stop()

    def doing(self, what: str) -> None:
        """Sets what keeps the run from training right now; empty while it trains."""
        self._doing = what

    def update(self, record: Record) -> None:
        """Shows the record of the next finished step."""
        self._step, self._doing = record["step"], ""
        self._latest.append(record)
        self._first = self._first or (self._step, time.monotonic())
        if self._live is None:
            self._since_line.append(record)
            if self._step % self._log_every == 0 or self._step in (self._first[0], self._num_steps):
                log(self._line())
                self._since_line.clear()

    def tell_eval(self, record: Record) -> None:
        """Prints the record of an evaluation."""
        width = len(str(self._num_steps))
        text = f"step {record['step']:>{width}}/{self._num_steps}  held-out"
        text += f" loss {record['eval/loss']:.4f}" if "eval/loss" in record else ""
        text += "".join(f"  {figure}" for figure in _rewards(record, "eval"))
        if "eval/bits_per_byte" in record:
            text += f"  {record['eval/bits_per_byte']:.4f} bits per byte"
        log(text)

    def _line(self) -> str:
        """Formats the step as one aligned line, with speeds since the last line, or over more steps if those took little
        time."""
        width = len(str(self._num_steps))
        speeds, values = _Speeds(self._since_line), self._since_line[-1]
        if speeds.seconds < _LEAST_S and len(self._latest) > len(self._since_line):
            speeds = _Speeds(list(self._latest))
        skipped = f"  {values['train/skipped_steps']} skipped" if values.get("train/skipped_steps") else ""
        return (
            f"step {self._step:>{width}}/{self._num_steps}  loss {values['train/loss']:7.4f}"
            f"{''.join(f'  {figure}' for figure in _rewards(values, 'train'))}"
            f"  grad norm {values['train/grad_norm']:7.3f}  lr {values['train/learning_rate']:.2e}"
            f"  {speeds.tokens_per_sec:9,.0f} tok/s  {speeds.mfu}  {speeds.step_time_s:7.3f} s/step"
            f"  data wait {speeds.data_wait:5.1%}  ETA {self._eta()}{skipped}"
        )

    def _eta(self) -> str:
        """Estimates the time to the last step from the pace since the first one, including evaluations and checkpoints.

        The pace is in tokens, because steps of different stages may have different numbers of tokens.
        """
        if self._first is None:
            return "-"
        first_step, first_time = self._first
        tokens, seconds = self._tokens_after(self._step), self._latest[-1]["perf/step_time_s"]
        before = self._tokens_after(self._step - 1)
        if self._step > first_step:
            before, seconds = self._tokens_after(first_step), time.monotonic() - first_time
        return format_duration((self._tokens_after(self._num_steps) - tokens) / (tokens - before) * seconds)

    def _render(self) -> Group:
        """Renders two rows: progress, and as many of the figures as fit, most important first."""
        bar = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for ratio in (None, 1, None, None, None):
            bar.add_column(ratio=ratio, no_wrap=True)
        skipped = self._latest[-1].get("train/skipped_steps") if self._latest else 0
        bar.add_row(
            f"step {self._step:,}/{self._num_steps:,}",
            ProgressBar(total=self._num_steps, completed=self._step),
            f"{self._step / self._num_steps:4.0%}",
            self._doing or f"ETA {self._eta()}",
            f"[bold red]{skipped} skipped[/]" if skipped else "",
        )
        if not self._latest:
            return Group(bar)
        latest = list(self._latest)  # a copy: another thread appends to it
        speeds, values = _Speeds(latest), latest[-1]
        figures = [
            *_rewards(values, "train"),
            f"{speeds.tokens_per_sec:,.0f} tok/s",
            speeds.mfu,
            f"data wait {speeds.data_wait:.1%}",
            f"grad norm {values['train/grad_norm']:.2f}",
            f"lr {values['train/learning_rate']:.2e}",
            f"{speeds.step_time_s:.3f} s/step",
        ]
        row = Text(f"loss {values['train/loss']:.4f}", style="bold")
        for figure in figures:
            if row.cell_len + 2 + len(figure) > CONSOLE.width:
                break
            row.append(f"  {figure}", style="not bold")
        return Group(bar, row)


def _rewards(values: Record, where: str) -> list[str]:
    """Returns how well the model prefers the chosen answers, where it learns to, or what its completions are rewarded
    with."""
    forms = {
        "reward_margin": "margin {:+.3f}", "reward_accuracy": "accuracy {:.1%}", "reward": "reward {:.4f}",
        "completion_tokens": "length {:.0f}",
    }  # fmt: skip
    return [form.format(values[key]) for name, form in forms.items() if (key := f"{where}/{name}") in values]


class _Speeds:
    """Speeds over several steps."""

    def __init__(self, records: list[Record]):
        self.seconds = seconds = sum(record["perf/step_time_s"] for record in records)

        def mean_rate(key: str) -> float:
            return sum(record[key] * record["perf/step_time_s"] for record in records) / seconds

        self.step_time_s = seconds / len(records)
        self.tokens_per_sec = mean_rate("perf/tokens_per_sec")
        self.mfu = f"MFU {mean_rate('perf/mfu'):.1%} ({mean_rate('perf/mfu_full_attention'):.1%} full attention)"
        self.data_wait = sum(record["perf/data_wait_s"] for record in records) / seconds


def print_end(run_dir: Path, checkpoint: Path) -> None:
    """Prints the final summary of a run. A problem with its log is reported and has no other effect."""
    try:
        run = read_run(run_dir)
    except (UserError, OSError) as error:
        say(str(error))
        return
    if run.warning is not None:
        say(run.warning)
    print_summary(run_dir, summarize(run), checkpoint)


def told_epochs(epochs: Sequence[float]) -> str:
    """Formats the passes through each source, in the order of `data.sources`."""
    return ", ".join(f"{passes:.2f} of data.sources[{source}]" for source, passes in enumerate(epochs))


def print_summary(run_dir: Path, summary: RunSummary, checkpoint: Path) -> None:
    """Prints the results, the speed, and where everything is stored."""

    def known(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    held_out = "not evaluated" if summary.eval_loss is None else f"{summary.eval_loss:.4f}"
    if summary.eval_bits_per_byte is not None:
        held_out += f", {summary.eval_bits_per_byte:.4f} bits per byte"
    if summary.eval_reward_accuracy is not None:
        held_out += f", {summary.eval_reward_accuracy:.1%} of the pairs the right way round"
    rewards = {}
    if summary.train_reward is not None:
        rewards = {
            "train reward": f"{summary.train_reward:.4f} (mean of the last {min(FINAL_STEPS, summary.step)} steps)",
            "held-out reward": known(summary.eval_reward, ".4f"),
        }
    rows = {
        "steps": f"{summary.step:,} of {known(summary.num_steps, ',')}, {known(summary.tokens, ',')} tokens",
        **({"epochs": told_epochs(summary.epochs)} if summary.epochs else {}),
        **rewards,
        "train loss": f"{known(summary.train_loss, '.4f')} (mean of the last {min(FINAL_STEPS, summary.step)} steps)",
        **({} if rewards else {"held-out loss": held_out}),
        "speed": f"{known(summary.tokens_per_sec, ',.0f')} tokens/s,"
        f" {known(summary.tokens_per_sec_per_device, ',.0f')} per device (median)",
        "MFU": f"{known(summary.mfu, '.1%')} (median),"
        f" or {known(summary.mfu_full_attention, '.1%')} counting full attention",
        "wall time": f"{format_duration(summary.wall_time_s or 0)},"
        f" of which {format_duration(summary.steps_time_s)} in steps,"
        f" {summary.restarts} restart{'' if summary.restarts == 1 else 's'}",
        "goodput": str(summary.goodput or "-"),
        "run": str(run_dir),
        "checkpoint": str(checkpoint),
        "metrics": str(run_dir / METRICS_FILE),
        "report": f"python -m llamajax.report {shlex.quote(str(run_dir))}",
    }
    if jax.process_index() == 0:
        CONSOLE.rule(summary.stop_reason or "running", align="left")
    for label, text in rows.items():
        log(f"{label:<14} {text}")
