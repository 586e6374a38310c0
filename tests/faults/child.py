"""llamajax.train, with places where the campaign can break it: `python -m tests.faults.child --config ...`.

A fault is a file `<folder>/laid/<point>.<rank>` that says what to do. Whoever comes to the point first on that rank
moves it to `<folder>/fired/`, with the moment, and does it: once, whatever is started again. LLAMAJAX_CAMPAIGN names the
folder. Without a fault, nothing is done at a point but to look for one.
"""

import ctypes
import dataclasses
import errno
import functools
import itertools
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

FOLDER = pathlib.Path(os.environ["LLAMAJAX_CAMPAIGN"])


def own_rank() -> int:
    """The number of this process, before the product is imported."""
    told = [argument.rpartition("=")[2] for argument in sys.argv if argument.startswith("--distributed.process_id=")]
    return int(told[0] if told else os.environ.get("LLAMAJAX_PROCESS_ID", "0"))


RANK = own_rank()


def hit(point: str) -> None:
    """Does what is laid at `point` for this rank, if anything is."""
    time.sleep(SLOWER.get(point, 0.0))
    laid, fired = FOLDER / "laid" / f"{point}.{RANK}", FOLDER / "fired" / f"{point}.{RANK}"
    try:
        fault = json.loads(laid.read_text())
        taken = fired.with_suffix(f".{os.getpid()}")
        laid.rename(taken)
    except FileNotFoundError:
        return
    taken.write_text(json.dumps({"at": time.monotonic(), "pid": os.getpid(), **fault}))
    taken.rename(fired)
    ACTIONS[fault["do"]](fault)


SLOWER: dict[str, float] = {}
"""Seconds that are lost at a point every time."""


def _kill(fault: dict[str, Any]) -> None:
    if "after_s" in fault:
        threading.Timer(fault["after_s"], os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def _raise(fault: dict[str, Any]) -> None:
    raise RuntimeError("laid by the campaign")


def _meet_alone(fault: dict[str, Any]) -> None:
    from llamajax.processes.peers import everyones

    everyones(None, about="what no other process asks for")


def _hold(fault: dict[str, Any]) -> None:
    while not (FOLDER / "release").exists():
        time.sleep(0.01)


def _deadlock(fault: dict[str, Any]) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _hold_gil(fault: dict[str, Any]) -> None:
    while True:
        ctypes.PyDLL(None).sleep(1_000_000)  # a PyDLL does not give the interpreter's lock back


def _spin(fault: dict[str, Any]) -> None:
    deque(itertools.repeat(0), maxlen=0)  # a loop in C, without end, at full speed, that looks for no signal


def _fail_to_read(fault: dict[str, Any]) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "text.jsonl")


def _flip_bits(fault: dict[str, Any]) -> None:
    PacedStep.flips, PacedStep.seed = -1 if fault.get("always") else 1, fault["seed"]


def flipped(state: Any) -> Any:
    """The state with one other bit in what this process's first device holds."""
    import jax

    from tests.faults import flips

    (flip,) = flips.random_flips(state, 1, seed=PacedStep.seed)
    PacedStep.seed += 1
    place = [*jax.sharding.get_mesh().devices.flat].index(jax.local_devices()[0])
    return flips.flipped(state, dataclasses.replace(flip, place=place))


def _slow_down(fault: dict[str, Any]) -> None:
    SLOWER[fault["point"]] = fault["by_s"]
    time.sleep(fault["first_s"])


def _slow_down_device(fault: dict[str, Any]) -> None:
    PacedStep.slower = fault["by"]


ACTIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "kill": _kill,
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "fail to read": _fail_to_read,
    "flip bits": _flip_bits,
    "meet alone": _meet_alone,
    "slow down": _slow_down,
    "slow down the device": _slow_down_device,
    "deadlock": _deadlock,
    "hold": _hold,
    "hold the GIL": _hold_gil,
    "spin": _spin,
    "sleep": lambda fault: time.sleep(1_000_000),
}


def patch(owner: Any, name: str, before: str | None, after: str | None = None) -> None:
    """Comes to the points `before` and `after` around calls of an attribute, which must be there."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            hit(before)
        outcome = original(*args, **kwargs)
        if after is not None:
            hit(after)
        return outcome

    setattr(owner, name, patched)


class PacedStep:
    """The compiled step with points around it. Takes at least `STEP_S`, as one of a real model would for whoever watches."""

    flips = 0
    """Steps after which a bit of the state flips; -1: all."""
    seed = 0
    """Chooses the next bit."""
    done_at = 0.0
    """When the devices will have done the steps that they were given."""
    slower = 0.0
    """Share of its time that whatever the devices compute takes more."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, state: Any, batch: Any) -> Any:
        hit("step")
        PacedStep.done_at = max(PacedStep.done_at, time.monotonic()) + (1 + PacedStep.slower) * STEP_S
        state, values = self._compiled(state, batch)
        hit("after step")
        if PacedStep.flips:
            PacedStep.flips, state = min(0, PacedStep.flips), flipped(state)
        return state, values


STEP_S = float(os.environ.get("LLAMAJAX_CAMPAIGN_STEP_S", "0.03"))
PROBE_S = 0.003


