"""Compares the time that each process spends on its own work in a step. All measure; process 0 collects and compares."""

import contextlib
import json
import math
import socket
import statistics
import threading
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from llamajax.disk import write_atomically
from llamajax.processes.peers import Peers
from llamajax.watch import run_log
from llamajax.watch.stragglers import REPORT_EVERY, Comparison, Slow

PROBE_SHARE = 0.005
"""Share of training time that may be spent on timing the devices."""

_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 32  # rounds of the fixed program per probe
_KEPT = 100  # reports of each process that go into its medians
_WRITE_S = 60.0  # seconds between writes of the medians


class Hosts:
    """The measurements of this process and, on process 0, of all."""

    def __init__(self, peers: Peers, num_processes: int, ratio: float) -> None:
        """Compiles the fixed program for the devices of this process. See `Comparison` for `ratio`."""
        self._peers = peers
        peers.reports.clear()  # reports from before a rollback have later steps and would hide new ones
        self._comparison = Comparison(num_processes, ratio)
        self._devices_program = DeviceProbe()
        self._round_s = self._devices_program.seconds(_FEWEST_ROUNDS)
        self._num_rounds = _FEWEST_ROUNDS
        self._num_unprobed = 1
        self._steps: list[tuple[float, float, float]] = []
        self._save_s: list[float] = []
        self._device_s: float | None = None
        self._told: dict[int, dict[str, deque[float]]] = defaultdict(lambda: defaultdict(lambda: deque(maxlen=_KEPT)))
        self._names: dict[int, str] = {}
        self._newest: dict[int, int] = {}
        self._written = time.monotonic()
        self._writer: threading.Thread | None = None

    def add_step(self, step_time_s: float, data_wait_s: float, host_s: float, *, was_late: bool) -> None:
        """Records a step.

        Args:
            step_time_s: seconds of the whole step.
            data_wait_s: seconds of waiting for a batch.
            host_s: seconds of other work in this process before it dispatched the next step.
            was_late: whether its devices finished before that. Otherwise they waited for neither, and other processes did
                not.
        """
        self._num_unprobed += 1
        self._steps.append((step_time_s, data_wait_s * was_late, max(0.0, host_s) * was_late))

    def add_save(self, seconds: float) -> None:
        """Records the stall of a save."""
        self._save_s.append(seconds)

    def probe_due(self, step: int) -> bool:
        """Returns whether to time the devices after `step`, when they are idle; as often as `PROBE_SHARE` allows."""
        if step % REPORT_EVERY or not self._steps:
            return False
        affordable_s = PROBE_SHARE * statistics.median(step_time_s for step_time_s, _, _ in self._steps)
        # In powers of 2, so that all processes probe after the same steps: the others wait for each one that probes.
        every = REPORT_EVERY
        while every * affordable_s < _FEWEST_ROUNDS * self._round_s:
            every *= 2
        self._num_rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(every * affordable_s / self._round_s)))
        return step % every == 0 and self._num_unprobed >= every

    def probe(self) -> None:
        """Times the devices, which must be idle, for the duration that `probe_due` computed: some milliseconds."""
        self._round_s = self._device_s = self._devices_program.seconds(self._num_rounds)
        self._num_unprobed = 0

    def report(self, step: int) -> tuple[list[Slow], dict[str, float]]:
        """Sends the measurements since the last report every `REPORT_EVERY` steps; two steps later, process 0 compares all.

        The next step is dispatched as soon as the devices are timed, while the reports of others are still on their way.

        Returns:
            Hosts that have become slow or recovered, and metrics; both empty in between and on other processes.
        """
        if step % REPORT_EVERY == 0 and self._steps:
            self._send(step)
        if self._peers.rank or step % REPORT_EVERY != 2 or 0 not in self._peers.reports:
            return [], {}
        for process, report in list(self._peers.reports.items()):
            if report["step"] > self._newest.get(process, 0):
                self._newest[process], self._names[process] = report["step"], report["name"]
                self._comparison.take(process, report)
                for kind in ("step_time", "data", "host", "device", "save"):
                    if kind in report:
                        self._told[process][kind].append(report[kind])
        slowest = self._comparison.slowest()
        metrics = {} if slowest is None else {"perf/slowest_process": slowest[0], "perf/slowest_ratio": slowest[1]}
        return self._comparison.changes(self._peers.reports[0]["step_time"]), metrics

    def _send(self, step: int) -> None:
        step_time_s, data_s, host_s = (statistics.fmean(column) for column in zip(*self._steps, strict=True))
        own = {"step": step, "data": data_s, "host": host_s, "step_time": step_time_s, "name": socket.gethostname()}
        own |= {"device": self._device_s} if self._device_s is not None else {}
        own |= {"save": statistics.fmean(self._save_s)} if self._save_s else {}
        self._peers.report(own)
        self._steps, self._save_s, self._device_s = [], [], None

    def name(self, process: int) -> str:
        """Returns the host of a process that has reported."""
        return self._names[process]

    def write(self, run_dir: Path, *, at_once: bool = False) -> None:
        """Writes the medians of all to the run directory, on process 0: once a minute, or `at_once`, and then waits for
        it."""
        if self._writer is not None and (at_once or not self._writer.is_alive()):
            self._writer.join()
            self._writer = None
        if self._told and self._writer is None and (at_once or time.monotonic() - self._written > _WRITE_S):
            self._written = time.monotonic()
            rows = [
                {"process": process, "host": self._names[process]}
                | {f"{kind}_s": statistics.median(values) for kind, values in self._told[process].items()}
                for process in sorted(self._told)
            ]
            self._writer = threading.Thread(target=_write, args=(run_dir / run_log.HOSTS_FILE, json.dumps(rows).encode()))
            self._writer.start()
            if at_once:
                self._writer.join()


def _write(path: Path, content: bytes) -> None:
    with contextlib.suppress(OSError):  # the run does not need it, and its log reports the disk
        write_atomically(path, content)


class DeviceProbe:
    """A fixed program without collectives for each device of this process, the same in all processes: matrix products."""

    def __init__(self) -> None:
        """Compiles the program and runs it once."""
        is_cpu = jax.default_backend() == "cpu"
        size, self._repeats, dtype = (192, 4, jnp.float32) if is_cpu else (2048, 48, jnp.bfloat16)
        self._programs: list[tuple[Any, jax.Array]] = []
        for device in jax.local_devices():
            # A mesh of this device alone: the process's mesh spans all devices and rejects arrays on only one of them.
            with jax.set_mesh(jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,), devices=[device])):
                matrix = jax.device_put(np.full((size, size), 1 / size, dtype), device)
                program = jax.jit(self._products).lower(matrix).compile()
                program(matrix).block_until_ready()
                self._programs.append((program, matrix))

    def _products(self, matrix: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, self._repeats, lambda _, product: product @ matrix, matrix)

    def seconds(self, num_rounds: int) -> float:
        """Returns the seconds of a round, from a common start until the slowest device is done: a mean without the slowest
        tenth.

        A mean, because a slow device may be slowed down intermittently, in slices of milliseconds. The slowest rounds are
        excluded, because a single unrelated delay would outweigh all others.
        """
        rounds = []
        for _ in range(num_rounds):
            began = time.perf_counter()
            jax.block_until_ready([program(matrix) for program, matrix in self._programs])
            rounds.append(time.perf_counter() - began)
        return statistics.fmean(sorted(rounds)[: num_rounds - math.ceil(num_rounds / 10)])
