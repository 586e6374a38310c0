"""The loop of a run: steps, evaluations and checkpoints."""

import jax

from llamajax import data
from llamajax.checkpoint.meta import checkpoint_meta
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.run import Config
from llamajax.data.loader import Loader
from llamajax.errors import DivergedError
from llamajax.evaluation.held_out import evaluate
from llamajax.step.step import TrainState
from llamajax.training.stop import StopSignal
from llamajax.watch import console, metrics, run_log
from llamajax.watch.trace import trace
from llamajax.weights.origin import Origin


def train(
    config: Config,
    state: TrainState,
    start_step: int,
    compiled_step: jax.stages.Compiled,
    dataset: data.Dataset,
    origin: Origin,
    checkpointer: Checkpointer,
    stop: StopSignal,
) -> tuple[TrainState, bool]:
    """The loop: steps, evaluations and checkpoints, until the last step or a request to stop; whether it was that."""
    num_steps = config.train.num_steps
    step = saved_step = start_step
    files = {**origin.files, **dataset.files}
    with (
        stop.at_end_of_step(),
        metrics.MetricsWriter(config, start_step=start_step) as writer,
        Loader(dataset, config, start_step) as loader,
        trace(config, start_step) as trace_before,
    ):
        writer.event("data", fingerprint=dataset.fingerprint, epochs=dataset.epochs(config.train.num_rows))

        def evaluate_now() -> None:
            with writer.pause("evaluating"):
                result = evaluate(config, state.model, dataset, stop.requested)
            if result is not None:
                writer.write_eval(step, result)

        def save() -> None:
            nonlocal saved_step
            with writer.pause("saving"):
                checkpointer.save(step, state, checkpoint_meta(config, step, dataset, origin.hf), files)
            writer.event("save")
            saved_step = step

        def due(every: int | None) -> bool:
            return every is not None and step % every == 0

        while step < num_steps and not stop.requested():
            trace_before(step + 1, state)
            _, batch = next(loader)
            state, values = compiled_step(state, batch)
            step += 1
            check_finite(config, writer.write(step, values, data_wait_s=loader.wait_s), checkpointer.newest)
            if due(config.checkpoint.save_every) or checkpointer.retry_due(step):
                check_finite(config, writer.flush(), checkpointer.newest)
                save()
            if due(config.train.eval_every) and step < num_steps:
                check_finite(config, writer.flush(), checkpointer.newest)
                evaluate_now()
        trace_before(step + 1, state)
        check_finite(config, writer.flush(), checkpointer.newest)
        if step != saved_step:
            save()
        if step == num_steps and config.train.eval_batches and config.data.held_out_fraction:
            evaluate_now()
        checkpointer.finish(save_again=save)
        stopped = stop.requested()
    if stopped:
        console.log(f"stopped    at step {step}{', which is saved' if step else ''}; the same command goes on from there")
    return state, stopped


def check_finite(config: Config, record: run_log.Record | None, saved_step: int | None) -> None:
    """Stops the run once too many steps in a row had non-finite gradients.

    Raises:
        DivergedError: with the step and what to try.
    """
    if record is None or record["train/skipped_in_a_row"] < config.train.max_nonfinite_steps:
        return
    saved = f"step {saved_step} is the newest checkpoint" if saved_step is not None else "there is no checkpoint"
    raise DivergedError(
        f"step {record['step']}: gradients were not finite in {record['train/skipped_in_a_row']} steps in a row"
        f" (train.max_nonfinite_steps={config.train.max_nonfinite_steps}); {saved}; lower optimizer.learning_rate or warm up"
        " longer, in another run_dir or with checkpoint.allow_config_change"
    )