def _pace(metrics: Any) -> None:
    """Has the metrics of a step arrive when its devices are done: whoever waits or looks for them finds that."""
    writer, hosts = metrics.MetricsWriter, metrics.Hosts
    flush, is_computed, probe_due, held_done_at = writer.flush, metrics._is_computed, hosts.probe_due, 0.0

    @functools.wraps(flush)
    def paced_flush(self: Any) -> Any:
        nonlocal held_done_at
        if self._held is not None:  # a step, behind which another one may have been dispatched since
            time.sleep(max(0.0, held_done_at - time.monotonic()))
        held_done_at = PacedStep.done_at
        return flush(self)

    @functools.wraps(probe_due)
    def paced_probe_due(self: Any, step: int) -> bool:
        due = probe_due(self, step)
        if due:  # the writer waits for the devices then
            time.sleep(max(0.0, PacedStep.done_at - time.monotonic()))
        return due

    writer.flush, hosts.probe_due = paced_flush, paced_probe_due
    metrics._is_computed = lambda values: time.monotonic() >= held_done_at and is_computed(values)


def _pace_probe(probe: Any) -> None:
    """Has the fixed program take its time likewise; that of cores that other processes use too would say nothing."""
    prepare = probe.__init__

    def paced(program: Any) -> Callable[[Any], Any]:
        def run(matrix: Any) -> Any:
            done_at = time.monotonic() + (1 + PacedStep.slower) * PROBE_S
            product = program(matrix).block_until_ready()
            time.sleep(max(0.0, done_at - time.monotonic()))
            return product

        return run

    @functools.wraps(prepare)
    def paced_prepare(self: Any) -> None:
        prepare(self)
        self._programs = [(paced(program), matrix) for program, matrix in self._programs]

    probe.__init__ = paced_prepare
    patch(probe, "seconds", "device")


def lay_points() -> None:
    """Puts the points into the product."""
    from llamajax.checkpoint import write
    from llamajax.data.rows.loader import Loader
    from llamajax.training import loop, run, stages
    from llamajax.watch import hosts, metrics

    patch(run.startup, "join_run", "join")
    patch(run, "prepare", "prepare")
    patch(run.console, "print_end", "end")
    patch(write.Checkpointer, "restore", "load", "loaded")
    patch(write.Checkpointer, "save", "save")
    patch(write.Checkpointer, "_commit", "write")
    patch(write.ArrayWriter, "finalize", "finalize")
    patch(write.commit, "hash_share", "hash")
    patch(write.retention, "delete_old", "committed")
    patch(write.retention, "finish_deleting", "delete")
    patch(Loader, "_load", "loader")
    patch(metrics.MetricsWriter, "write", "callback", "reported")
    _pace(metrics)
    _pace_probe(hosts.DeviceProbe)
    patch(loop, "evaluate", "evaluate")

    compile_here = stages.compile_here

    def compile_with_points(*args: Any) -> Any:
        hit("compile")
        compilation = compile_here(*args)
        return dataclasses.replace(compilation, step=PacedStep(compilation.step))

    stages.compile_here = compile_with_points
    _patch_disk(write)
    if poison := os.environ.get("LLAMAJAX_CAMPAIGN_POISON"):
        _poison(*poison.split(":"))


def _poison(does: str, token: str) -> None:
    """Has batches with the token give a spike of the loss, or gradients that are not finite: in the step as compiled."""
    import jax
    import jax.numpy as jnp

    from llamajax.step import step

    summed_gradients, factor = step.summed_gradients, {"spike": 100.0}.get(does) or float(does)

    def poisoned(run: Any, model: Any, batch: Any) -> Any:
        metrics, grads = summed_gradients(run, model, batch)
        by = jnp.where(jnp.any(batch["tokens"] == int(token)), factor, 1.0)
        loss = metrics["loss"] * (by if does == "spike" else 1.0)
        return metrics | {"loss": loss}, jax.tree.map(lambda gradient: gradient * by, grads)

    step.summed_gradients = poisoned


def _patch_disk(write: Any) -> None:
    """Points between the operations by which a step appears and disappears."""
    patch(write.commit.manifest, "write", "manifest")
    rename, rmtree = pathlib.Path.rename, write.shutil.rmtree

    def rename_with_point(path: pathlib.Path, target: Any) -> pathlib.Path:
        if path.name.endswith(".saving"):
            hit("rename")
        return rename(path, target)

    def rmtree_with_point(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith(".deleting"):
            for file in itertools.islice((file for file in pathlib.Path(path).rglob("*") if file.is_file()), 2):
                file.unlink()
            hit("deleting")
        rmtree(path, *args, **kwargs)

    pathlib.Path.rename = rename_with_point  # pyright: ignore[reportAttributeAccessIssue] (a fault)
    write.shutil.rmtree = rmtree_with_point


def main() -> None:
    """Says that this rank is there, then trains."""
    with (FOLDER / f"pids.{RANK}").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    hit("start")
    if version := os.environ.get("LLAMAJAX_CAMPAIGN_JAX_VERSION"):
        import jax

        jax.__version__ = version
    lay_points()
    from llamajax.train import main as train

    train()


if __name__ == "__main__":
    main()
