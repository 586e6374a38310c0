"""The loop of a run: steps, evaluations and checkpoints."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamajax.checkpoint.write import Checkpointer
from llamajax.config.run import Config
from llamajax.data.dataset import Dataset
from llamajax.data.loader import Loader
from llamajax.data.position import PassedOver, next_row
from llamajax.errors import SaveError
from llamajax.evaluation.held_out import evaluate
from llamajax.launching.heartbeat import WAITING
from llamajax.planning.scheduling import Compilation
from llamajax.step.state import TrainState
from llamajax.training.bad_steps import BadSteps
from llamajax.training.replicas import Replicas
from llamajax.training.stages import described
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


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The loop of a run, which begins again when the run goes back: what stays the same however often it does."""

    config: Config
    """The run."""
    num_eval_rows: int
    """Held-out rows of an evaluation."""
    compilations: Mapping[int, Compilation]
    """`train_step` of the run, by the length of rows."""
    replicas: Replicas
    """Compares what devices hold alike, before every checkpoint too."""
    dataset: Dataset
    """What it trains on."""
    meta: dict[str, Any]
    """What its checkpoints say about themselves."""
    files: Mapping[str, bytes]
    """Name and content of what is kept with them."""
    checkpointer: Checkpointer
    """Writes them."""
    stop: StopSignal
    """The requests to stop."""
    watchdog: Watchdog
    """Ends the process when something takes too long."""

    def train(self, start: Start) -> tuple[TrainState, bool]:
        """Steps, evaluations and checkpoints, until the last step or a request to stop; whether it was that.

        Raises:
            GoBack: a step went wrong; the caller is to go back and train from there.
            DivergedError: one did, and the run has gone back often enough.
            CorruptionError: a device is wrong again and again.
        """
        self.watchdog.begin("first step")
        config, passed_over = self.config, start.passed_over
        num_steps, rows_per_step = config.train.num_steps, config.train.global_batch_size
        state, step = start.state, start.step
        saved_step = self.checkpointer.newest or 0  # below `step` where the run goes on from a local disk, which may be lost
        bad_steps = BadSteps(config, start.recent_losses, len(passed_over))
        stages = config.data.all_stages
        of_stages = [self.dataset.of_stage(number) for number in range(len(stages))]
        is_closed, window = not config.model.attend_across_documents, config.model.sliding_window
        keys = [of_stage.mean_keys(window) for of_stage in of_stages] if is_closed else None

        def epochs(step: int) -> list[float]:
            return self.dataset.passes.after(step, passed_over)

        with (
            metrics.MetricsWriter(config, start_step=step, keys=keys, epochs=epochs) as writer,
            Loader(self.dataset, config, step, passed_over) as loader,
            trace(config, step) as trace_before,
        ):
            for seq_len, compilation in self.compilations.items():
                writer.event("compile", seq_len=seq_len, from_cache=compilation.from_cache, **compilation.facts)
            in_all = self.dataset.epochs(num_steps, passed_over)
            hashes = {"fingerprint": self.dataset.fingerprint, "stages": self.dataset.stage_fingerprints}
            writer.event("data", **hashes, epochs=in_all)

            def check(record: run_log.Record | None) -> None:
                if record is not None:
                    self.watchdog.finished(record["step"])
                bad_steps.look(record, newest)

            def newest() -> int | None:
                with contextlib.suppress(SaveError):  # which was told
                    self.checkpointer.wait()
                return self.checkpointer.newest

            def evaluate_now() -> None:
                number = config.data.stage_at(max(0, step - 1))  # the one that the last step was of
                of_stage, in_rows = of_stages[number], config.in_rows_of(stages[number].seq_len)
                with self.watchdog.phase("evaluate"), writer.pause("evaluating"):
                    result = evaluate(in_rows, state.model, of_stage, self.num_eval_rows, self.stop.requested)
                if result is not None:
                    writer.write_eval(step, result)

            def meta_of_step() -> dict[str, Any]:
                position = {
                    "position": next_row(step, rows_per_step, passed_over),
                    "tokens": config.tokens_after(step),
                    "passed_over": [dataclasses.asdict(window) for window in passed_over],
                }
                return self.meta | {"data": position | self.meta["data"], "recent_losses": bad_steps.recent_losses}

            def compare_replicas() -> None:
                with writer.pause("comparing replicas"):
                    self.replicas.check(step, state, writer.event)

            def save_locally() -> None:
                compare_replicas()
                with self.watchdog.phase("save"), writer.pause("saving"):
                    self.checkpointer.save_locally(step, state, meta_of_step(), self.files)

            def save() -> None:
                nonlocal saved_step
                compare_replicas()
                with self.watchdog.phase("save"), writer.pause("saving"):
                    self.checkpointer.save(step, state, meta_of_step(), self.files)
                writer.event("save")
                saved_step = step

            def due(every: int | None) -> bool:
                return every is not None and step % every == 0

            def begin_stage(number: int) -> None:
                check(writer.flush())
                self.watchdog.other_steps()
                console.log(f"stage      {described(config.data, number)}")

            compare_replicas()
            save_due, stage = False, -1 if config.data.stages else 0
            while step < num_steps and not self.stop.requested():
                if (begun := config.data.stage_at(step)) != stage:
                    begin_stage(stage := begun)
                trace_before(step + 1, state)
                self.watchdog.doing("waiting for its batch")
                _, batch = next(loader)
                self.watchdog.doing(WAITING)
                state, values = self.compilations[stages[stage].seq_len].step(state, batch)
                step += 1
                check(writer.write(step, values, data_wait_s=loader.wait_s))
                self.watchdog.doing("")
                save_due = save_due or due(config.checkpoint.save_every) or self.checkpointer.retry_due(step)
                if save_due:
                    check(writer.flush())
                    if not bad_steps.num_nonfinite:  # else it would take the place of a checkpoint to go back to
                        save()
                        save_due = False
                elif due(config.checkpoint.local_every):
                    check(writer.flush())
                    if not bad_steps.num_nonfinite:
                        save_locally()
                elif self.replicas.due(step):
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
            with self.watchdog.phase("save"), writer.pause("saving"):
                self.checkpointer.finish(save_again=save)
            stopped = self.stop.requested()
        if stopped:
            saved, rest = ", which is saved" if step else "", "goes on from there" if step < num_steps else "evaluates it"
            console.log(f"stopped    at step {step}{saved}; the same command {rest}")
        return state, stopped
