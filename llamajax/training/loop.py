"""The loop of a run: steps, evaluations and checkpoints."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamajax.checkpoint.write import Checkpointer
from llamajax.config.run import Config
from llamajax.data.rows.dataset import Dataset
from llamajax.data.rows.loader import Loader
from llamajax.data.rows.position import PassedOver, next_row
from llamajax.errors import SaveError
from llamajax.estimates.formulas import kinds_of_layers
from llamajax.evaluation.held_out import evaluate
from llamajax.planning.scheduling import Compilation
from llamajax.processes.heartbeat import WAITING
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
        is_closed, kinds = not config.model.attend_across_documents, kinds_of_layers(config.model)
        of_stages = [self.dataset.of_stage(number) for number in range(len(config.data.all_stages))]

        def mean_keys(of_stage: Dataset) -> float:
            return sum(share * of_stage.mean_keys(alike.sliding_window) for alike, share in kinds)

        keys = [mean_keys(of_stage) for of_stage in of_stages] if is_closed else None

        def epochs(step: int) -> list[float]:
            return self.dataset.passes.after(step, passed_over)

        with (
            metrics.MetricsWriter(config, start_step=start.step, keys=keys, epochs=epochs) as writer,
            Loader(self.dataset, config, start.step, passed_over) as loader,
            trace(config, start.step) as trace_before,
        ):
            progress = _Progress(self, start, writer, loader, of_stages)
            progress.tell_what_runs()
            progress.compare_replicas()
            while progress.step < config.train.num_steps and not self.stop.requested():
                progress.begin_stage()
                trace_before(progress.step + 1, progress.state)
                progress.take_step()
                progress.save_or_compare()
                if progress.is_due(config.train.eval_every) and progress.step < config.train.num_steps:
                    progress.check(writer.flush())
                    progress.evaluate()
            trace_before(progress.step + 1, progress.state)
            progress.finish()
            stopped = self.stop.requested()
        if stopped:
            step, num_steps = progress.step, config.train.num_steps
            saved, rest = ", which is saved" if step else "", "goes on from there" if step < num_steps else "evaluates it"
            console.log(f"stopped    at step {step}{saved}; the same command {rest}")
        return progress.state, stopped


class _Progress:
    """One pass of the loop: the state after `step` steps, and what is done with it between them."""

    def __init__(
        self,
        trainer: Trainer,
        start: Start,
        writer: metrics.MetricsWriter,
        loader: Loader,
        of_stages: Sequence[Dataset],
    ) -> None:
        """Begins at `start`, whose state the first step uses up; `of_stages` is the data of each stage."""
        self.state, self.step = start.state, start.step
        self._trainer, self._writer, self._loader, self._of_stages = trainer, writer, loader, of_stages
        self._config, self._passed_over = trainer.config, start.passed_over
        self._bad_steps = BadSteps(trainer.config, start.recent_losses, len(start.passed_over))
        # Below `step` where the run goes on from a local disk, which may be lost.
        self._saved_step = trainer.checkpointer.newest or 0
        self._save_is_due = False
        self._stage = -1 if trainer.config.data.stages else 0

    def tell_what_runs(self) -> None:
        """Notes programs and data in the run's log."""
        for seq_len, compilation in self._trainer.compilations.items():
            self._writer.event("compile", seq_len=seq_len, from_cache=compilation.from_cache, **compilation.facts)
        dataset = self._trainer.dataset
        in_all = dataset.epochs(self._config.train.num_steps, self._passed_over)
        self._writer.event("data", fingerprint=dataset.fingerprint, stages=dataset.stage_fingerprints, epochs=in_all)

    def begin_stage(self) -> None:
        """Tells of a stage where the next step is the first of it."""
        if (begun := self._config.data.stage_at(self.step)) == self._stage:
            return
        self._stage = begun
        self.check(self._writer.flush())
        self._trainer.watchdog.other_steps()
        console.log(f"stage      {described(self._config.data, begun)}")

    def take_step(self) -> None:
        """Trains on the next batch."""
        watchdog = self._trainer.watchdog
        watchdog.doing("waiting for its batch")
        _, batch = next(self._loader)
        watchdog.doing(WAITING)
        program = self._trainer.compilations[self._config.data.all_stages[self._stage].seq_len]
        self.state, values = program.step(self.state, batch)
        self.step += 1
        self.check(self._writer.write(self.step, values, data_wait_s=self._loader.wait_s))
        watchdog.doing("")

    def save_or_compare(self) -> None:
        """Saves the state, here or there, or compares replicas, if that is due after this step."""
        self._save_is_due = self._save_is_due or self.is_due(self._config.checkpoint.save_every)
        self._save_is_due = self._save_is_due or self._trainer.checkpointer.retry_due(self.step)
        locally = self.is_due(self._config.checkpoint.local_every)
        if not (self._save_is_due or locally or self._trainer.replicas.due(self.step)):
            return
        self.check(self._writer.flush())
        if not (self._save_is_due or locally):
            self.compare_replicas()
        elif self._bad_steps.num_nonfinite:
            return  # else it would take the place of a checkpoint to go back to
        elif self._save_is_due:
            self._save()
            self._save_is_due = False
        else:
            self._save_locally()

    def finish(self) -> None:
        """Saves the last state and evaluates it."""
        self.check(self._writer.flush())
        if self.step != self._saved_step:
            self._save()
        of_train = self._config.train
        if self.step == of_train.num_steps and of_train.eval_batches and self._config.data.held_out_fraction:
            self.evaluate()
        with self._trainer.watchdog.phase("save"), self._writer.pause("saving"):
            self._trainer.checkpointer.finish(save_again=self._save)

    def evaluate(self) -> None:
        """The loss on held-out rows, of the stage that the last step was of."""
        number = self._config.data.stage_at(max(0, self.step - 1))
        in_rows = self._config.in_rows_of(self._config.data.all_stages[number].seq_len)
        with self._trainer.watchdog.phase("evaluate"), self._writer.pause("evaluating"):
            num_rows, is_stopping = self._trainer.num_eval_rows, self._trainer.stop.requested
            result = evaluate(in_rows, self.state.model, self._of_stages[number], num_rows, is_stopping)
        if result is not None:
            self._writer.write_eval(self.step, result)

    def check(self, record: run_log.Record | None) -> None:
        """Looks at the metrics of a finished step; raises `GoBack` and others as `Trainer.train`."""
        if record is not None:
            self._trainer.watchdog.finished(record["step"])
        self._bad_steps.look(record, self._newest)

    def compare_replicas(self) -> None:
        """Raises as `Replicas.check` does."""
        with self._writer.pause("comparing replicas"):
            self._trainer.replicas.check(self.step, self.state, self._writer.event)

    def is_due(self, every: int | None) -> bool:
        """Whether this is one of every so many steps."""
        return every is not None and self.step % every == 0

    def _save(self) -> None:
        self.compare_replicas()
        with self._trainer.watchdog.phase("save"), self._writer.pause("saving"):
            self._trainer.checkpointer.save(self.step, self.state, self._meta(), self._trainer.files)
        self._writer.event("save")
        self._saved_step = self.step

    def _save_locally(self) -> None:
        self.compare_replicas()
        with self._trainer.watchdog.phase("save"), self._writer.pause("saving"):
            self._trainer.checkpointer.save_locally(self.step, self.state, self._meta(), self._trainer.files)

    def _newest(self) -> int | None:
        with contextlib.suppress(SaveError):  # which was told
            self._trainer.checkpointer.wait()
        return self._trainer.checkpointer.newest

    def _meta(self) -> dict[str, Any]:
        position = {
            "position": next_row(self.step, self._config.train.global_batch_size, self._passed_over),
            "tokens": self._config.tokens_after(self.step),
            "passed_over": [dataclasses.asdict(window) for window in self._passed_over],
        }
        meta = self._trainer.meta
        return meta | {"data": position | meta["data"], "recent_losses": self._bad_steps.recent_losses}
