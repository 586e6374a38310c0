"""Collects the metrics of a run: fetched one step late, so that the host never waits for the device that it feeds."""

import contextlib
import dataclasses
import hashlib
import json
import math
import platform
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

import llamajax
from llamajax.config.run import Config
from llamajax.estimates.formulas import num_params
from llamajax.estimates.training_flops import training_flops_per_token
from llamajax.processes import peers
from llamajax.watch import console, run_log, startup_time
from llamajax.watch.hosts import Hosts
from llamajax.watch.peak import peak_flops
from llamajax.watch.run_log import Record

TENSORBOARD_DIR = "tensorboard"
LAYERS_EVERY = 10
"""Steps between two records with numbers of each layer, which are longer than all others together."""


@dataclasses.dataclass(kw_only=True)
class _Held:
    """A dispatched step; its metrics are not fetched yet."""

    step: int
    values: Mapping[str, Any]
    arrived: float | None = None
    """When the metrics were ready, if the host waited for them."""
    probe_s: float = 0.0
    """Seconds after that spent on timing the devices."""


class MetricsWriter:
    """Takes the metrics of every step and writes them to all sinks; a context manager around the training loop.

    Every process calls every method: a process that did not fetch could run many steps ahead. Only process 0 writes.
    """

    def __init__(
        self,
        config: Config,
        *,
        start_step: int,
        keys: Sequence[float] | None = None,
        epochs: Callable[[int], Sequence[float]] = lambda step: (),
    ):
        """Prepares to log the steps after `start_step`; for unknown devices, measures the peak within half a second.

        Args:
            config: the run.
            start_step: number of finished steps so far.
            keys: average number of keys that a query sees in each stage, where documents are closed to each other; see
                `flops_per_token`.
            epochs: returns the passes through each source after a number of finished steps.
        """
        self._config = config
        self.run_dir = Path(config.run_dir).expanduser()
        self._start_step = self._last_step = start_step
        self._keys, self._epochs = keys, epochs
        self._stages = config.data.all_stages
        self._num_devices = jax.device_count()
        self._peak = peak_flops(config.model.compute_dtype)
        self._is_main_process = jax.process_index() == 0
        self._held: _Held | None = None
        self._clock = self._free = 0.0
        self._waited_s = 0.0  # seconds of waiting for batches since `_clock`
        self._of_hosts: Record = {}
        others, ratio = peers.current(), config.metrics.straggler_ratio
        self._hosts = None if others is None or ratio is None else Hosts(others, jax.process_count(), ratio)
        self._is_paused = False

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:  # closes the open sinks if opening the next one fails
            if self._is_main_process:
                self._open_sinks(stack)
            self._sinks = stack.pop_all()
        self._clock = self._free = time.perf_counter()
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        with self._sinks:
            if exc is None:
                self.flush()
                reason = "finished" if self._last_step >= self._config.train.num_steps else "stopped"
            else:  # the held step may be lost with the device; fetching it would hide the error
                lines = str(exc).splitlines()
                reason = f"{type(exc).__name__}: {lines[0] if lines else ''}"
            if self._hosts is not None:
                self._hosts.write(self.run_dir, at_once=True)
            self.event("stop", reason=reason)

    def write(self, step: int, values: Mapping[str, Any], *, data_wait_s: float = 0.0) -> Record | None:
        """Takes the metrics of a step that was just dispatched; fetches and writes the metrics of the step before.

        Args:
            step: number of the step, 1 for the first: the number of finished steps once it is done.
            values: scalars (arrays that may not be computed yet, or numbers), under the names that `train_step` gives them.
            data_wait_s: seconds that the step waited for its batch. They count towards the step before if its metrics are
                yet to be fetched: the wait came before that, and a step lasts from fetch to fetch.

        Returns:
            The record of the step before, or None; `train/*` is the same on every process, `perf/*` is not.
        """
        host_s = time.perf_counter() - self._free - data_wait_s
        was_late = self._held is not None and self._held.arrived is None and _is_computed(self._held.values)
        is_behind = self._held is not None and self._held.arrived is not None
        self._waited_s += 0.0 if is_behind else data_wait_s
        finished = self.flush()
        self._waited_s += data_wait_s if is_behind else 0.0
        if finished is None:
            self._free = time.perf_counter()
        self._held = _Held(step=step, values=values)
        if self._hosts is not None:
            if finished is not None:
                self._hosts.add_step(finished["perf/step_time_s"], data_wait_s, host_s, was_late=was_late)
                if self._hosts.probe_due(step):
                    jax.block_until_ready(list(values.values()))
                    self._held.arrived = time.perf_counter()
                    self._hosts.probe()
                    self._held.probe_s = time.perf_counter() - self._held.arrived
                    self._free = time.perf_counter()
            self._compare_hosts(step)  # even if a pause has fetched the step before
        return finished

    def flush(self) -> Record | None:
        """Waits for the newest step and writes its metrics, unless that has been done; see `write`."""
        if self._held is None:
            return None
        held, self._held = self._held, None
        fetched = _numbers(jax.device_get(held.values), with_layers=held.step % LAYERS_EVERY == 0)
        self._free = time.perf_counter()
        now = held.arrived or self._free
        perf = self._perf(held.step, now - self._clock, self._waited_s) | self._of_hosts
        record = {"step": held.step, "time": round(time.time(), 3), **fetched, **perf, **self._of_data(held.step)}
        self._clock, self._waited_s = now + held.probe_s, 0.0
        self._last_step, self._of_hosts = held.step, {}
        if self._is_main_process:
            self._write(record)
            self._progress.update(record)
        return record

    @contextlib.contextmanager
    def pause(self, doing: str) -> Iterator[None]:
        """Surrounds everything that is not a training step: flushes first, and excludes the time inside from all steps.

        A pause inside another one is part of it.
        """
        if self._is_paused:
            yield
            return
        self.flush()
        started = time.perf_counter()
        self._is_paused = True
        if self._is_main_process:
            self._progress.doing(doing)
            if doing == "saving":  # a run that resumes from the checkpoint never recomputes these steps
                self._metrics_file.wait()
        yield
        self._is_paused = False
        seconds = time.perf_counter() - started
        self._clock += seconds
        self._free = time.perf_counter()
        if self._hosts is not None and doing == "saving":
            self._hosts.add_save(seconds)
        self.event("pause", doing=doing, seconds=round(seconds, 3))
        if self._is_main_process:
            self._progress.doing("")

    def tell(self, doing: str) -> None:
        """Shows what the run is doing in a pause, on a terminal."""
        if self._is_main_process:
            self._progress.doing(doing)

    def write_eval(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the result of an evaluation after `step`: scalars by name (`loss`, `bits_per_byte`), as `eval/*`."""
        self.flush()
        fetched = {f"eval/{name}": np.asarray(value).tolist() for name, value in jax.device_get(values).items()}
        if self._is_main_process:
            record = {"step": step, "time": round(time.time(), 3), **fetched}
            self._write(record)
            self._progress.tell_eval(record)

    def event(self, name: str, **facts: Any) -> None:
        """Records an event of the run in `events.jsonl`, with the newest finished step."""
        if self._is_main_process:
            record = {"time": round(time.time(), 3), "event": name, "step": self._last_step, **facts}
            self._events_file.append_record(f"{run_log.encode(record)}\n".encode())

    def _compare_hosts(self, step: int) -> None:
        """Reports a host that becomes slow or recovers; only process 0 has the reports of all."""
        assert self._hosts is not None
        changes, metrics = self._hosts.report(step)
        self._of_hosts |= metrics
        for change in changes:
            host = self._hosts.name(change.process)
            console.log(change.line(host))
            self.event("slow", host=host, **dataclasses.asdict(change))
        self._hosts.write(self.run_dir)

    def _open_sinks(self, stack: contextlib.ExitStack) -> None:
        config = self._config
        self.run_dir.mkdir(parents=True, exist_ok=True)
        metrics_path, events_path = self.run_dir / run_log.METRICS_FILE, self.run_dir / run_log.EVENTS_FILE
        metrics_path.touch()
        events_path.touch()
        dropped = run_log.drop_later_steps(metrics_path, self._start_step)
        run_log.drop_later_steps(events_path, math.inf)  # removes no event, only a torn line
        self._metrics_file = stack.enter_context(run_log.Appender(metrics_path, console.say))
        self._events_file = stack.enter_context(run_log.Appender(events_path, console.say))
        self._others: list[Callable[[Record], object]] = []
        if config.metrics.tensorboard:
            self._others.append(stack.enter_context(_tensorboard(self.run_dir, self._start_step)))
        if config.metrics.wandb:
            self._others.append(stack.enter_context(_wandb_run(self.run_dir, config)).log)
        self._progress = stack.enter_context(console.Progress(config, self._start_step))
        self.event(
            "start",
            **startup_time.first_step(),
            lost_steps=dropped.steps,
            lost_s=round(dropped.seconds, 3),
            newest_record=dropped.newest,
            llamajax=llamajax.__version__,
            jax=jax.__version__,
            python=platform.python_version(),
            devices=self._num_devices,
            device_kind=jax.devices()[0].device_kind,
            processes=jax.process_count(),
            mesh={axis: size for axis, size in config.mesh.axis_sizes(self._num_devices).items() if size > 1},
            peak_flops_per_device=self._peak.flops_per_sec,
            peak_flops_source=self._peak.source,
            num_params=num_params(config.model),
            num_steps=config.train.num_steps,
            tokens_per_step=config.train.global_batch_size * config.data.seq_len,
            config_sha256=hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode()).hexdigest(),
        )

    def _of_data(self, step: int) -> Record:
        """Returns what the run has read after this step: positions of all rows with padding, and passes through each
        source."""
        epochs = {f"{run_log.EPOCHS}{source}": passes for source, passes in enumerate(self._epochs(step))}
        return {"data/tokens": self._config.tokens_after(step), **epochs}

    def _perf(self, step: int, step_time_s: float, data_wait_s: float) -> Record:
        """Returns the speeds of one step. Every position of the batch counts as a token: the device works on padding as
        well."""
        stage = self._config.data.stage_at(step - 1)
        seq_len, keys = self._stages[stage].seq_len, None if self._keys is None else self._keys[stage]
        tokens_per_sec = self._config.train.batch_size_at(step - 1) * seq_len / step_time_s
        share_per_flop = tokens_per_sec / self._num_devices / self._peak.flops_per_sec
        return {
            "perf/step_time_s": step_time_s,
            "perf/data_wait_s": data_wait_s,
            "perf/tokens_per_sec": tokens_per_sec,
            "perf/tokens_per_sec_per_device": tokens_per_sec / self._num_devices,
            "perf/mfu": training_flops_per_token(self._config, seq_len, keys=keys) * share_per_flop,
            "perf/mfu_full_attention": training_flops_per_token(self._config, seq_len, full_attention=True) * share_per_flop,
        }

    def _write(self, record: Record) -> None:
        self._metrics_file.append_record(f"{run_log.encode(record)}\n".encode())
        for write in self._others:
            write(record)


def _numbers(values: Mapping[str, Any], *, with_layers: bool) -> Record:
    """Returns the numbers of a step as `train/NAME`, those of each layer, if at all, as `train/NAME/0` and so on."""
    numbers: Record = {}
    for name, value in values.items():
        if np.ndim(value) == 0:
            numbers[f"train/{name}"] = np.asarray(value).item()
        elif with_layers:
            numbers |= {f"train/{name}/{layer}": own for layer, own in enumerate(np.asarray(value).tolist())}
    return numbers


def _is_computed(values: Mapping[str, Any]) -> bool:
    """Returns whether all values can be fetched without waiting."""
    arrays: list[Any] = [value for value in values.values() if isinstance(value, jax.Array)]
    return all(array.is_ready() for array in arrays)


@contextlib.contextmanager
def _tensorboard(run_dir: Path, start_step: int) -> Iterator[Callable[[Record], None]]:
    """Yields a function that adds the numbers of a step to an event file.

    Replaces tensorboardX's own writer: a full disk ends its thread, and the run then waits for it forever.
    """
    # Takes a second to import where torch is installed.
    from tensorboardX.proto import event_pb2, summary_pb2
    from tensorboardX.record_writer import masked_crc32c

    events: Any = event_pb2
    summaries: Any = summary_pb2
    directory = run_dir / TENSORBOARD_DIR
    directory.mkdir(exist_ok=True)
    now = time.time()
    name = f"events.out.tfevents.{int(now)}.{platform.node()}.{start_step}"
    with run_log.Appender(directory / name, console.say) as file:

        def append(**content: Any) -> None:
            """Appends an event as a TFRecord: length, its checksum, the event, its checksum."""
            data = events.Event(**content).SerializeToString()
            length = struct.pack("<Q", len(data))
            checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
            file.append_record(length + checksums[0] + data + checksums[1])

        def write(record: Record) -> None:
            numbers = {name: value for name, value in record.items() if name not in ("step", "time")}
            values = [summaries.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
            append(wall_time=record["time"], step=record["step"], summary=summaries.Summary(value=values))

        append(wall_time=now, file_version="brain.Event:2")
        # Makes TensorBoard hide points of an earlier start that are recomputed.
        start = events.SessionLog(status=events.SessionLog.START)
        append(wall_time=now, step=start_step + 1, session_log=start)
        yield write


def _wandb_run(run_dir: Path, config: Config) -> Any:
    import wandb  # pyright: ignore[reportMissingImports]  # optional

    id_path = run_dir / "wandb_id"
    if not id_path.exists():
        id_path.write_text(secrets.token_hex(4))
    run = wandb.init(
        project=config.metrics.wandb_project,
        entity=config.metrics.wandb_entity,
        name=config.metrics.wandb_name or run_dir.name,
        tags=list(config.metrics.wandb_tags),
        id=id_path.read_text(),
        resume="allow",
        dir=str(run_dir),
        config=dataclasses.asdict(config),
    )
    # W&B's own step may not go back after a restart, so the x axis is ours.
    run.define_metric("*", step_metric="step")
    return run
