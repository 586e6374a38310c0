"""The whole story of a training run: read `run` from top to bottom."""

import functools
import os
from pathlib import Path

import jax

from llamajax.checkpoint.meta import checkpoint_meta
from llamajax.checkpoint.read import Restored, Saved
from llamajax.checkpoint.steps import latest_step
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.file import write_config
from llamajax.config.run import Config
from llamajax.data.rows.dataset import prepare
from llamajax.data.rows.position import PassedOver
from llamajax.generation.completion import encode_prompt, stream_text
from llamajax.generation.prompts import Prompt
from llamajax.parallel import compilation_cache, startup
from llamajax.parallel.zero import whole_over_data
from llamajax.planning.scheduling import Compilation, check_told
from llamajax.processes.exit import end_process, exit_code
from llamajax.processes.peers import check_same_everywhere, everyones, of_first
from llamajax.step.batch import micro_batch_size
from llamajax.step.state import TrainState, abstract_state, init_state
from llamajax.training import elastic
from llamajax.training.bad_steps import GoBack
from llamajax.training.loop import Start, Trainer
from llamajax.training.replicas import Replicas
from llamajax.training.resume import check_data, check_settings
from llamajax.training.rollback import agreed, go_back, read_passed_over
from llamajax.training.stages import check_forms, compile_steps, resolve_stages
from llamajax.training.stop import StopSignal
from llamajax.training.watchdog import Watchdog, process_ends
from llamajax.watch import console
from llamajax.watch.console import say
from llamajax.watch.peak import peak_flops
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.origin import Origin, take_along
from llamajax.weights.pretrained import Pretrained


def run(asked: Config, *, dry_run: bool = False) -> None:
    """Trains as `asked`, resuming what its run directory holds; with `dry_run`, compiles for it and stops.

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
        pretrained = None
        if config.init_from is not None and of_first(latest_step(run_dir)) is None:
            pretrained = open_pretrained(Path(config.init_from))
            pretrained.check(config.model, config.init_changes)
        if dry_run:
            compile_all(config, abstract, watchdog)
            return

        in_background = functools.partial(watchdog.phase, "save")
        with Checkpointer(run_dir, config.checkpoint, on_failure=say, around_commit=in_background) as checkpointer:
            watchdog.keep_stacks()
            passed_over = read_passed_over(run_dir, checkpointer)
            found = checkpointer.find(abstract, passed_over=passed_over)
            if found is not None:
                check_settings(asked, found)
                passed_over = agreed(run_dir, passed_over, found)

            watchdog.begin("load")
            origin = origin_of(config, found, pretrained)
            dataset = prepare(config, log=console.log, log_work=console.log_own, tokenizer=origin.tokenizer)
            fingerprints = repr((dataset.fingerprint, dataset.stage_fingerprints))
            same = {"data (documents or tokenizer)": fingerprints, "tokenized documents": dataset.content}
            check_same_everywhere(same)
            dataset.passes.check(config.data.sources, config.train.num_steps)
            if config.sample.prompt is not None:
                encode_prompt(dataset.tokenizer, config.sample.prompt, config.data.seq_len)
                if Prompt(config.sample.prompt).has_special(dataset.tokenizer):
                    console.log("note       sample.prompt: special tokens in it are read as text")
            meta = checkpoint_meta(asked, dataset, origin.hf, fitted.began)
            if found is not None:
                check_data(asked, found, meta)
            epochs = dataset.epochs(config.train.num_steps, passed_over)
            of_sources = ", ".join(f"{n:.2f} of {key}" for key, n in epochs.items())
            console.log(f"epochs     {of_sources} in {config.train.num_steps:,} steps")

            compilations, replicas = compile_all(config, abstract, watchdog)

            watchdog.begin("load")
            restored = None if found is None else found.read()
            if jax.process_index() == 0:
                write_config(asked, run_dir / "config.yaml")
            watchdog.begin("load")
            if restored is not None:
                console.log(f"start      resuming at step {restored.step}{restored.place}")
            else:
                begins = f"scratch, seed {config.seed}"
                if pretrained is not None:
                    begins = pretrained.about + pretrained.changed_by(config.model)
                console.log(f"start      from {begins}")
            console.log(f"peak       {peak_flops(config.model.compute_dtype)}")
            trainer = Trainer(
                config=config,
                num_eval_rows=config.train.eval_batches * micro_batch_size(asked),
                compilations=compilations,
                replicas=replicas,
                dataset=dataset,
                meta=meta,
                files={**origin.files, **dataset.files},
                checkpointer=checkpointer,
                stop=stop,
                watchdog=watchdog,
            )
            with stop.at_end_of_step():
                while True:
                    start = start_from(restored, config, pretrained, passed_over)
                    checkpointer.go_on_from(start.step)  # before its logs are cut
                    everyones("ready")  # the first collective of devices waits for half a minute only
                    try:
                        state, stopped = trainer.train(start)
                        break
                    except GoBack as error:
                        bad = error.with_traceback(None)  # whose frames hold the state that went wrong
                        del start, restored  # which hold the one that it began with
                    watchdog.begin("load")
                    restored, passed_over = go_back(bad, config, abstract, checkpointer, passed_over)
            watchdog.begin("evaluate")
            if not stopped and config.sample.prompt is not None:
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
        if jax.process_index() == 0 and int(state.step) > 0:
            console.print_end(run_dir, run_dir / "checkpoints" / str(int(state.step)))


def compile_all(config: Config, abstract: TrainState, watchdog: Watchdog) -> tuple[dict[int, Compilation], Replicas]:
    """The training step of each length of rows, and what compares replicas; all processes call this together."""
    watchdog.begin("compile")
    runs = resolve_stages(config)
    run_dir = Path(config.run_dir).expanduser().absolute()
    same = (str(run_dir), os.path.expanduser(config.data.cache_dir), os.environ.get("XLA_FLAGS"))
    compilation_cache.start(config.xla.compilation_cache, say, run=repr(same))
    return compile_steps(runs), Replicas(config, abstract)


def origin_of(config: Config, found: Saved | None, pretrained: Pretrained | None) -> Origin:
    """What the run takes along: of the weights that it begins with, or as its checkpoint has kept it."""
    source = found if pretrained is None else pretrained
    return Origin() if config.init_from is None or source is None else take_along(source.files, source.hf)


def start_from(
    restored: Restored[TrainState] | None, config: Config, pretrained: Pretrained | None, passed_over: tuple[PassedOver, ...]
) -> Start:
    """Where the loop begins: behind a checkpoint, or with the weights that the run begins with."""
    if restored is not None:
        return Start(restored.state, restored.step, passed_over, restored.meta.get("recent_losses", ()))
    assert config.init_from is None or pretrained is not None, "a run that was resumed has a checkpoint to go back to"
    model = None if pretrained is None else load_model(pretrained, config.model)
    return Start(init_state(config, model), passed_over=passed_over)


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
