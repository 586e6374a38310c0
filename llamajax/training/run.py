"""The whole story of a training run: read `run` from top to bottom."""

import os
import time
from pathlib import Path

import jax

from llamajax import data, disk
from llamajax.checkpoint.meta import checkpoint_meta
from llamajax.checkpoint.steps import latest_step
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.file import write_config
from llamajax.config.run import Config
from llamajax.generation.completion import encode_prompt, stream_text
from llamajax.parallel import compilation_cache, startup
from llamajax.parallel.exit import end_process, exit_code
from llamajax.parallel.processes import check_same_everywhere, everyones
from llamajax.parallel.zero import whole_over_data
from llamajax.planning.scheduling import compile_here, fastest_remat
from llamajax.step.compile import lower, told
from llamajax.step.forms import attention_kernel, compute_capability, float8_matmuls, with_forms
from llamajax.step.state import abstract_state, init_state
from llamajax.training.loop import train
from llamajax.training.resume import check_same_run
from llamajax.training.stop import StopSignal
from llamajax.watch import console
from llamajax.watch.console import say
from llamajax.weights.loading import load_model
from llamajax.weights.opening import open_pretrained
from llamajax.weights.origin import Origin, take_along


def run(config: Config, *, dry_run: bool = False) -> None:
    """Trains as `config` says, resuming what its run directory holds; with `dry_run`, stops after compiling.

    Raises:
        UserError: one of `llamajax.errors`, when the configuration, data, machine or checkpoints do not allow it.
    """
    with StopSignal() as stop:
        startup.start(config)
        abstract = abstract_state(config)
        console.print_header(config, abstract.model)
        mesh = jax.sharding.get_mesh().shape
        remat, reason = fastest_remat(config, abstract, say)
        in_forms, forms = with_forms(config.changed({"model.remat": remat}), mesh)
        forms |= {"remat": f"{remat}: {reason}"} if config.model.remat == "auto" else {}
        kernel, warning = attention_kernel(in_forms, mesh, compute_capability())
        matmuls = float8_matmuls(config, compute_capability())
        for setting, form in (forms | {"attention": kernel} | matmuls).items():
            console.log(f"{setting:10} {form}")
        if warning is not None:
            console.log(f"warning    {warning}")
        run_dir = Path(config.run_dir).expanduser()
        pretrained = None
        if config.init_from is not None and everyones(latest_step(run_dir))[0] is None:
            pretrained = open_pretrained(Path(config.init_from))
            pretrained.check(config.model)
        started = time.monotonic()
        same = (str(run_dir.absolute()), os.path.expanduser(config.data.cache_dir), os.environ.get("XLA_FLAGS"))
        compilation_cache.start(config.xla.compilation_cache, say, run=repr(same))
        compilation = compile_here(in_forms, lower(in_forms, abstract))
        console.log(f"options    {told(compilation.options, jax.devices()[0].device_kind)}")
        programs = jax.config.values["jax_compilation_cache_dir"]
        came = f", loaded from {programs}" if compilation.from_cache else ""
        console.log(f"compile    {time.monotonic() - started:.1f} s{came}; {console.memory_summary(compilation.step)}")
        if dry_run:
            return

        with Checkpointer(run_dir, config.checkpoint, on_failure=say) as checkpointer:
            restored = checkpointer.restore(abstract)
            source = restored if pretrained is None else pretrained
            origin = Origin() if config.init_from is None or source is None else take_along(source.files, source.hf)
            dataset = data.prepare(config, log=console.log, log_work=console.log_own, tokenizer=origin.tokenizer)
            same = {"data (documents or tokenizer)": dataset.fingerprint, "tokenized documents": dataset.content}
            check_same_everywhere(same)
            of_sources = ", ".join(f"{n:.2f} of {key}" for key, n in dataset.epochs(config.train.num_rows).items())
            console.log(f"epochs     {of_sources} in {config.train.num_steps:,} steps")
            if config.sample.prompt is not None:
                encode_prompt(dataset.tokenizer, config.sample.prompt, config.data.seq_len)
            meta = checkpoint_meta(config, dataset, origin.hf)
            if restored is not None:
                check_same_run(config, restored, meta)
            if jax.process_index() == 0:
                write_config(config, run_dir / "config.yaml")
            if restored is not None:
                console.log(f"start      resuming at step {restored.step}{restored.place}")
                state, start_step = restored.state, restored.step
            else:
                console.log(f"start      from {f'scratch, seed {config.seed}' if pretrained is None else pretrained.about}")
                model = None if pretrained is None else load_model(pretrained, config.model)
                state, start_step = init_state(config, model), 0
            everyones("ready")  # the first collective of devices waits for half a minute only
            files = {**origin.files, **dataset.files}
            state, stopped = train(config, state, start_step, compilation, dataset, meta, files, checkpointer, stop)
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


def main(config: Config, *, dry_run: bool) -> None:
    """Runs, and ends the process."""
    disk.keep_from_others()
    code = exit_code(
        lambda: run(config, dry_run=dry_run),
        memory_remedy="model.remat: full, more train.grad_accum_steps, or a larger mesh.fsdp or mesh.tensor",
        disk=config.run_dir,
        disk_remedy="see to the disk and run the same command again",
    )
    end_process(code, distributed=config.distributed.enabled)
