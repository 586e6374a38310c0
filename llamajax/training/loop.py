"""The loop of a run: steps, evaluations and checkpoints."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamajax.checkpoint.write import Checkpointer
from llamajax.config.run import Config
from llamajax.data.rows.dataset import Dataset
from llamajax.data.rows.loader import Loader
from llamajax.data.rows.position import PassedOver, next_row, rows_read
from llamajax.errors import DataError, SaveError
from llamajax.estimates.formulas import kinds_of_layers
from llamajax.evaluation.held_out import evaluate
from llamajax.planning.scheduling import Compilation
from llamajax.processes.heartbeat import WAITING
from llamajax.step.state import TrainState
from llamajax.training.bad_steps import BadSteps
from llamajax.training.replicas import Replicas
from llamajax.training.rollouts import OnPolicy, Rollouts
from llamajax.training.stages import Programs, described, described_phase
from llamajax.training.stop import StopSignal
from llamajax.training.watchdog import Watchdog
from llamajax.watch import console, metrics, run_log
from llamajax.watch.trace import trace

_SHOWN_CHARS = 160


@dataclass(frozen=True)
class Start:
    """Beginning of the loop."""

    state: TrainState
    """State after `step` steps; the first step of the loop uses it up."""
    step: int = 0
    """Number of finished steps."""
    passed_over: tuple[PassedOver, ...] = ()
    """Rows that the run skips."""
    recent_losses: Sequence[float] = ()
    """Losses that the next ones are compared with; see `BadSteps`."""
    rollout: bytes | None = None
    """`rollouts.FILE` of the checkpoint, if it has one."""
    base: str | None = None
    """`fingerprint` of the frozen weights that adapters add to; None: all weights are in the state's checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The loop of a run. It starts again when the run goes back to a checkpoint; these are the parts that stay the same."""

    config: Config
    """The run on these devices."""
    num_eval_rows: int
    """Number of held-out rows in an evaluation."""
    programs: Programs
    """Compiled `train_step` for every kind of batch."""
    replicas: Replicas
    """Comparison of arrays that several devices hold, also before every checkpoint."""
    dataset: Dataset
    """Training data."""
    meta: dict[str, Any]
    """Contents of `meta.json` in the checkpoints, except for what depends on the step."""
    files: Mapping[str, bytes]
    """Small files stored in the checkpoints, by name."""
    checkpointer: Checkpointer
    """Writer of the checkpoints."""
    stop: StopSignal
    """Requests to stop."""
    watchdog: Watchdog
    """Watchdog that ends the process when a phase takes too long."""
    on_policy: OnPolicy | None = None
    """Reward functions, end tokens and reference of a run on its own completions; None: the run trains on the data."""

    def train(self, start: Start) -> tuple[TrainState, bool]:
        """Takes steps, evaluates and saves until the last step or a request to stop.

        Returns:
            The last state, and whether a request stopped the loop.

        Raises:
            GoBack: a step went wrong; the caller goes back to a checkpoint and trains from there.
            DivergedError: a step went wrong, and the run has gone back as often as it may.
            CorruptionError: a device is wrong again and again.
            DataError: a reward function fails; the state before it is saved.
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
            self._batches(start) as batches,
            trace(config, start.step) as trace_before,
        ):
            progress = _Progress(self, start, writer, batches, of_stages)
            progress.tell_what_runs()
            progress.compare_replicas()
            while progress.step < config.train.num_steps and not self.stop.requested():
                progress.begin_stage()
                trace_before(progress.step + 1, progress.state)
                if not progress.take_step():
                    break
                progress.save_or_compare()
                if progress.is_due(config.train.eval_every) and progress.step < config.train.num_steps:
                    progress.check(writer.flush())
                    progress.evaluate()
            trace_before(progress.step + 1, progress.state)
            progress.finish()
            stopped = self.stop.requested()
        if stopped:
            step, num_steps = progress.step, config.train.num_steps
            saved, rest = ", which is saved" if step else "", "resumes there" if step < num_steps else "evaluates it"
            console.log(f"stopped    at step {step}{saved}; the same command {rest}")
        return progress.state, stopped

    def _batches(self, start: Start) -> Loader | Rollouts:
        if self.on_policy is None:
            return Loader(self.dataset, self.config, start.step, start.passed_over)
        return Rollouts(self.config, self.dataset, self.on_policy, start.passed_over, start.rollout)


class _Progress:
    """One pass of the loop: the state after `step` steps, and the work between steps."""

    def __init__(
        self,
        trainer: Trainer,
        start: Start,
        writer: metrics.MetricsWriter,
        batches: Loader | Rollouts,
        of_stages: Sequence[Dataset],
    ) -> None:
        """Starts at `start`; the first step uses up its state. `of_stages` is the data of each stage."""
        self.state, self.step = start.state, start.step
        self._trainer, self._writer, self._batches, self._of_stages = trainer, writer, batches, of_stages
        self._config, self._passed_over, self._base = trainer.config, start.passed_over, start.base
        self._bad_steps = BadSteps(trainer.config, start.recent_losses, len(start.passed_over))
        # Below `step` if the run resumes from a local disk, which may be lost.
        self._saved_step = trainer.checkpointer.newest or 0
        self._save_is_due = False
        config, several = trainer.config, len(trainer.config.train.batch_phases) > 1
        self._stage, self._phase = -1 if config.data.stages else 0, -1 if several else 0

    def tell_what_runs(self) -> None:
        """Records programs and data in the run's log."""
        for seq_len, compilation in self._trainer.programs.full.items():
            self._tell_program(compilation, seq_len, self._config.train.global_batch_size)
        dataset = self._trainer.dataset
        in_all = dataset.epochs(self._config.train.num_steps, self._passed_over)
        self._writer.event("data", fingerprint=dataset.fingerprint, stages=dataset.stage_fingerprints, epochs=in_all)

    def begin_stage(self) -> None:
        """Logs the stage, and the phase of the batch, if the next step is its first; compiles the step of a phase."""
        data, train = self._config.data, self._config.train
        before, begun = (self._stage, self._phase), (data.stage_at(self.step), train.phase_at(self.step))
        if begun == before:
            return
        self._stage, self._phase = begun
        self.check(self._writer.flush())
        self._trainer.watchdog.other_steps()
        if self._stage != before[0]:
            console.log(f"stage      {described(data, self._stage)}")
        if self._phase != before[1]:
            console.log(f"phase      {described_phase(train, self._phase)}")
        if self._trainer.programs.find(*self._kind_of_batch) is None:
            with self._trainer.watchdog.phase("compile"), self._writer.pause("compiling"):
                compilation = self._trainer.programs.compile(*self._kind_of_batch)
            self._tell_program(compilation, *self._kind_of_batch)

    @property
    def _kind_of_batch(self) -> tuple[int, int]:
        """Tokens per row and rows of the next step."""
        return self._config.data.all_stages[self._stage].seq_len, self._config.train.batch_phases[self._phase].batch_size

    def _tell_program(self, program: Compilation, seq_len: int, batch_size: int) -> None:
        facts = {"seq_len": seq_len, "global_batch_size": batch_size, "from_cache": program.from_cache, **program.facts}
        self._writer.event("compile", **facts)

    def take_step(self) -> bool:
        """Trains on the next batch; returns False without a step if a request to stop comes while the batch is written."""
        watchdog = self._trainer.watchdog
        if isinstance(self._batches, Rollouts) and self._batches.is_due(self.step) and not self._write(self._batches):
            return False
        watchdog.doing("waiting for its batch")
        batch, of_batch = self._batches.take(self.step)
        watchdog.doing(WAITING)
        program = self._trainer.programs.find(*self._kind_of_batch)
        assert program is not None
        self.state, values = program.step(self.state, batch)
        self.step += 1
        self.check(self._writer.write(self.step, values | of_batch, data_wait_s=self._batches.wait_s))
        watchdog.doing("")
        return True

    def _write(self, rollouts: Rollouts) -> bool:
        """Writes the completions of the next steps, and tells the best one of a prompt; returns False if the run stops."""
        self.check(self._writer.flush())
        with self._saving_first(), self._trainer.watchdog.phase("rollout"), self._writer.pause("writing completions"):
            found = rollouts.write(self.step, self.state, self._writer.tell, self._trainer.stop.requested)
        if found is None:
            return False
        prompt, completion, reward = found
        self._writer.event("rollout", prompt=prompt.said, completion=completion.text, reward=reward)
        if self.is_due(self._config.metrics.log_every):
            console.log(f"rollout    reward {reward:.3g}, the best completion of one prompt: {_shown(completion.text)}")
        return True

    @contextlib.contextmanager
    def _saving_first(self) -> Iterator[None]:
        """Saves the state before an error of a reward function ends the run."""
        try:
            yield
        except DataError:
            if self.step != self._saved_step:
                self._save()
            self._trainer.checkpointer.finish(save_again=self._save)
            raise

    def save_or_compare(self) -> None:
        """Saves the state to the run or to the local disk, or compares replicas, whichever is due after this step."""
        self._save_is_due = self._save_is_due or self.is_due(self._config.checkpoint.save_every)
        self._save_is_due = self._save_is_due or self._trainer.checkpointer.retry_due(self.step)
        locally = self.is_due(self._config.checkpoint.local_every)
        if not (self._save_is_due or locally or self._trainer.replicas.due(self.step)):
            return
        self.check(self._writer.flush())
        if not (self._save_is_due or locally):
            self.compare_replicas()
        elif self._bad_steps.num_nonfinite:
            return  # it would replace a checkpoint that the run may go back to
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
        """Evaluates held-out rows of the stage that the last step belongs to."""
        number = self._config.data.stage_at(max(0, self.step - 1))
        in_rows = self._config.in_rows_of(self._config.data.all_stages[number].seq_len)
        with self._trainer.watchdog.phase("evaluate"), self._writer.pause("evaluating"):
            num_rows, is_stopping = self._trainer.num_eval_rows, self._trainer.stop.requested
            if isinstance(self._batches, Rollouts):
                of_stage, tell = self._of_stages[number], self._writer.tell
                with self._saving_first():
                    result = self._batches.evaluate(self.state, of_stage, num_rows, tell, is_stopping)
            else:
                result = evaluate(in_rows, self.state.weights, self._of_stages[number], num_rows, is_stopping)
        if result is not None:
            self._writer.write_eval(self.step, result)

    def check(self, record: run_log.Record | None) -> None:
        """Checks the metrics of a finished step; raises `GoBack` and others as `Trainer.train` does."""
        if record is not None:
            self._trainer.watchdog.finished(record["step"])
        self._bad_steps.look(record, self._newest)

    def compare_replicas(self) -> None:
        """Compares replicas; raises as `Replicas.check` does."""
        with self._writer.pause("comparing replicas"):
            self._trainer.replicas.check(self.step, self.state, self._writer.event)

    def is_due(self, every: int | None) -> bool:
        """Returns whether something that happens every `every` steps is due after this step."""
        return every is not None and self.step % every == 0

    def _save(self) -> None:
        self.compare_replicas()
        with self._trainer.watchdog.phase("save"), self._writer.pause("saving"):
            self._trainer.checkpointer.save(*self._contents())
        self._writer.event("save")
        self._saved_step = self.step

    def _save_locally(self) -> None:
        self.compare_replicas()
        with self._trainer.watchdog.phase("save"), self._writer.pause("saving"):
            self._trainer.checkpointer.save_locally(*self._contents())

    def _newest(self) -> int | None:
        with contextlib.suppress(SaveError):  # it has been reported
            self._trainer.checkpointer.wait()
        return self._trainer.checkpointer.newest

    def _contents(self) -> tuple[int, TrainState, dict[str, Any], Mapping[str, bytes]]:
        """Returns the contents of a checkpoint: step, state, metadata and files."""
        files = self._batches.files() if isinstance(self._batches, Rollouts) else {}
        return self.step, self.state.as_saved(), self._meta(), {**self._trainer.files, **files}

    def _meta(self) -> dict[str, Any]:
        meta = meta_after(self._config, self.step, self._trainer.meta, self._passed_over, self._base)
        return meta | {"recent_losses": self._bad_steps.recent_losses}


def _shown(text: str) -> str:
    """Returns the beginning of a text on one line."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}..."


def meta_after(
    config: Config, step: int, meta: dict[str, Any], passed_over: Sequence[PassedOver], base: str | None
) -> dict[str, Any]:
    """Returns the metadata of a checkpoint after `step` steps.

    Args:
        config: the run.
        step: number of finished steps.
        meta: metadata that does not depend on the step.
        passed_over: rows that the run skips.
        base: see `Start.base`.
    """
    position = position_meta(config, step, passed_over)
    return {**meta, "data": position | meta["data"], **({} if base is None else {"base": base})}


def position_meta(config: Config, step: int, passed_over: Sequence[PassedOver]) -> dict[str, Any]:
    """Returns what a checkpoint says about the data position of the run after `step` steps."""
    return {
        "position": next_row(step, rows_read(config), passed_over),
        "tokens": config.tokens_after(step),
        "passed_over": [dataclasses.asdict(window) for window in passed_over],
    }
