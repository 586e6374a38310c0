"""The whole story of a training run: read `run` from top to bottom."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from llamajax.checkpoint.meta import checkpoint_meta
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.file import write_config
from llamajax.config.run import Config
from llamajax.data.rows.dataset import Dataset, prepare
from llamajax.data.rows.position import PassedOver
from llamajax.generation.completion import encode_prompt, stream_text
from llamajax.generation.prompts import Prompt
from llamajax.parallel import compilation_cache, startup
from llamajax.parallel.zero import whole_over_data
from llamajax.planning.scheduling import Compilation, check_told
from llamajax.processes.exit import end_process, exit_code
from llamajax.processes.peers import check_same_everywhere, everyones
from llamajax.step.state import TrainState, abstract_state
from llamajax.training import elastic
from llamajax.training.bad_steps import GoBack
from llamajax.training.beginning import Beginning, check_beginning, find_beginning, open_weights
from llamajax.training.loop import Trainer
from llamajax.training.replicas import Replicas
from llamajax.training.resume import check_data
from llamajax.training.rollback import go_back
from llamajax.training.stages import check_forms, compile_steps, resolve_stages
from llamajax.training.stop import StopSignal
from llamajax.training.watchdog import Watchdog, process_ends
from llamajax.watch import console
from llamajax.watch.console import say
from llamajax.watch.peak import peak_flops


def run(asked: Config, *, dry_run: bool = False) -> None:
    """Trains as `asked`, resuming what its run directory holds; with `dry_run`, looks at all it needs, compiles and stops.

    Whatever can be known without the compiler is refused before it begins.

    Raises:
        UserError: one of `llamajax.errors`, when the configuration, data, machine or checkpoints do not allow it.
    """
    run_dir = Path(asked.run_dir).expanduser()
    with StopSignal() as stop, Watchdog(asked.watchdog, run_dir) as watchdog:
        startup.begin(asked)
        fitted = elastic.fit(asked, run_dir)
        config = fitted.config
        startup.lay_out(config)
        watchdog.begin("load")
        abstract = abstract_state(config)
        console.print_header(config, abstract.model)
        if fitted.line is not None:
            console.log(f"elastic    {fitted.line}")
        check_forms(config)
        if jax.default_backend() == "gpu":
            check_told(config)
        pretrained = open_weights(config, run_dir)
        if dry_run:
            check_beginning(asked, config, abstract, pretrained)
            compile_all(config, abstract, watchdog)
            return

        in_background = functools.partial(watchdog.phase, "save")
        with Checkpointer(run_dir, config.checkpoint, on_failure=say, around_commit=in_background) as checkpointer:
            watchdog.keep_stacks()
            beginning = find_beginning(asked, config, abstract, pretrained, checkpointer)
            watchdog.begin("load")
            dataset = prepare_data(config, beginning)
            meta = checkpoint_meta(asked, dataset, beginning.origin.hf, fitted.began)
            if beginning.found is not None:
                check_data(asked, beginning.found, meta)
            compilations, replicas = compile_all(config, abstract, watchdog)
            trainer = Trainer(
                config=config,
                num_eval_rows=config.train.eval_batches * asked.train.micro_batch_size,
                compilations=compilations,
                replicas=replicas,
                dataset=dataset,
                meta=meta,
                files={**beginning.origin.files, **dataset.files},
                checkpointer=checkpointer,
                stop=stop,
                watchdog=watchdog,
            )
            state, stopped = train_to_the_end(trainer, beginning, asked, abstract)
            watchdog.begin("evaluate")
            if not stopped:
                write_sample(config, state, dataset)
        if jax.process_index() == 0 and int(state.step) > 0:
            console.print_end(run_dir, run_dir / "checkpoints" / str(int(state.step)))


def prepare_data(config: Config, beginning: Beginning) -> Dataset:
    """What the run trains on, the same in all processes, which call this together; tells how often it goes through it.

    Raises:
        UserError: as of `prepare`, or processes have other data, or a prompt is not one for the model.
    """
    dataset = prepare(config, log=console.log, log_work=console.log_own, tokenizer=beginning.origin.tokenizer)
    fingerprints = repr((dataset.fingerprint, dataset.stage_fingerprints))
    same = {"data (documents or tokenizer)": fingerprints, "tokenized documents": dataset.content}
    check_same_everywhere(same)
    dataset.passes.check(config.data.sources, config.train.num_steps)
    if config.sample.prompt is not None:
        encode_prompt(dataset.tokenizer, config.sample.prompt, config.data.seq_len)
        if Prompt(config.sample.prompt).has_special(dataset.tokenizer):
            console.log("note       sample.prompt: special tokens in it are read as text")
    epochs = dataset.epochs(config.train.num_steps, beginning.passed_over)
    of_sources = ", ".join(f"{n:.2f} of {key}" for key, n in epochs.items())
    console.log(f"epochs     {of_sources} in {config.train.num_steps:,} steps")
    return dataset


def compile_all(config: Config, abstract: TrainState, watchdog: Watchdog) -> tuple[Mapping[int, Compilation], Replicas]:
    """The training step of each length of rows, and what compares replicas; all processes call this together."""
    watchdog.begin("compile")
    runs = resolve_stages(config)
    run_dir = Path(config.run_dir).expanduser().absolute()
    same = (str(run_dir), os.path.expanduser(config.data.cache_dir), os.environ.get("XLA_FLAGS"))
    compilation_cache.start(config.xla.compilation_cache, say, run=repr(same))
    return compile_steps(runs), Replicas(config.recovery, abstract)


def train_to_the_end(trainer: Trainer, beginning: Beginning, asked: Config, abstract: TrainState) -> tuple[TrainState, bool]:
    """Trains to the last step or a request to stop, which it tells of; again from an earlier checkpoint where a step goes
    wrong."""
    config, watchdog, checkpointer = trainer.config, trainer.watchdog, trainer.checkpointer
    watchdog.begin("load")
    restored = None if beginning.found is None else beginning.found.read()
    passed_over: tuple[PassedOver, ...] = beginning.passed_over
    if jax.process_index() == 0:
        write_config(asked, Path(config.run_dir).expanduser() / "config.yaml")
    watchdog.begin("load")
    console.log(f"start      {beginning.described(config)}")
    console.log(f"peak       {peak_flops(config.model.compute_dtype)}")
    with trainer.stop.at_end_of_step():
        while True:
            start = beginning.start_from(restored, config, passed_over)
            checkpointer.go_on_from(start.step)  # before its logs are cut
            everyones("ready")  # the first collective of devices waits for half a minute only
            try:
                return trainer.train(start)
            except GoBack as error:
                bad = error.with_traceback(None)  # whose frames hold the state that went wrong
                del start, restored  # which hold the one that it began with
            watchdog.begin("load")
            restored, passed_over = go_back(bad, config, abstract, checkpointer, passed_over)


def write_sample(config: Config, state: TrainState, dataset: Dataset) -> None:
    """Prints how the trained model goes on from `sample.prompt`, if there is one."""
    if config.sample.prompt is None:
        return
    pieces = stream_text(
        whole_over_data(state.model, config.model.compute_dtype),
        dataset.tokenizer,
        config.sample.prompt,
        max_tokens=config.sample.max_tokens,
        temperature=config.sample.temperature,
        key=state.rng,
        seq_len=config.data.seq_len,
    )
    console.log("sample")
    console.print_stream(config.sample.prompt, pieces)


def main(config: Config, *, dry_run: bool) -> None:
    """Runs, and ends the process."""
    code = exit_code(
        lambda: run(config, dry_run=dry_run),
        memory_remedy="model.remat: full, more train.grad_accum_steps, or a larger mesh.fsdp or mesh.tensor",
        disk=config.run_dir,
        disk_remedy="see to the disk and run the same command again",
    )
    process_ends(config.watchdog)
    end_process(code, distributed=config.distributed.enabled)
