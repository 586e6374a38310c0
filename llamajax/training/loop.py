"""The loop of a run: steps, evaluations and checkpoints."""

from collections.abc import Mapping
from typing import Any

from llamajax import data
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.run import Config
from llamajax.data.loader import Loader
from llamajax.errors import DivergedError
from llamajax.evaluation.held_out import evaluate
from llamajax.planning.scheduling import Compilation
from llamajax.step.state import TrainState
from llamajax.training.stop import StopSignal
from llamajax.watch import console, metrics, run_log
from llamajax.watch.trace import trace


def train(
    config: Config,
    state: TrainState,
    start_step: int,
    compilation: Compilation,
    dataset: data.Dataset,
    meta: dict[str, Any],
    files: Mapping[str, bytes],
    checkpointer: Checkpointer,
    stop: StopSignal,
) -> tuple[TrainState, bool]:
    """The loop: steps, evaluations and checkpoints, until the last step or a request to stop; whether it was that.

    Args:
        config: the run.
        state: after `start_step` steps.
        start_step: steps that are done.
        compilation: `train_step` of the run.
        dataset: what it trains on.
        meta: what its checkpoints say about themselves.
        files: name and content of what is kept with them.
        checkpointer: writes them.
        stop: the requests to stop.

    Raises:
        DivergedError: gradients were not finite in too many steps in a row.
    """
    num_steps = config.train.num_steps
    step = saved_step = start_step
    keys = None if config.model.attend_across_documents else dataset.mean_keys(config.model.sliding_window)
    with (
        stop.at_end_of_step(),
        metrics.MetricsWriter(config, start_step=start_step, keys=keys) as writer,
        Loader(dataset, config, start_step) as loader,
        trace(config, start_step) as trace_before,
    ):
        writer.event("compile", from_cache=compilation.from_cache, **compilation.facts)
        writer.event("data", fingerprint=dataset.fingerprint, epochs=dataset.epochs(config.train.num_rows))

        def check(record: run_log.Record | None) -> None:
            if record is None or record["train/skipped_in_a_row"] < config.train.max_nonfinite_steps:
                return
            newest = checkpointer.newest
            saved = f"step {newest} is the newest checkpoint" if newest is not None else "there is no checkpoint"
            raise DivergedError(
                f"step {record['step']}: gradients were not finite in {record['train/skipped_in_a_row']} steps in a row"
                f" (train.max_nonfinite_steps={config.train.max_nonfinite_steps}); {saved}; lower optimizer.learning_rate or"
                " warm up longer, in another run_dir or with checkpoint.allow_config_change"
            )

        def evaluate_now() -> None:
            with writer.pause("evaluating"):
                result = evaluate(config, state.model, dataset, stop.requested)
            if result is not None:
                writer.write_eval(step, result)

        def meta_of_step() -> dict[str, Any]:
            return meta | {"data": {"position": step * config.train.global_batch_size, **meta["data"]}}

        def save_locally() -> None:
            with writer.pause("saving"):
                checkpointer.save_locally(step, state, meta_of_step(), files)

        def save() -> None:
            nonlocal saved_step
            with writer.pause("saving"):
                checkpointer.save(step, state, meta_of_step(), files)
            writer.event("save")
            saved_step = step

        def due(every: int | None) -> bool:
            return every is not None and step % every == 0

        while step < num_steps and not stop.requested():
            trace_before(step + 1, state)
            _, batch = next(loader)
            state, values = compilation.step(state, batch)
            step += 1
            check(writer.write(step, values, data_wait_s=loader.wait_s))
            if due(config.checkpoint.save_every) or checkpointer.retry_due(step):
                check(writer.flush())
                save()
            elif due(config.checkpoint.local_every):
                check(writer.flush())
                save_locally()
            if due(config.train.eval_every) and step < num_steps:
                check(writer.flush())
                evaluate_now()
        trace_before(step + 1, state)
        check(writer.flush())
        if step != saved_step:
            save()
        if step == num_steps and config.train.eval_batches and config.data.held_out_fraction:
            evaluate_now()
        checkpointer.finish(save_again=save)
        stopped = stop.requested()
    if stopped:
        console.log(f"stopped    at step {step}{', which is saved' if step else ''}; the same command goes on from there")
    return state, stopped
