"""A run for a training loop of the user's own: everything but the loop."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from llamajax.checkpoint.write import Checkpointer
from llamajax.config.file import write_config
from llamajax.config.run import Config
from llamajax.data.rows.loader import Loader
from llamajax.evaluation.held_out import evaluate
from llamajax.step.batch import Batch
from llamajax.step.state import TrainState
from llamajax.training.loop import Start, Trainer, meta_after
from llamajax.training.run import look, prepare_trainer, with_reference
from llamajax.training.stop import StopSignal
from llamajax.training.watchdog import Watchdog
from llamajax.watch import console


@dataclass(frozen=True)
class OwnLoop:
    """A run whose steps the caller takes. All processes call each method together."""

    trainer: Trainer
    """Compiled steps, data and checkpoints of the run."""
    start: Start
    """Its beginning."""

    @property
    def config(self) -> Config:
        """Configuration of the run on these devices."""
        return self.trainer.config

    @property
    def state(self) -> TrainState:
        """State before the first step of this loop, on the devices: `model`, `opt_state`, `step`. The first step uses it
        up."""
        return self.start.state

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Yields the batches that are left of the run, each with the number of its step, from 1.

        A batch has int32 arrays [accumulation steps, rows, tokens]: `tokens`, `targets` (-1: none), `segment_ids` (0:
        padding) and `positions`. A thread prepares the next ones.
        """
        with Loader(self.trainer.dataset, self.config, self.start.step, self.start.passed_over) as loader:
            for _ in range(self.start.step, self.config.train.num_steps):
                step, batch = next(loader)
                yield step + 1, batch

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes one optimizer step.

        Args:
            state: the state before it, which is used up.
            batch: a batch from `batches`.

        Returns:
            The state after it, and float32 scalars on the devices: `loss` (nats per token), `grad_norm` and others.
        """
        accumulated, rows, seq_len = batch["tokens"].shape
        kind, programs = (seq_len, accumulated * rows), self.trainer.programs
        return (programs.find(*kind) or programs.compile(*kind)).step(state, batch)

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Returns `loss` (nats per token) and `bits_per_byte` of held-out rows, as the command evaluates after this step."""
        number = self.config.data.stage_at(max(0, int(state.step) - 1))
        in_rows = self.config.in_rows_of(self.config.data.all_stages[number].seq_len)
        result = evaluate(in_rows, state.weights, self.trainer.dataset.of_stage(number), self.trainer.num_eval_rows)
        assert result is not None
        return result

    def save(self, state: TrainState) -> Path:
        """Saves a checkpoint that the commands read, and returns its directory when it is complete.

        Raises:
            CheckpointError: a checkpoint of this step or of a later one exists.
            SaveError: the disk fails.
        """
        step, checkpointer = int(state.step), self.trainer.checkpointer
        meta = meta_after(self.config, step, self.trainer.meta, self.start.passed_over, self.start.base)
        checkpointer.save(step, state.as_saved(), meta, self.trainer.files)
        checkpointer.wait()
        return Path(self.config.run_dir).expanduser() / "checkpoints" / str(step)


@contextlib.contextmanager
def prepare_loop(asked: Config) -> Iterator[OwnLoop]:
    """Prepares a run, and holds its lock until the block ends; no signal is handled, and no watchdog runs.

    Raises:
        UserError: configuration, data, machine or checkpoints do not allow the run.
    """
    run_dir = Path(asked.run_dir).expanduser()
    watchdog = Watchdog(
        dataclasses.replace(asked.watchdog, enabled=False), run_dir
    )  # neither it nor the signals are entered
    outset = look(asked, run_dir, watchdog)
    with Checkpointer(run_dir, outset.config.checkpoint, on_failure=console.say) as checkpointer:
        trainer, beginning = prepare_trainer(outset, checkpointer, StopSignal(), watchdog)
        restored = None if beginning.found is None else beginning.found.read()
        if jax.process_index() == 0:
            write_config(outset.asked, run_dir / "config.yaml")
        console.log(f"start      {beginning.described(trainer.config)}")
        trainer = with_reference(trainer, beginning.passed_over)
        start = beginning.start_from(restored, trainer.config, beginning.passed_over)
        checkpointer.go_on_from(start.step)
        yield OwnLoop(trainer, start)
