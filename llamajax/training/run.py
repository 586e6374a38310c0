"""The whole story of a training run: read `run` from top to bottom."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

import llamajax
from llamajax import data
from llamajax.checkpoint.read import Restored, concretise, latest_step, say
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.file import config_to_dict, dump_config
from llamajax.config.run import Config
from llamajax.data.loader import Loader, held_out_batches
from llamajax.errors import CheckpointError, DivergedError, EnvironmentMismatchError, UserError
from llamajax.generation.completion import encode_prompt, stream_text
from llamajax.model import Llama
from llamajax.parallel import mesh
from llamajax.parallel.exit import end_process, exit_code
from llamajax.parallel.processes import everyones
from llamajax.planning.latencies import training_profile
from llamajax.step import optim
from llamajax.step.batch import FIELDS, Batch, batch_sharding, micro_batch_size
from llamajax.step.compile import Option, compile_with, compiler_options
from llamajax.step.step import TrainState, eval_step, init_state, init_state_from, one_behind, train_step
from llamajax.training.stop import StopSignal
from llamajax.watch import console, metrics, run_log
from llamajax.weights.origin import Origin, take_along
from llamajax.weights.pretrained import open_pretrained

FREE_TO_CHANGE = (
    "run_dir", "mesh", "distributed", "hardware", "xla", "data", "checkpoint", "metrics", "profile", "sample",
    "train.grad_accum_steps", "train.eval_every", "train.eval_batches", "train.max_nonfinite_steps", "model.remat",
    "model.attention_kernel",
)  # fmt: skip
"""Settings that a resumed run may change: beyond rounding, they do not change what is computed. The data is compared
by its fingerprint, so that it may move."""


def run(config: Config, *, dry_run: bool = False) -> None:
    """Trains as `config` says, resuming what its run directory holds; with `dry_run`, stops after compiling.

    Raises:
        UserError: one of `llamajax.errors`, when the configuration, data, machine or checkpoints do not allow it.
    """
    metrics.check_packages(config)
    with StopSignal() as stop:
        mesh.start(config)
        check_same_everywhere(dict(_flatten(config_to_dict(config))))
        console.print_header(config)
        run_dir = Path(config.run_dir).expanduser()
        pretrained = None
        if config.init_from is not None and everyones(latest_step(run_dir))[0] is None:
            pretrained = open_pretrained(Path(config.init_from))
            pretrained.check(config.model)
        abstract_state = concretise(jax.eval_shape(functools.partial(init_state, config)))
        console.print_parameters(abstract_state.model)
        optim.check_names(config.optimizer, abstract_state.model)
        compiled_step = compile_step(config, abstract_state)
        if dry_run:
            return

        with Checkpointer(run_dir, config.checkpoint, on_failure=say) as checkpointer:
            restored = checkpointer.restore(abstract_state)
            origin = Origin()
            if pretrained is not None:
                origin = take_along(pretrained.files, pretrained.hf)
            elif config.init_from is not None and restored is not None:
                origin = take_along(restored.files, restored.meta.get("hf"))
            dataset = data.prepare(config, log=console.log, log_work=console.log_own, tokenizer=origin.tokenizer)
            check_same_everywhere(
                {"data (documents or tokenizer)": dataset.fingerprint, "tokenized documents": dataset.content}
            )
            console.print_epochs(dataset.epochs(config.train.num_rows), config.train.num_steps)
            if config.sample.prompt is not None:
                encode_prompt(dataset.tokenizer, config.sample.prompt, config.data.seq_len)
            if restored is not None:
                check_same_run(config, restored, dataset.fingerprint)
                console.log(f"start      resuming at step {restored.step}")
                state, start_step = restored.state, restored.step
            elif pretrained is not None:
                console.log(f"start      from {pretrained.about}")
                state, start_step = init_state_from(config, pretrained.load(config.model)), 0
            else:
                console.log(f"start      from scratch, seed {config.seed}")
                state, start_step = init_state(config), 0
            if jax.process_index() == 0:
                write_config(config, run_dir)
            everyones("ready")  # the first collective of devices waits for half a minute only
            state, stopped = train(config, state, start_step, compiled_step, dataset, origin, checkpointer, stop)
            if not stopped:
                write_sample(config, state, dataset)
        if jax.process_index() == 0 and int(state.step) > 0:
            summarize(run_dir, run_dir / "checkpoints" / str(int(state.step)))


def compile_step(config: Config, abstract_state: TrainState) -> jax.stages.Compiled:
    """The training step as one executable; says how long that took and what it needs in memory."""
    shape = (config.train.grad_accum_steps, micro_batch_size(config), config.data.seq_len)
    batch = dict.fromkeys(FIELDS, jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding()))
    started = time.monotonic()
    lowered = train_step.lower(config, abstract_state, batch)
    compiled = compile_with(lowered, gpu_options(config, lowered) if jax.default_backend() == "gpu" else {})
    console.log(f"compile    {time.monotonic() - started:.1f} s; {console.memory_summary(compiled)}")
    return compiled


def gpu_options(config: Config, lowered: jax.stages.Lowered) -> dict[str, Option]:
    """What XLA is told on GPUs, as plans tell it."""
    return compiler_options(config, jax.device_count(), latency_profile=training_profile(config, lowered))


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

        def save() -> None:
            nonlocal saved_step
            with writer.pause("saving"):
                checkpointer.save(step, state, checkpoint_meta(config, step, dataset, origin), files)
            writer.event("save")
            saved_step = step

        def evaluate_now() -> None:
            with writer.pause("evaluating"):
                result = evaluate(config, state.model, dataset, stop)
            if result is not None:
                writer.write_eval(step, result)

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


def evaluate(config: Config, model: Llama, dataset: data.Dataset, stop: StopSignal) -> dict[str, float] | None:
    """Held-out loss in nats per token and in bits per byte of text, over the same rows every time; NaN without targets.

    None if the run is to stop before the end.
    """
    token_bytes = np.zeros(config.model.vocab_size, np.int32)
    token_bytes[: dataset.tokenizer.vocab_size] = dataset.tokenizer.token_bytes
    nats, num_tokens, num_bytes = 0.0, 0, 0
    stopped = False

    def batches() -> Iterator[Batch]:
        nonlocal stopped
        for batch in held_out_batches(dataset, config):
            stopped = stop.requested()
            if stopped:
                return
            yield batch

    results = (eval_step(model, batch, token_bytes) for batch in batches())
    for sums, count in one_behind(results):
        nats += float(sums.cross_entropy)
        num_tokens += int(sums.num_tokens)
        num_bytes += int(count)
    if stopped:
        return None
    return {
        "loss": nats / num_tokens if num_tokens else math.nan,
        "bits_per_byte": nats / math.log(2) / num_bytes if num_bytes else math.nan,
    }


def write_sample(config: Config, state: TrainState, dataset: data.Dataset) -> None:
    """Prints how the model goes on from the configured prompt, as it writes."""
    if config.sample.prompt is None or int(state.step) < config.train.num_steps:
        return
    pieces = stream_text(
        state.model,
        dataset.tokenizer,
        config.sample.prompt,
        max_tokens=config.sample.max_tokens,
        temperature=config.sample.temperature,
        key=state.rng,
        seq_len=config.data.seq_len,
    )
    console.log("sample")
    console.print_stream(config.sample.prompt, pieces)


def summarize(run_dir: Path, step_dir: Path) -> None:
    """The last words of a run; what is wrong with its log is told, and costs nothing more."""
    try:
        log = run_log.read_run(run_dir)
    except (UserError, OSError) as error:
        say(str(error))
        return
    if log.warning is not None:
        say(log.warning)
    console.print_summary(run_dir, run_log.summarize(log), step_dir)


def write_config(config: Config, run_dir: Path) -> None:
    """Keeps the configuration with the run, whole or not at all; it is itself runnable."""
    temporary = run_dir / "config.yaml.writing"
    temporary.write_text(dump_config(config))
    temporary.replace(run_dir / "config.yaml")


def checkpoint_meta(config: Config, step: int, dataset: data.Dataset, origin: Origin) -> dict[str, Any]:
    """What a checkpoint says about itself, beside the arrays."""
    meta = {
        "llamajax": llamajax.__version__,
        "jax": jax.__version__,
        "config": config_to_dict(config),
        "data": {
            "position": step * config.train.global_batch_size,
            "fingerprint": dataset.fingerprint,
            "chat_template_sha256": dataset.template_sha256,
        },
        "mesh": dict(jax.sharding.get_mesh().shape),
    }
    return meta if origin.hf is None else meta | {"hf": origin.hf}


def check_same_run(config: Config, restored: Restored[TrainState], fingerprint: str) -> None:
    """Refuses to go on from a checkpoint that was computed with other settings or other data.

    Raises:
        CheckpointError: naming every setting that differs.
    """
    meta = restored.meta
    position, batch_size = meta["data"]["position"], config.train.global_batch_size
    if position != restored.step * batch_size:
        raise CheckpointError(
            f"train.global_batch_size: {batch_size} would skip or repeat data, because the run's {restored.step} steps took"
            f" {position} rows; keep {position // restored.step}, or choose another run_dir"
        )
    if config.checkpoint.allow_config_change:
        return
    before, now = (dict(_flatten(tree)) for tree in (meta["config"], config_to_dict(config)))
    changes = [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(key == free or key.startswith(f"{free}.") for free in FREE_TO_CHANGE)
    ]
    if meta["data"]["fingerprint"] != fingerprint:
        changes.append("data: other documents, tokenizer, weights or data.seq_len")
    if changes:
        raise CheckpointError(
            f"run_dir: {config.run_dir} holds a run with other settings ({'; '.join(changes)}); choose another run_dir,"
            " or set checkpoint.allow_config_change to go on with the new ones"
        )


def check_same_everywhere(own: dict[str, Any]) -> None:
    """Refuses to start when the processes of the run do not have the same settings, or data.

    Raises:
        EnvironmentMismatchError: naming the processes that differ from the first.
    """
    own = {key: value for key, value in own.items() if not key.startswith(("distributed.", "data.cache_dir"))}
    first = everyones(own if jax.process_index() == 0 else None)[0]
    differing_here = [key for key in first | own if key not in own or key not in first or own[key] != first[key]]
    for rank, differing in enumerate(everyones(differing_here)):
        if differing:
            raise EnvironmentMismatchError(
                f"process {rank} differs from process 0 in {', '.join(differing)}; give all the same configuration and data"
            )


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


@contextmanager
def trace(config: Config, start_step: int) -> Iterator[Callable[[int, TrainState], None]]:
    """A function to call before every step and after the last, which starts and ends the trace of `config.profile`.

    Only the first process traces: the others do the same.
    """
    wanted = config.profile.start_step is not None and jax.process_index() == 0
    first = max(config.profile.start_step or 0, start_step + 1)
    after = (config.profile.start_step or 0) + config.profile.num_steps
    running = False

    def end() -> None:
        nonlocal running
        running = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:  # a trace is worth less than the run
            say(f"{config.run_dir}/profile: cannot be written: {str(error).splitlines()[0]}; see to the disk")
            return
        console.log(f"profile    {config.run_dir}/profile, for xprof and https://ui.perfetto.dev")

    def before_step(step: int, state: TrainState) -> None:
        nonlocal running
        if wanted and first == step < after:
            jax.block_until_ready(state)  # the trace begins and ends between steps, not in the middle of one
            jax.profiler.start_trace(Path(config.run_dir).expanduser() / "profile", create_perfetto_trace=True)
            running = True
        elif running and (step == after or step > config.train.num_steps):
            jax.block_until_ready(state)
            end()

    try:
        yield before_step
    finally:
        if running:
            end()


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in nested dicts and lists."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def main(config: Config, *, dry_run: bool) -> None:
    """Runs, and ends the process."""
    code = exit_code(
        lambda: run(config, dry_run=dry_run),
        memory_remedy="model.remat: full, more train.grad_accum_steps, or a larger mesh.fsdp or mesh.tensor",
        disk=config.run_dir,
        disk_remedy="see to the disk and run the same command again",
    )
    end_process(code, distributed=config.distributed.enabled)
