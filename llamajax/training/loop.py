"""The loop of a run: steps, evaluations and checkpoints."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamajax import data
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.run import Config
from llamajax.data.loader import Loader
from llamajax.data.position import PassedOver, next_row
from llamajax.errors import SaveError
from llamajax.evaluation.held_out import evaluate
from llamajax.launching.heartbeat import WAITING
from llamajax.planning.scheduling import Compilation
from llamajax.step.state import TrainState
from llamajax.training.bad_steps import BadSteps
from llamajax.training.replicas import Replicas
from llamajax.training.stop import StopSignal
from llamajax.training.watchdog import Watchdog
from llamajax.watch import console, metrics, run_log
from llamajax.watch.trace import trace


@dataclass(frozen=True)
class Start:
    """Where the loop begins."""

    state: TrainState
    """After `step` steps; the first one uses it up."""
    step: int = 0
    """Finished steps."""
    passed_over: tuple[PassedOver, ...] = ()
    """Rows that the run does not take."""
    recent_losses: Sequence[float] = ()
    """What the next losses are compared with; see `BadSteps`."""


def train(
    config: Config,
    start: Start,
    num_eval_rows: int,
    compilation: Compilation,
    replicas: Replicas,
    dataset: data.Dataset,
    meta: dict[str, Any],
    files: Mapping[str, bytes],
    checkpointer: Checkpointer,
    stop: StopSignal,
    watchdog: Watchdog,
) -> tuple[TrainState, bool]:
    """The loop: steps, evaluations and checkpoints, until the last step or a request to stop; whether it was that.

    Args:
        config: the run.
        start: where it begins.
        num_eval_rows: held-out rows of an evaluation.
        compilation: `train_step` of the run.
        replicas: compares what devices hold alike, before every checkpoint too.
        dataset: what it trains on.
        meta: what its checkpoints say about themselves.
        files: name and content of what is kept with them.
        checkpointer: writes them.
        stop: the requests to stop.
        watchdog: ends the process when something takes too long.

    Raises:
        GoBack: a step went wrong; the caller is to go back and begin the loop again.
        DivergedError: one did, and the run has gone back often enough.
        CorruptionError: a device is wrong again and again.
    """
    watchdog.begin("first step")
    num_steps, rows_per_step, passed_over = config.train.num_steps, config.train.global_batch_size, start.passed_over
    state, step = start.state, start.step
    saved_step = checkpointer.newest or 0  # below `step` where the run goes on from a local disk, which may be lost
    bad_steps = BadSteps(config, start.recent_losses, len(passed_over))
    keys = None if config.model.attend_across_documents else dataset.mean_keys(config.model.sliding_window)
    with (
        metrics.MetricsWriter(config, start_step=step, keys=keys) as writer,
        Loader(dataset, config, step, passed_over) as loader,
        trace(config, step) as trace_before,
    ):
        writer.event("compile", from_cache=compilation.from_cache, **compilation.facts)
        writer.event(
            "data", fingerprint=dataset.fingerprint, epochs=dataset.epochs(next_row(num_steps, rows_per_step, passed_over))
        )

        def check(record: run_log.Record | None) -> None:
            if record is not None:
                watchdog.finished(record["step"])
            bad_steps.look(record, newest)

        def newest() -> int | None:
            with contextlib.suppress(SaveError):  # which was told
                checkpointer.wait()
            return checkpointer.newest

        def evaluate_now() -> None:
            with watchdog.phase("evaluate"), writer.pause("evaluating"):
                result = evaluate(config, state.model, dataset, num_eval_rows, stop.requested)
            if result is not None:
                writer.write_eval(step, result)

        def meta_of_step() -> dict[str, Any]:
            position = {
                "position": next_row(step, rows_per_step, passed_over),
                "passed_over": [dataclasses.asdict(window) for window in passed_over],
            }
            return meta | {"data": position | meta["data"], "recent_losses": bad_steps.recent_losses}

        def compare_replicas() -> None:
            with writer.pause("comparing replicas"):
                replicas.check(step, state, writer.event)

        def save_locally() -> None:
            compare_replicas()
            with watchdog.phase("save"), writer.pause("saving"):
                checkpointer.save_locally(step, state, meta_of_step(), files)

        def save() -> None:
            nonlocal saved_step
            compare_replicas()
            with watchdog.phase("save"), writer.pause("saving"):
                checkpointer.save(step, state, meta_of_step(), files)
            writer.event("save")
            saved_step = step

        def due(every: int | None) -> bool:
            return every is not None and step % every == 0

        compare_replicas()
        save_due = False
        while step < num_steps and not stop.requested():
            trace_before(step + 1, state)
            watchdog.doing("waiting for its batch")
            _, batch = next(loader)
            watchdog.doing(WAITING)
            state, values = compilation.step(state, batch)
            step += 1
            check(writer.write(step, values, data_wait_s=loader.wait_s))
            watchdog.doing("")
            save_due = save_due or due(config.checkpoint.save_every) or checkpointer.retry_due(step)
            if save_due:
                check(writer.flush())
                if not bad_steps.num_nonfinite:  # else it would take the place of a checkpoint to go back to
                    save()
                    save_due = False
            elif due(config.checkpoint.local_every):
                check(writer.flush())
                if not bad_steps.num_nonfinite:
                    save_locally()
            elif replicas.due(step):
                check(writer.flush())
                compare_replicas()
            if due(config.train.eval_every) and step < num_steps:
                check(writer.flush())
                evaluate_now()
        trace_before(step + 1, state)
        check(writer.flush())
        if step != saved_step:
            save()
        if step == num_steps and config.train.eval_batches and config.data.held_out_fraction:
            evaluate_now()
        with watchdog.phase("save"), writer.pause("saving"):
            checkpointer.finish(save_again=save)
        stopped = stop.requested()
    if stopped:
        console.log(f"stopped    at step {step}{', which is saved' if step else ''}; the same command goes on from there")
    return state, stopped
