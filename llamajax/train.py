"""Train a Llama: `python -m llamajax.train --config configs/x.yaml`.

Read `run` from top to bottom: it is the whole story of a training run.
"""

if __name__ == "__main__":
    # --help and mistakes in the configuration answer before the seconds that importing jax takes.
    from llamajax.cli import parse_args

    ARGUMENTS = parse_args(prog="python -m llamajax.train")

import functools
import itertools
import math
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.experimental.multihost_utils as multihost
import jax.stages
import numpy as np

import llamajax
from llamajax import checkpoint, console, data, mesh, metrics
from llamajax.cli import config_to_dict, dump_config
from llamajax.config import Config
from llamajax.data.loader import Loader, held_out_batches
from llamajax.errors import ConfigError, DivergedError, UserError
from llamajax.generate import stream_text
from llamajax.model import Llama
from llamajax.sharding import spec
from llamajax.step import TrainState, eval_step, init_state, train_step

OUT_OF_MEMORY_EXIT_CODE = 5

FREE_TO_CHANGE = (
    "run_dir", "mesh", "distributed", "checkpoint", "metrics", "profile", "sample", "data.cache_dir", "data.prefetch_steps",
    "train.grad_accum_steps", "train.eval_every", "train.eval_batches", "train.max_nonfinite_steps", "model.remat",
)  # fmt: skip
"""Settings that a resumed run may change: they do not change what is computed, beyond rounding."""


def run(config: Config, *, dry_run: bool = False) -> None:
    """Trains as `config` says, resuming what its run directory holds; with `dry_run`, stops after compiling.

    Raises:
        UserError: one of `llamajax.errors`, when the configuration, data, machine or checkpoints do not allow it.
    """
    with StopSignal() as stop:
        mesh.start(config)
        console.print_header(config)
        abstract_state = checkpoint.concretise(jax.eval_shape(functools.partial(init_state, config)))
        console.print_parameters(abstract_state.model)
        compiled_step = compile_step(config, abstract_state)
        if dry_run:
            return

        dataset = data.prepare(config, log=console.log)
        run_dir = Path(config.run_dir).expanduser()
        with checkpoint.Checkpointer(run_dir, config.checkpoint) as checkpointer:
            restored = checkpointer.restore(abstract_state)
            if restored is None:
                state, start_step = init_state(config), 0
                console.log(f"start      from scratch, seed {config.seed}")
            else:
                state, start_step = restored.state, restored.step
                check_same_run(config, restored.meta, dataset.fingerprint)
                console.log(f"start      resuming {run_dir} at step {start_step}")
            if jax.process_index() == 0:
                (run_dir / "config.yaml").write_text(dump_config(config))
            train(config, state, start_step, compiled_step, dataset, checkpointer, stop)


def compile_step(config: Config, abstract_state: TrainState) -> jax.stages.Compiled:
    """The training step as one executable; says how long that took and what it needs in memory."""
    train_config = config.train
    shape = (
        train_config.grad_accum_steps,
        train_config.global_batch_size // train_config.grad_accum_steps,
        config.data.seq_len,
    )
    sharding = jax.NamedSharding(jax.sharding.get_mesh(), spec(None, "batch", "seq"))
    names = ("tokens", "targets", "segment_ids", "positions")
    batch = {name: jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding) for name in names}
    started = time.monotonic()
    compiled = train_step.lower(config, abstract_state, batch).compile()
    console.log(f"compile    {time.monotonic() - started:.1f} s; {console.memory_summary(compiled)}")
    return compiled


def train(
    config: Config,
    state: TrainState,
    start_step: int,
    compiled_step: jax.stages.Compiled,
    dataset: data.Dataset,
    checkpointer: checkpoint.Checkpointer,
    stop: "StopSignal",
) -> None:
    """The loop: steps, evaluations, checkpoints, and what is told at the end."""
    num_steps, run_dir = config.train.num_steps, Path(config.run_dir).expanduser()
    saved_step = start_step

    def save(step: int) -> None:
        nonlocal saved_step
        if step != saved_step:
            meta = {
                "llamajax": llamajax.__version__,
                "jax": jax.__version__,
                "config": config_to_dict(config),
                "data": {"position": step * config.train.global_batch_size, "fingerprint": dataset.fingerprint},
                "mesh": dict(jax.sharding.get_mesh().shape),
            }
            checkpointer.save(step, state, meta, dataset.tokenizer.files)
            saved_step = step

    with (
        metrics.MetricsWriter(config, start_step=start_step) as writer,
        Loader(dataset, config, start_step) as loader,
        stop.at_end_of_step(),
    ):
        evaluated: dict[str, float] = {}
        for step in range(start_step + 1, num_steps + 1):
            _profile(config, step - 1)
            _, batch = next(loader)
            state, values = compiled_step(state, batch)
            written = writer.write(step, values, data_wait_s=loader.wait_s)
            check_finite(config, written, checkpointer)
            if _due(step, config.train.eval_every) and step < num_steps:
                evaluated = evaluate(config, state.model, dataset)
                writer.write_eval(step, evaluated)
            if _due(step, config.checkpoint.save_every):
                save(step)
            if stop.requested(step):
                break
        check_finite(config, writer.flush(), checkpointer)
        save(step)
        if step == num_steps and config.train.eval_batches:
            evaluated = evaluate(config, state.model, dataset)
            writer.write_eval(step, evaluated)
        checkpointer.wait()
